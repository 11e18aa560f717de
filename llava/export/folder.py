"""The folder that an export writes: it appears under its name only when it is complete."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from llava.utils.digests import revision

EXPORT_FILE = "export.json"
"""Says what a folder was made of."""


@contextlib.contextmanager
def whole_folder(output_dir: Path, command: str, model_path: str) -> Iterator[Path]:
    """Yields a folder beside `output_dir` to write into, which takes the name `output_dir` at the end.

    Raises:
        ValueError: `output_dir` is not empty, or another export writes there.
        OSError: it cannot be written.
    """
    target = output_dir.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    lock, partial = (target.with_name(f".{target.name}.{part}") for part in ("lock", "partial"))
    source = {"command": command, "checkpoint": Path(model_path).name, "content": revision(model_path) or model_path}
    try:
        with FileLock(lock, timeout=0):
            try:
                if target.exists() and (not target.is_dir() or any(target.iterdir())):
                    raise ValueError(f"--output-dir {output_dir}: not an empty folder; remove it, or give another one")
                shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
                partial.mkdir()
                yield partial
                (partial / EXPORT_FILE).write_text(json.dumps(source, indent=2) + "\n")
                partial.rename(target)
            except SafetensorError as error:
                raise OSError(f"--output-dir {output_dir}: {error}") from error
            finally:
                shutil.rmtree(partial, ignore_errors=True)
                lock.unlink(missing_ok=True)
    except Timeout:
        raise ValueError(f"--output-dir {output_dir}: another export writes it") from None
