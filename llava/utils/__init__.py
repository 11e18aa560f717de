"""The names of LLaVA's `llava.utils` that its evaluation programs and clients import."""

from typing import Any


def disable_torch_init() -> None:
    """Does nothing: `load_pretrained_model` fills no weights before it reads them, so there is no time to save."""


def rank0_print(*args: Any) -> None:
    """Prints on the first rank only."""
    from torch import distributed

    if not distributed.is_initialized() or distributed.get_rank() == 0:
        print(*args)


def rank_print(*args: Any) -> None:
    """Prints, and says which rank does, where there are several."""
    from torch import distributed

    print(*([f"rank {distributed.get_rank()}:"] if distributed.is_initialized() else []), *args)
