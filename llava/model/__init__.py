"""The models: LLaVA on the decoders of `llava.model.language_model.families`.

The classes are imported, and registered with Transformers, on first access: code that needs only the names of
projector norms does not wait for Transformers' models.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llava.model.language_model.llava_llama import LlavaLlamaConfig, LlavaLlamaForCausalLM
    from llava.model.language_model.llava_mistral import LlavaMistralConfig, LlavaMistralForCausalLM
    from llava.model.language_model.llava_qwen import LlavaQwenConfig, LlavaQwenForCausalLM

__all__ = [
    "LlavaLlamaConfig",
    "LlavaLlamaForCausalLM",
    "LlavaMistralConfig",
    "LlavaMistralForCausalLM",
    "LlavaQwenConfig",
    "LlavaQwenForCausalLM",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llava.model.language_model import llava_llama, llava_mistral, llava_qwen

    return next(getattr(module, name) for module in (llava_llama, llava_mistral, llava_qwen) if hasattr(module, name))
