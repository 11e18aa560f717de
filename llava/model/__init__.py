"""The models: LLaVA on the decoders of `llava.model.language_model.families`."""

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
