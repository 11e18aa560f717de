"""vLLM's LLaVA with our projector, whose last element is the norm, for folders that `python -m llava.export hf` wrote.

Read and tested with vLLM 0.32.0. All but the projector is vLLM's own `LlavaForConditionalGeneration`.
"""

from vllm.config import VllmConfig
from vllm.model_executor.models.llava import (
    LlavaDummyInputsBuilder,
    LlavaForConditionalGeneration,
    LlavaMultiModalProcessor,
    LlavaProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from llava.export.modeling_llava_norm import LlavaNormProjector


@MULTIMODAL_REGISTRY.register_processor(
    LlavaMultiModalProcessor, info=LlavaProcessingInfo, dummy_inputs=LlavaDummyInputsBuilder
)
class LlavaNormForConditionalGeneration(LlavaForConditionalGeneration):
    """vLLM's LLaVA on `LlavaNormProjector`, which every rank holds whole.

    Raises:
        NotImplementedError: the vision tower is neither CLIP nor SigLIP; vLLM's LLaVA has no others.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        config = vllm_config.model_config.hf_config
        config.projector_hidden_act = "gelu"  # else vLLM's own projector, made first, finds the folder's guard there
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        with self._mark_tower_model(vllm_config, "image"):
            self.multi_modal_projector = LlavaNormProjector(config)
