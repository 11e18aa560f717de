"""LLaVA's import path of the classes on Llama; `llava.model.language_model.families` makes them."""

from llava.model.language_model.families import LLAVA_CLASSES

LlavaLlamaConfig, LlavaLlamaModel, LlavaLlamaForCausalLM = LLAVA_CLASSES["llava_llama"]
