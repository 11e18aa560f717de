"""The models: LLaVA on the decoders of `llava.model.language_model.families`.

The classes are imported, and registered with Transformers, on first access: code that needs only the names of
projector norms does not wait for Transformers' models.
"""

from typing import Any

_EXPORTED = [f"Llava{name}{suffix}" for name in ("Llama", "Mistral", "Qwen") for suffix in ("Config", "ForCausalLM")]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llava.model.language_model import families

    return getattr(families, name)
