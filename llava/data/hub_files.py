"""Data sets that the `datasets` library reads, by name or folder, as the Parquet shards that training reads by row.

`hf:owner/name[split]`, `hf:owner/name:config[split]`, `hf:/a/folder[split]`; the split is `train` where none is named.
A data set that consists of Parquet files is read from these files, in the library's cache if they were downloaded.
Any other, and a part of a split (`train[:10%]`), is written as Parquet once, shard by shard. Pictures that are files of
the data set itself, as in an image folder, are written as bytes; other pictures stay bytes or paths, as they are. None
is decoded.
"""

import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from llava.data.cache import cache_folders, made_once
from llava.data.checks import IMAGE_KEYS, starts_from
from llava.data.errors import DataError

if TYPE_CHECKING:
    import datasets  # which takes seconds, and may be missing

_NAME = re.compile(r"hf:(?P<path>[^:\[\]]+)(:(?P<config>[^:\[\]]+))?(\[(?P<split>.+)\])?")
_SHARD = 1 << 29  # bytes of a shard that is written
_GROUP_ROWS, _GROUP_BYTES = 100, 1 << 21  # of a row group, about; image bytes are read from its start
_READ_ROWS = 4  # rows that are read at a time
_FORMAT = 2  # of the written shards; to be raised when it changes


def is_hub_name(name: str) -> bool:
    """Whether a part of `--data_path` names a data set for the `datasets` library."""
    return name.startswith("hf:")


def hub_shards(name: str, cache_dir: str | None = None) -> list[Path]:
    """The Parquet files of a data set's split, in order; downloaded or written if they are not there yet.

    Args:
        name: `hf:` and a data set, as the module describes it.
        cache_dir: where written shards are kept; by default the user's cache folder.

    Raises:
        DataError: there is no such data set, folder or split, it cannot be read, the name is malformed, or the library
            is not installed.
    """
    path, config, split = _parts(name)
    try:
        import datasets
    except ImportError:
        raise DataError(name, "needs the datasets library; pip install 'datasets>=4'") from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if any(Path(path, file).is_file() for file in ("state.json", "dataset_dict.json")):
            return _written(_saved(datasets, path, split), path, cache_dir)
        return _shards(datasets, path, config, split or "train", cache_dir)
    except (ValueError, OSError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
        raise DataError(name, _in_a_line(error)) from error


def _parts(name: str) -> tuple[str, str | None, str | None]:
    """Folder or name on the hub, config and split."""
    match = _NAME.fullmatch(name)
    path, config, split = match.group("path", "config", "split") if match else ("", None, None)
    path = str(Path(path).expanduser()) if path else ""
    is_folder = bool(path) and Path(path).is_dir()
    if not is_folder and (path.startswith((".", "/")) or path.count("/") > 1):
        raise DataError(name, f"no such folder{starts_from(path)}")
    if not is_folder and path.count("/") != 1:  # the library has its own readers under names such as csv
        raise DataError(name, "expected hf:OWNER/NAME[SPLIT], hf:OWNER/NAME:CONFIG[SPLIT] or a folder")
    return str(Path(path).absolute()) if is_folder else path, config, split


def _saved(datasets: ModuleType, path: str, split: str | None) -> "datasets.Dataset":
    """The split of what `save_to_disk` wrote: a data set, or several by the names of their splits."""
    data = datasets.load_from_disk(path)
    if not isinstance(data, datasets.DatasetDict):
        data = {str(data.split or "train"): data}
    if (split or "train") in data:
        return data[split or "train"]
    if split is None and len(data) == 1:
        return next(iter(data.values()))
    raise ValueError(f"no split {split or 'train'!r}; it has {', '.join(map(repr, data))}")


def _shards(datasets: ModuleType, path: str, config: str | None, split: str, cache_dir: str | None) -> list[Path]:
    builder = datasets.load_dataset_builder(path, config)
    files = builder.config.data_files or {}
    if builder.name.startswith("parquet") and split in files:
        return list(map(Path, datasets.DownloadManager().download(list(files[split]))))
    return _written(datasets.load_dataset(path, config, split=split), path, cache_dir)


def _written(data: "datasets.Dataset", path: str, cache_dir: str | None) -> list[Path]:
    """The shards of `data`, a data set that is mapped from disk; written if they are not there yet."""
    name = f"{re.sub('[^A-Za-z0-9._-]+', '-', path).strip('-')[-80:]}.{data._fingerprint}"
    count = max(1, -(-data.data.nbytes // _SHARD))
    folders = cache_folders(Path.home(), cache_dir)[-1:]
    write = partial(_write, data, _own_folders(path), count)
    return [
        made_once(f"{name}.{_FORMAT}-{i:05d}-of-{count:05d}.parquet", folders, partial(write, i), _is_whole)
        for i in range(count)
    ]


def _own_folders(path: str) -> list[Path]:
    """The folders where a data set's own files may be: its folder, and where the library downloads and unpacks."""
    import datasets
    from huggingface_hub.constants import HF_HUB_CACHE

    places = (datasets.config.DOWNLOADED_DATASETS_PATH, datasets.config.EXTRACTED_DATASETS_PATH, HF_HUB_CACHE)
    return [Path(place).resolve() for place in (*places, *([path] if Path(path).is_dir() else []))]


def _write(data: Any, own: list[Path], count: int, number: int, target: Path) -> None:
    part = data.shard(count, number, contiguous=True).with_format("arrow")  # as it is stored: nothing is decoded
    schema = part.features.arrow_schema
    columns = [name for name in IMAGE_KEYS if name in schema.names and "struct<bytes: " in str(schema.field(name).type)]
    group: list[pa.Table] = []
    with pq.ParquetWriter(target, schema) as writer:
        for rows in part.iter(_READ_ROWS):
            for name in columns:
                values = pa.array([_embedded(value, own) for value in rows[name].to_pylist()], schema.field(name).type)
                rows = rows.set_column(rows.column_names.index(name), schema.field(name), values)
            group.append(rows)
            if len(group) * _READ_ROWS >= _GROUP_ROWS or sum(rows.nbytes for rows in group) >= _GROUP_BYTES:
                writer.write_table(pa.concat_tables(group).combine_chunks())
                group = []
        if group:
            writer.write_table(pa.concat_tables(group).combine_chunks())


def _embedded(value: Any, own: list[Path]) -> Any:
    """A row's picture or list of pictures; those that are files in one of the folders `own` get their bytes."""
    if isinstance(value, list):
        return [_embedded(picture, own) for picture in value]
    if not isinstance(value, dict) or value.get("bytes") is not None or not value.get("path"):
        return value
    path = Path(value["path"])
    is_own = path.is_absolute() and path.is_file() and any(map(path.resolve().is_relative_to, own))
    return value | {"bytes": path.read_bytes(), "path": path.name} if is_own else value


def _is_whole(path: Path) -> bool:
    try:
        return pq.read_metadata(path).num_rows >= 0
    except (pa.ArrowException, OSError):
        return False


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{error}{f' ({error.__cause__})' if error.__cause__ else ''}".split())
