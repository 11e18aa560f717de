"""vLLM's LLaVA with the norm that ends the projector, for folders that `python -m llava.export hf` wrote.

Read and tested with vLLM 0.32.0, whose `LlavaForConditionalGeneration` it takes as it is but for that one module.
"""

from vllm.config import VllmConfig
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from llava.export.modeling_llava_norm import build_norm


@MULTIMODAL_REGISTRY.register_processor(
    LlavaMultiModalProcessor, info=LlavaProcessingInfo, dummy_inputs=LlavaDummyInputsBuilder
)
class LlavaNormForConditionalGeneration(LlavaForConditionalGeneration):
    """vLLM's LLaVA whose visual tokens pass the norm, `multi_modal_projector.norm`, before they enter the LLM."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.multi_modal_projector.norm = build_norm(vllm_config.model_config.hf_config)
        # A hook, because the projector is made inside; it keeps tensor parallelism and LoRA of its layers.
        self.multi_modal_projector.register_forward_hook(lambda projector, _, tokens: projector.norm(tokens))
