"""Lengths of all samples: every record is tokenised once, by all cores, and the counts stay on disk beside the data.

The stored counts give the length for any number of visual tokens and any maximum, so a change of tower or
`--model_max_length` needs no new measurement. Other records, another tokenizer, template or label masking, or other
code that turns text into ids, do need one.

Shapes: N samples, V visual tokens per image.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
import torch
from transformers import PreTrainedTokenizerBase

import llava.conversation
import llava.data.checks
import llava.data.messages
import llava.data.parquet_files
import llava.data.preprocess
import llava.data.turns
import llava.mm_utils
from llava.constants import IMAGE_TOKEN_INDEX
from llava.conversation import Conversation
from llava.data.cache import made_once
from llava.data.parallel import in_processes
from llava.data.records import Record, RecordTable
from llava.mm_utils import expanded_length
from llava.utils.progress import progress

Tokenize = Callable[[int], torch.Tensor]

_PIECE = 256  # records that a process counts at a time
_WORTH_PROCESSES = 4096  # records
_CODE = (
    llava.conversation, llava.data.checks, llava.data.messages, llava.data.parquet_files, llava.data.preprocess,
    llava.data.turns, llava.mm_utils,
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
    return expanded_length(text + images, images, num_visual_tokens)


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
            *(Path(module.__file__).read_text() for module in _CODE),
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
    total = len(records)
    if not isinstance(records, RecordTable):
        return np.array([row for rows in _counted(tokenize, total, show_progress) for row in rows], np.int32)

    def write(target: Path) -> None:
        counts = np.lib.format.open_memmap(target, "w+", np.int32, (total, 3))
        done = 0
        for rows in _counted(tokenize, total, show_progress):
            counts[done : done + len(rows)] = rows
            done += len(rows)
        counts.flush()

    name = f"{records.key[:16]}.{settings.digest()[:16]}.counts.npy"
    return np.load(made_once(name, records.folders, write), mmap_mode="r")


def _counted(tokenize: Tokenize, total: int, show: bool) -> Iterator[np.ndarray]:
    """Yields the counts piece by piece, in order; measured on all cores of this process, if that is worth it."""
    pieces = [range(start, min(start + _PIECE, total)) for start in range(0, total, _PIECE)]
    with progress(total, "measuring lengths", "records", hidden=not show) as bar:
        for rows in in_processes(_count, tokenize, pieces, worth=total >= _WORTH_PROCESSES):
            yield rows
            bar.update(len(rows))


def _count(tokenize: Tokenize, indices: range) -> np.ndarray:
    return np.array([_count_sample(tokenize(index).numpy()) for index in indices], np.int32)


def _count_sample(ids: np.ndarray) -> tuple[int, int, int]:
    placeholders = np.flatnonzero(ids == IMAGE_TOKEN_INDEX)
    return len(ids) - len(placeholders), len(placeholders), int(placeholders[0]) if len(placeholders) else 0
