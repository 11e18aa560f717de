"""The folder that an export writes: it appears under its name when it is whole."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

EXPORT_FILE = "export.json"
"""In a folder that an export has written to its end: what it was made of."""


@contextlib.contextmanager
def whole_folder(output_dir: Path, command: str, model_path: str) -> Iterator[Path]:
    """A folder beside `output_dir` to write into, which takes its name at the end; an earlier export there goes.

    Raises:
        ValueError: `output_dir` holds something else than an earlier export of the same checkpoint.
    """
    source = {"command": command, "checkpoint": Path(model_path).name, "digest": digest_of(model_path)}
    check_output(output_dir, source)
    partial = output_dir.with_name(f".{output_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        (partial / EXPORT_FILE).write_text(json.dumps(source, indent=2) + "\n")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    earlier = output_dir.with_name(f".{output_dir.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if output_dir.exists():
        output_dir.rename(earlier)
    partial.rename(output_dir)
    shutil.rmtree(earlier, ignore_errors=True)


def digest_of(model_path: str) -> str:
    """Tells one checkpoint from another by its config and the sizes of its weight files; a hub id by itself."""
    folder = Path(model_path)
    if not folder.is_dir():
        return hashlib.sha256(model_path.encode()).hexdigest()
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    return digest.hexdigest()


def check_output(output_dir: Path, source: dict[str, str]) -> None:
    """Raises ValueError where `output_dir` is there, and neither empty nor an earlier export from the same source."""
    if not output_dir.exists() or (output_dir.is_dir() and not any(output_dir.iterdir())):
        return
    file = output_dir / EXPORT_FILE
    if not file.is_file() or json.loads(file.read_text()) != source:
        raise ValueError(
            f"--output-dir {output_dir}: already there and neither empty nor an earlier export of this checkpoint; "
            "give another one"
        )
