"""Lengths of all samples: every record is tokenised once, by all cores, and the counts stay on disk beside the data.

The stored counts give the length for any number of visual tokens and any maximum, so a change of tower or
`--model_max_length` needs no new measurement. Other records, another tokenizer, template or label masking, or other
code that turns text into ids, do need one.

Shapes: N samples, V visual tokens per image.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
import torch
from transformers import PreTrainedTokenizerBase

import llava
from llava.constants import IMAGE_TOKEN_INDEX
from llava.conversation import Conversation
from llava.data.cache import made_once
from llava.data.parallel import in_processes
from llava.data.records import Record, RecordTable
from llava.utils.progress import progress

Tokenize = Callable[[int], torch.Tensor]

_PIECE = 256  # records that a process counts at a time
_WORTH_PROCESSES = 4096  # records
_CODE = (
    "conversation", "mm_utils", "data/checks", "data/messages", "data/parquet_files", "data/preprocess", "data/turns"
)  # fmt: skip


def lengths_from_counts(counts: np.ndarray, num_visual_tokens: int | np.ndarray, model_max_length: int) -> np.ndarray:
    """Length [N] of every sample after expansion and cut; negative where no image is left (LLaVA's convention).

    Args:
        counts: [N, 3], from `token_counts`.
        num_visual_tokens: visual tokens of an image; an array [N] where they differ from sample to sample.
        model_max_length: length at which samples are cut.
    """
    lengths = np.minimum(whole_lengths(counts, num_visual_tokens), model_max_length)
    return np.where((counts[:, 1] > 0) & (counts[:, 2] < model_max_length), lengths, -lengths)


def whole_lengths(counts: np.ndarray, num_visual_tokens: int | np.ndarray) -> np.ndarray:
    """Length [N] of every sample after expansion, not cut."""
    text, images = counts[:, :2].astype(np.int64).T
    return text + images * num_visual_tokens


class Tokenization(NamedTuple):
    """What decides a record's token ids, besides the record itself."""

    tokenizer: PreTrainedTokenizerBase
    template: Conversation
    label_masking: str

    def digest(self) -> str:
        """SHA-256 of these settings and of the code that turns text into ids."""
        tokenizer = self.tokenizer
        settings = [
            tokenizers.__version__,
            type(tokenizer).__name__,
            repr((tokenizer.bos_token, tokenizer.split_special_tokens)),
            tokenizer.backend_tokenizer.to_str(),
            repr(self.template),
            self.label_masking,
            *(Path(llava.__path__[0], f"{module}.py").read_text() for module in _CODE),
        ]
        return sha256("\0".join(settings).encode()).hexdigest()


def token_counts(
    records: Sequence[Record], tokenize: Tokenize, settings: Tokenization, show_progress: bool
) -> np.ndarray:
    """Text tokens, images, and text tokens before the first image of every sample, int32 [N, 3].

    Args:
        records: a list is measured at every call; a `RecordTable` once, and its counts are then mapped from the cache.
        tokenize: gives the ids [S] of the sample with an index, not yet cut; it is sent to other processes.
        settings: what decides the ids, besides the records.
        show_progress: whether measuring shows a progress bar.
    """

    def measured() -> np.ndarray:
        pieces = [range(start, min(start + _PIECE, len(records))) for start in range(0, len(records), _PIECE)]
        parts = in_processes(_count, tokenize, pieces, worth=len(records) >= _WORTH_PROCESSES)
        shown = progress(parts, "measuring lengths", "pieces", total=len(pieces), hidden=not show_progress)
        return np.concatenate([np.zeros((0, 3), np.int32), *shown])

    def write(target: Path) -> None:
        with target.open("wb") as file:
            np.save(file, measured())

    if not isinstance(records, RecordTable):
        return measured()
    name = f"{records.key[:16]}.{settings.digest()[:16]}.counts.npy"
    return np.load(made_once(name, records.folders, write), mmap_mode="r")


def _count(tokenize: Tokenize, indices: range) -> np.ndarray:
    counts = []
    for index in indices:
        is_image = tokenize(index).numpy() == IMAGE_TOKEN_INDEX
        images = int(is_image.sum())
        counts.append((len(is_image) - images, images, int(is_image.argmax())))  # argmax is 0 without images
    return np.array(counts, np.int32)
