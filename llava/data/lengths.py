"""Lengths of all samples: every record is tokenised once, by all cores, and the counts stay on disk beside the data.

Where the visual tokens depend on a picture's size, the sizes are read from the headers and kept in the same way.

The stored counts give the length for any number of visual tokens and any maximum, so a change of tower or
`--model_max_length` needs no new measurement. Other records, another tokenizer, template or label masking, or other
code that turns text into ids, do need one.

Shapes: N samples, V visual tokens per image.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, TypeVar

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
State = TypeVar("State")

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
    count = partial(_counted, _count, tokenize, "measuring lengths", show_progress)
    return _measured(records, 3, lambda: f"{settings.digest()[:16]}.counts", count)


def image_sizes(
    records: Sequence[Record],
    size_of: Callable[[int], tuple[int, int]],
    settings: Callable[[], str],
    show_progress: bool,
) -> np.ndarray:
    """Width and height of every sample's picture, int32 [N, 2]; zeros where `size_of` gives zeros.

    Args:
        records, show_progress: see `token_counts`; the sizes are cached as the counts are.
        size_of: gives width and height for the sample with an index; it is sent to other processes.
        settings: gives a text that identifies where the pictures come from.
    """
    count = partial(_counted, _measure, size_of, "measuring pictures", show_progress)
    return _measured(records, 2, lambda: f"{sha256(settings().encode()).hexdigest()[:16]}.sizes", count)


def _measured(
    records: Sequence[Record], width: int, name: Callable[[], str], count: Callable[[int], Iterator[np.ndarray]]
) -> np.ndarray:
    """What `count` gives for all records [N, width]; for a `RecordTable` from a cached file, whose name has `name`."""
    total = len(records)
    if not isinstance(records, RecordTable):
        return np.array([row for rows in count(total) for row in rows], np.int32).reshape(-1, width)
    is_whole = partial(_is_whole, shape=(total, width))
    write = partial(_write, count, (total, width))
    return np.load(made_once(f"{records.key[:16]}.{name()}.npy", records.folders, write, is_whole), mmap_mode="r")


def _is_whole(path: Path, shape: tuple[int, int]) -> bool:
    try:
        return np.load(path, mmap_mode="r").shape == shape
    except (OSError, ValueError, EOFError):
        return False


def _write(count: Callable[[int], Iterator[np.ndarray]], shape: tuple[int, int], target: Path) -> None:
    counts = np.lib.format.open_memmap(target, "w+", np.int32, shape)
    done = 0
    for rows in count(shape[0]):
        counts[done : done + len(rows)] = rows
        done += len(rows)
    counts.flush()


def _counted(
    function: Callable[[State, range], np.ndarray], state: State, title: str, show: bool, total: int
) -> Iterator[np.ndarray]:
    """Yields what `function` finds, piece by piece, in order; on all cores of this process, if that is worth it."""
    pieces = [range(start, min(start + _PIECE, total)) for start in range(0, total, _PIECE)]
    with progress(total, title, "records", hidden=not show) as bar:
        for rows in in_processes(function, state, pieces, worth=total >= _WORTH_PROCESSES):
            yield rows
            bar.update(len(rows))


def _measure(size_of: Callable[[int], tuple[int, int]], indices: range) -> np.ndarray:
    return np.array([size_of(index) for index in indices], np.int32)


def _count(tokenize: Tokenize, indices: range) -> np.ndarray:
    return np.array([_count_sample(tokenize(index).numpy()) for index in indices], np.int32)


def _count_sample(ids: np.ndarray) -> tuple[int, int, int]:
    placeholders = np.flatnonzero(ids == IMAGE_TOKEN_INDEX)
    return len(ids) - len(placeholders), len(placeholders), int(placeholders[0]) if len(placeholders) else 0
