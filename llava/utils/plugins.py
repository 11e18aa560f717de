"""The user's own Python files that add parts: which are loaded, and which a checkpoint needs.

Such a file is code. `--plugin`, the variable PLUGINS of training and comparisons, and `llava.plugin.load` execute it.
The copy in a checkpoint's folder is executed only if this user has executed a file of the same bytes before.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from llava.utils.digests import bytes_digest, user_cache

CONFIG_FIELD = "mm_plugins"
"""The field of config.json: by file name the `sha256` and what the file `registers`, such as `norm my_norm`."""

_files: dict[str, tuple[Path, str]] = {}  # path and SHA-256 of the loaded files, by name
_parts: dict[str, str] = {}  # by part, such as "norm my_norm", the file that registered it; "" for Python's own import
_loading = ""


def load(path: str | Path, named_by: str = "--plugin ") -> None:
    """Executes a file that registers parts; the same file is executed once. `named_by` precedes the path in messages.

    Raises:
        ValueError: there is no such file, it fails, or another file of its name is loaded.
    """
    global _loading
    path = Path(path).absolute()
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"{named_by}{path}: no such Python file; expected one that calls llava.plugin")
    digest = bytes_digest(path)
    known, known_digest = _files.get(path.name, (path, digest))
    if known_digest != digest:
        raise ValueError(f"{named_by}{path}: {known}, another file of this name, is loaded; rename one of them")
    if path.name in _files:
        return
    module = ModuleType(f"llava_plugin_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses, pickle and inspect look there
    _loading = path.name
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except Exception as error:
        raise ValueError(f"{named_by}{path}: {type(error).__name__}: {error}") from error
    finally:
        _loading = ""
    _files[path.name] = path, digest
    with suppress(OSError):  # without it the user has to name the file again
        user_cache("plugins").mkdir(parents=True, exist_ok=True)
        (user_cache("plugins") / digest).touch()


def load_all(paths: str | list[str], named_by: str = "--plugin ") -> None:
    """Loads the files of a list, or of a text that joins them by commas or spaces; see `load`."""
    for text in [paths] if isinstance(paths, str) else paths:
        for path in filter(None, re.split(r"[,\s]+", text)):
            load(path, named_by)


def load_named() -> None:
    """Loads the files of the variable PLUGINS, which the scripts pass as `--plugin`."""
    load_all(os.environ.get("PLUGINS", ""), "PLUGINS=")


def claim(kind: str, table: dict[str, Any], name: str, entry: Any) -> None:
    """Adds an entry to a table; raises ValueError if the table has the name."""
    if name in table:
        raise ValueError(f"the {kind} {name!r} exists already; take another name")
    table[name] = entry
    _parts[f"{kind} {name}"] = _loading


# --- what is recorded -------------------------------------------------------------------------------------------------


def digests() -> dict[str, str]:
    """The SHA-256 of each loaded file, by its name."""
    return {name: digest for name, (_, digest) in sorted(_files.items())}


def record() -> dict[str, dict[str, Any]]:
    """What `CONFIG_FIELD` holds: the loaded files."""
    return {
        name: {"sha256": digest, "registers": [part for part, file in _parts.items() if file == name]}
        for name, digest in digests().items()
    }


def copy_beside(config: object, folder: str | Path) -> None:
    """Copies the loaded files that a config names into the checkpoint's folder."""
    for name in _files.keys() & (getattr(config, CONFIG_FIELD, None) or {}).keys():
        with suppress(shutil.SameFileError):
            shutil.copyfile(_files[name][0], Path(folder, name))


def plugins_beside(folder: Path) -> list[str]:
    """The names of the files in a checkpoint's folder that its config names as plug-ins."""
    config = folder / "config.json"
    named = json.loads(config.read_text()).get(CONFIG_FIELD) if config.is_file() else None
    return [name for name in named or () if name == Path(name).name and (folder / name).is_file()]


# --- what a checkpoint needs ------------------------------------------------------------------------------------------


def parts_used(fields: Mapping[str, Any]) -> dict[str, str]:
    """The parts of a model with these config fields that come from a plug-in, each with its file's name."""
    own = {
        "norm": fields.get("mm_projector_norm"),
        "projector": fields.get("mm_projector_type"),
        "tower": (fields.get("mm_vision_config") or {}).get("model_type"),
        "decoder": fields.get("model_type"),
    }
    return {
        part: file
        for file, facts in (fields.get(CONFIG_FIELD) or {}).items()
        for part in facts["registers"]
        if _matches(part.partition(" ")[2], own.get(part.partition(" ")[0]))
    }


def _matches(registered: str, used: str | None) -> bool:
    """Whether a part in use is the registered one; N in a name stands for a number."""
    return used is not None and bool(re.fullmatch(re.escape(registered).replace("N", r"(?:N|[1-9]\d*)"), used))


def require(fields: Mapping[str, Any], model_path: str) -> None:
    """Loads the copies in the model's folder that this user has executed before, as far as its parts need them.

    Raises:
        ValueError: a part is not registered; the message says what to pass.
    """
    for part, file in parts_used(fields).items():
        copy = Path(model_path, file)
        if part not in _parts and copy.is_file() and (user_cache("plugins") / bytes_digest(copy)).exists():
            load(copy, f"{model_path}: ")
        if part not in _parts:
            name = copy if copy.is_file() else file
            raise ValueError(
                f"{model_path}: its {part} comes from the plug-in {file}, which is not loaded; it is code, so read "
                f"{name} first, then pass --plugin {name} or call llava.plugin.load"
            )
