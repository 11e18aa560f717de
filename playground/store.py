"""Complete-or-absent output folders: built next to their place, with a manifest, and renamed once complete."""

import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llava.utils.files import write_json
from llava.utils.locks import locked
from llava.utils.paths import ROOT

MANIFEST = "manifest.json"


class PlaygroundError(RuntimeError):
    """A fault that the user can fix; the message says how."""


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the folder's manifest, or None where there is none that can be read."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None


def inventory(folder: Path) -> dict[str, int]:
    """Return bytes per file, and the number of files per sub-folder (its name ends in a slash)."""
    sizes = {}
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            sizes[entry.name + "/"] = sum(1 for _ in entry.iterdir())
        elif entry.name != MANIFEST:
            sizes[entry.name] = entry.stat().st_size
    return sizes


def is_complete(folder: Path, command: str, settings: dict[str, Any]) -> bool:
    """Say whether `folder` holds everything its manifest lists, made by `command` with these `settings`."""
    manifest = read_manifest(folder)
    if not isinstance(manifest, dict) or manifest.get("command") != command or manifest.get("settings") != settings:
        return False
    present = inventory(folder)
    return all(present.get(name) == size for name, size in manifest["files"].items())


def build(
    output: Path,
    command: str,
    settings: dict[str, Any],
    write: Callable[[Path], dict[str, Any]],
    force: bool = False,
) -> Path:
    """Return `output`, filled by `write(folder) -> facts` unless it is already complete for the same settings.

    `write` works in `<output>.partial`, which becomes `output` only after the manifest is in it; an interrupted
    preparation leaves no `output` and is redone, and a second process waits. Raises `PlaygroundError` for an `output`
    without a manifest, which may be the user's own.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with locked(output.with_name(f".{output.name}.lock"), f"{output}: another process makes it", patience=math.inf):
        if not force and is_complete(output, command, settings):
            print(f"{command}: {output} is complete for these settings, skipped (--force remakes it)")
            return output
        if not force and output.exists() and not (output / MANIFEST).exists():
            raise PlaygroundError(
                f"{output} exists but has no {MANIFEST}, so it was not made by `python -m playground {command}`. "
                "Move it away, give another --root, or replace it with --force."
            )
        start = time.monotonic()
        staging = output.with_name(output.name + ".partial")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        facts = write(staging)
        write_json(
            staging / MANIFEST,
            {"command": command, "settings": settings, "facts": facts, "files": inventory(staging)},
            synced=True,
        )
        shutil.rmtree(output, ignore_errors=True)
        staging.rename(output)
        print(f"{command}: {output} prepared in {time.monotonic() - start:.0f} s")
    return output


def shown_python() -> str:
    """This interpreter as typed in the repository's root."""
    return ".venv/bin/python" if Path(sys.prefix) == ROOT / ".venv" else sys.executable
