"""The names of LLaVA's `llava.utils` that its evaluation programs and clients import."""

import logging
import os
from typing import Any

LOGDIR = "."
"""Folder of the log files of LLaVA's controller, workers and page."""


def disable_torch_init() -> None:
    """Does nothing: `load_pretrained_model` fills no weights before it reads them, so there is no time to save."""


def build_logger(logger_name: str, logger_filename: str) -> logging.Logger:
    """The logger of that name; it writes to stderr and to a file in `LOGDIR`, a new one each day."""
    from logging.handlers import TimedRotatingFileHandler

    logger = logging.getLogger(logger_name)
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        os.makedirs(LOGDIR, exist_ok=True)
        file = TimedRotatingFileHandler(os.path.join(LOGDIR, logger_filename), when="D", utc=True, encoding="utf-8")
        for handler in (logging.StreamHandler(), file):
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            logger.addHandler(handler)
        logger.propagate = False
    return logger


def rank0_print(*args: Any) -> None:
    """Prints on the first rank only."""
    from torch import distributed

    if not distributed.is_initialized() or distributed.get_rank() == 0:
        print(*args)


def rank_print(*args: Any) -> None:
    """Prints, and says which rank does, where there are several."""
    from torch import distributed

    print(*([f"rank {distributed.get_rank()}:"] if distributed.is_initialized() else []), *args)
