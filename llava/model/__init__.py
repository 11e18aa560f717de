"""The models: LLaVA on Llama-type and Qwen2-type decoders."""

from llava.model.language_model.llava_llama import LlavaLlamaConfig, LlavaLlamaForCausalLM
from llava.model.language_model.llava_qwen import LlavaQwenConfig, LlavaQwenForCausalLM

__all__ = ["LlavaLlamaConfig", "LlavaLlamaForCausalLM", "LlavaQwenConfig", "LlavaQwenForCausalLM"]
