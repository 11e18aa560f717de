"""A LLaVA training tree whose projector may end in a norm layer aligned with the text embeddings."""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llava.compare.recipe import Recipe
    from llava.model.language_model.llava_llama import LlavaLlamaForCausalLM

__all__ = ["LlavaLlamaForCausalLM", "Recipe"]

if sys.stderr is None or not sys.stderr.isatty():  # before a library is imported: its bars would be redrawn into a log
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def __getattr__(name: str) -> Any:
    # LLaVA's programs import the class from here; everything else can do without Transformers' models.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Recipe":
        from llava.compare.recipe import Recipe

        return Recipe
    from llava.model.language_model.llava_llama import LlavaLlamaForCausalLM

    return LlavaLlamaForCausalLM
