"""A mixture of data sets, described by a YAML file: LLaVA-NeXT's form, to which we add weights, names, image folders.

docs/data.md shows the file; `RecordTable.epoch` draws an epoch's records.
"""

import logging
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from glob import glob
from pathlib import Path

import numpy as np
import yaml

from llava.data.checks import starts_from
from llava.data.errors import DataError

logger = logging.getLogger(__name__)

MIXTURES = (".yaml", ".yml")
_KEYS = ("json_path", "sampling_strategy", "weight", "image_folder", "name")
_STRATEGY = re.compile(r"(first|end|random):(\d+(?:\.\d+)?)(%?)")


@dataclass(frozen=True)
class Entry:
    """One data set of a mixture; `strategy` is LLaVA-NeXT's, with a number of records or a percentage."""

    data_path: str
    name: str
    strategy: tuple[str, Decimal, bool]
    weight: float | None
    image_folder: str | None

    def chosen(self, total: int, seed: list[int]) -> np.ndarray:
        """The ascending indices of those of `total` records that are used; a share is rounded up as in LLaVA-NeXT."""
        kind, number, is_share = self.strategy
        count = min(math.ceil(number * total / 100) if is_share else int(number), total)
        if kind == "random":
            return np.sort(np.random.default_rng(seed).permutation(total)[:count])
        return np.arange(total - count, total) if kind == "end" else np.arange(count)


@dataclass(frozen=True)
class Mixture:
    """The content of a YAML file, and the seed of what is drawn."""

    path: Path
    entries: tuple[Entry, ...]
    epoch_samples: int | None
    seed: int


def read_mixture(path: Path, seed: int) -> Mixture:
    """The mixture that a YAML file describes; `seed` is that of `random` sampling, and of what weights draw.

    Raises:
        DataError: an image folder does not exist, or the file is not a mixture; the message names the file, and the
            entry or the line.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(path, f"no such file{starts_from(path)}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(path, f"not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not isinstance(content.get("datasets"), list) or not content["datasets"]:
        raise DataError(path, f"expected a list of data sets under 'datasets', found {content!r:.80}")
    if unknown := [key for key in content if key not in ("datasets", "epoch_samples")]:
        raise DataError(path, f"unknown key {unknown[0]!r}; expected datasets, epoch_samples")
    entries: list[Entry] = []
    for number, fields in enumerate(content["datasets"]):
        name = fields.get("name") or fields.get("json_path") if isinstance(fields, dict) else None
        try:
            entries.append(_entry(path, fields, entries))
        except ValueError as error:
            raise DataError(entry_name(path, number, name), str(error)) from None
    samples = content.get("epoch_samples")
    if samples is not None and (type(samples) is not int or samples < 1 or entries[0].weight is None):
        expected = "expected a number of 1 or more, and a 'weight' in every entry"
        raise DataError(path, f"'epoch_samples' is {samples!r}; {expected}")
    return Mixture(path, tuple(entries), samples, seed)


def _entry(path: Path, fields: object, before: list[Entry]) -> Entry:
    """The entry with these `fields`, which comes after those `before`; raises ValueError where they are wrong."""
    if not isinstance(fields, dict):
        raise ValueError(f"expected a mapping with 'json_path', found {fields!r:.80}")
    if unknown := [key for key in fields if key not in _KEYS]:
        raise ValueError(f"unknown key {unknown[0]!r}; expected {', '.join(_KEYS)}")
    for key in ("json_path", "image_folder", "name"):
        value = fields.get(key)
        if (key == "json_path" or value is not None) and not (isinstance(value, str) and value):
            raise ValueError(f"{key!r} is {value!r:.80}; expected a text")
    weight, folder = fields.get("weight"), fields.get("image_folder")
    if weight is not None and not (type(weight) in (int, float) and 0 < weight < math.inf):
        raise ValueError(f"'weight' is {weight!r:.80}; expected a number above 0")
    if before and (weight is None) != (before[0].weight is None):
        raise ValueError("some entries have a 'weight', and others have none; give all a weight, or none")
    if folder is not None and not Path(folder := _place(path, folder)).exists():
        raise ValueError(f"image_folder {folder}: no such folder or zip file{starts_from(folder)}")
    data_path = ",".join(_place(path, part.strip()) for part in fields["json_path"].split(","))
    name = fields.get("name") or Path(fields["json_path"]).stem
    if name in (names := [entry.name for entry in before]):
        raise ValueError(f"has the name of entry {names.index(name)}; give them names under 'name'")
    return Entry(data_path, name, _strategy(fields.get("sampling_strategy", "all")), weight, folder)


def _strategy(text: object) -> tuple[str, Decimal, bool]:
    if match := _STRATEGY.fullmatch("first:100%" if text == "all" else str(text)):
        number, is_share = Decimal(match[2]), bool(match[3])
        if 0 < number <= 100 if is_share else number >= 1 and number == int(number):
            return match[1], number, is_share
    expected = "all, first:N, end:N or random:N; N a whole number from 1, or a percentage up to 100 as in random:25%"
    raise ValueError(f"'sampling_strategy' is {text!r:.80}; expected {expected}")


def _place(path: Path, name: str) -> str:
    """The path of a name in the file: from the working directory, as in LLaVA-NeXT, or else from the file's folder."""
    beside = str(path.parent / name)
    here, there = (bool(Path(place).exists() or glob(place, recursive=True)) for place in (name, beside))
    if here and there and Path(name).resolve() != Path(beside).resolve():
        logger.warning("%s: %s is taken from the working directory %s, not %s", path, name, Path.cwd(), beside)
    return name if here or not there else beside


def entry_name(path: Path, number: int, name: object = None) -> str:
    """The name of a mixture's entry in messages."""
    return f"{path}: entry {number}" + (f" ({name!s:.100})" if name else "")
