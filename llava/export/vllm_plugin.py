"""vLLM's entry point of this package (group `vllm.general_plugins`): registers exports whose projector ends in a norm.

The model's class is named, not imported: vLLM imports it where it needs it, in a process of its own.
"""

ARCHITECTURE = "LlavaNormForConditionalGeneration"
MODEL = f"llava.export.vllm_model:{ARCHITECTURE}"


def register() -> None:
    """Registers config and model; vLLM calls it in each of its processes, perhaps more than once."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from llava.export.modeling_llava_norm import LlavaNormConfig

    AutoConfig.register(LlavaNormConfig.model_type, LlavaNormConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, MODEL)
