"""LLaVA's import path of the classes on Qwen; `llava.model.language_model.families` makes them."""

from llava.model.language_model.families import LLAVA_CLASSES

LlavaQwenConfig, LlavaQwenModel, LlavaQwenForCausalLM = LLAVA_CLASSES["llava_qwen"]
