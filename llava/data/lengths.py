"""Lengths of all samples: every record is tokenised once, by all cores, and the counts stay on disk beside the data.

Kept is what the length follows from for any number of visual tokens and any maximum, so another tower or another
`--model_max_length` measures nothing again. Other records, another tokenizer, template or label masking, and other code
that turns text into ids, do.

Shapes: N samples, V visual tokens per image.
"""

from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tqdm import tqdm

import llava.conversation
import llava.data.checks
import llava.data.parquet_files
import llava.data.preprocess
import llava.data.turns
import llava.mm_utils
from llava.constants import IMAGE_TOKEN_INDEX
from llava.data.cache import made_once
from llava.data.parallel import in_processes
from llava.data.records import RecordTable

_PIECE = 256  # records that a process counts at a time
_WORTH_PROCESSES = 4096  # records
_CODE = (
    llava.conversation, llava.data.checks, llava.data.parquet_files, llava.data.preprocess, llava.data.turns,
    llava.mm_utils,
)  # fmt: skip


def lengths_from_counts(counts: np.ndarray, num_visual_tokens: int, model_max_length: int) -> np.ndarray:
    """Length [N] of every sample after expansion and cut; negative where no image is left (LLaVA's convention).

    Args:
        counts: [N, 3], from `token_counts`.
        num_visual_tokens: V.
        model_max_length: samples are cut there.
    """
    text, images, before_image = counts.astype(np.int64).T
    lengths = np.minimum(text + images * num_visual_tokens, model_max_length)
    return np.where((images > 0) & (before_image < model_max_length), lengths, -lengths)


def whole_lengths(counts: np.ndarray, num_visual_tokens: int) -> np.ndarray:
    """Length [N] of every sample after expansion, not cut."""
    return counts[:, 0].astype(np.int64) + counts[:, 1].astype(np.int64) * num_visual_tokens


def token_counts(dataset: Any) -> np.ndarray:
    """Text tokens, images, and text tokens before the first image of every sample, int32 [N, 3].

    Args:
        dataset: a `LazySupervisedDataset`. Records in memory are measured; those of a `RecordTable` once, and the
            counts are then mapped from its cache.
    """
    records = dataset.records
    if not isinstance(records, RecordTable):
        return np.array([row for rows in _counted(dataset) for row in rows], np.int32).reshape(-1, 3)
    name = f"{records.key[:16]}.{_settings_hash(dataset)[:16]}.counts.npy"
    is_whole = partial(_is_whole, shape=(len(records), 3))
    return np.load(made_once(name, records.folders, partial(_write, dataset), is_whole), mmap_mode="r")


def _settings_hash(dataset: Any) -> str:
    """Of everything beside the records that decides their ids."""
    tokenizer = dataset.tokenizer
    settings = [
        tokenizers.__version__,
        type(tokenizer).__name__,
        repr((tokenizer.bos_token, tokenizer.split_special_tokens)),
        tokenizer.backend_tokenizer.to_str(),
        repr(dataset.template),
        dataset.label_masking,
        *(Path(module.__file__).read_text() for module in _CODE),
    ]
    return sha256("\0".join(settings).encode()).hexdigest()


def _is_whole(path: Path, shape: tuple[int, int]) -> bool:
    try:
        return np.load(path, mmap_mode="r").shape == shape
    except (OSError, ValueError, EOFError):
        return False


def _write(dataset: Any, target: Path) -> None:
    counts = np.lib.format.open_memmap(target, "w+", np.int32, (len(dataset), 3))
    done = 0
    for rows in _counted(dataset):
        counts[done : done + len(rows)] = rows
        done += len(rows)
    counts.flush()


def _counted(dataset: Any) -> Iterator[np.ndarray]:
    """The counts, piece by piece, in order; by all cores that this process may use, where that is worth starting."""
    starts = range(0, len(dataset), _PIECE)
    with tqdm(total=len(dataset), desc="measuring lengths", disable=not dataset.show_progress, mininterval=2) as bar:
        for rows in in_processes(_count, dataset, starts, worth=len(dataset) >= _WORTH_PROCESSES):
            yield rows
            bar.update(len(rows))


def _count(dataset: Any, start: int) -> np.ndarray:
    stop = min(start + _PIECE, len(dataset))
    return np.array([_count_sample(dataset.tokenize(i).input_ids.numpy()) for i in range(start, stop)], np.int32)


def _count_sample(ids: np.ndarray) -> tuple[int, int, int]:
    placeholders = np.flatnonzero(ids == IMAGE_TOKEN_INDEX)
    return len(ids) - len(placeholders), len(placeholders), int(placeholders[0]) if len(placeholders) else 0
