"""LLaVA's import path of the classes on Mistral; `llava.model.language_model.families` makes them."""

from llava.model.language_model.families import LLAVA_CLASSES

LlavaMistralConfig, LlavaMistralModel, LlavaMistralForCausalLM = LLAVA_CLASSES["llava_mistral"]
