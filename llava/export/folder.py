"""The folder that an export writes: it appears under its name only when it is complete."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from llava.utils.digests import revision
from llava.utils.files import replace_folder

EXPORT_FILE = "export.json"
"""Marks a folder whose export was completed; says what it was made of, and which files are the export's."""


@contextlib.contextmanager
def whole_folder(output_dir: Path, command: str, model_path: str) -> Iterator[Path]:
    """Yields a folder beside `output_dir` to write into, which takes the name `output_dir` at the end.

    It replaces an earlier export there; files that were added to that one, such as a model card, are kept.

    Raises:
        ValueError: `output_dir` holds something other than an earlier export of the same checkpoint, or another export
            writes there.
        OSError: it cannot be written.
    """
    target = output_dir.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    lock, partial, earlier = (target.with_name(f".{target.name}.{part}") for part in ("lock", "partial", "earlier"))
    source: dict[str, object] = {"command": command, "checkpoint": Path(model_path).name}
    source["content"] = revision(model_path) or model_path
    try:
        with FileLock(lock, timeout=0):
            if earlier.exists() and not target.exists():  # an export was killed between two names
                earlier.rename(target)
            added = added_files(output_dir, source)
            for left in (partial, earlier):  # by an export that was killed
                shutil.rmtree(left, ignore_errors=True)
            try:
                partial.mkdir()
                yield partial
                source["files"] = sorted(path.name for path in partial.iterdir())
                (partial / EXPORT_FILE).write_text(json.dumps(source, indent=2) + "\n")
                for path in added:
                    if not (partial / path.name).exists():
                        (shutil.copytree if path.is_dir() else shutil.copy2)(path, partial / path.name)
                replace_folder(partial, target, earlier)
            except SafetensorError as error:
                raise OSError(f"--output-dir {output_dir}: {error}") from error
            finally:
                for left in (partial, earlier):
                    shutil.rmtree(left, ignore_errors=True)
                lock.unlink(missing_ok=True)
    except Timeout:
        raise ValueError(f"--output-dir {output_dir}: another export writes it") from None


def added_files(output_dir: Path, source: dict[str, object]) -> list[Path]:
    """What is in `output_dir` besides the files of an earlier export from the same source.

    Raises:
        ValueError: the folder is not empty, and no export from that source wrote it.
    """
    if not output_dir.exists() or (output_dir.is_dir() and not any(output_dir.iterdir())):
        return []
    try:
        earlier = json.loads((output_dir / EXPORT_FILE).read_text())
        own = [EXPORT_FILE, *earlier.pop("files")]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        earlier, own = None, []
    if earlier != source:
        raise ValueError(
            f"--output-dir {output_dir}: already there and neither empty nor an earlier export of this checkpoint; "
            "give another one"
        )
    return [path for path in output_dir.iterdir() if path.name not in own]
