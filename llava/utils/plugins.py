"""The user's own Python files that add parts: which are loaded, and which a checkpoint needs.

A file is known by its name and the SHA-256 of its bytes. It is code, so that nothing executes it but `load`, which the
user asks for by `--plugin`, by the variable PLUGINS, or in Python. `llava.plugin` has what such a file calls.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

CONFIG_FIELD = "mm_plugins"
"""The field of config.json: by file name the `sha256` and what the file `registers`, such as `norm my_norm`."""
VARIABLE = "PLUGINS"


@dataclass
class Plugin:
    """A loaded file."""

    path: Path
    sha256: str
    registers: list[str] = field(default_factory=list)  # kind and name, such as "norm my_norm"
    undo: list[Callable[[], object]] = field(default_factory=list, repr=False)


_loaded: dict[str, Plugin] = {}  # by file name
_loading: list[Plugin] = []  # the one that is being executed


def load(path: str | Path, named_by: str = "--plugin ") -> Plugin:
    """Executes a file that registers parts; the same file is executed once.

    Args:
        named_by: the flag or variable in front of the path in messages.

    Raises:
        ValueError: there is no such file, it fails or registers nothing, or another file of its name is loaded.
    """
    path = Path(path)
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(
            f"{named_by}{path}: no such Python file; expected one that registers parts by llava.plugin (docs/models.md)"
        )
    source = path.read_bytes()
    plugin = Plugin(path.absolute(), hashlib.sha256(source).hexdigest())
    if known := _loaded.get(path.name):
        if known.sha256 == plugin.sha256:
            return known
        raise ValueError(
            f"{named_by}{path} (SHA-256 {plugin.sha256}): {known.path} of the same name is loaded (SHA-256 "
            f"{known.sha256}); give one of them another name"
        )
    module = ModuleType(_module_name(path.name))
    module.__file__ = str(plugin.path)
    sys.modules[module.__name__] = module  # dataclasses, pickle and inspect look there
    _loading.append(plugin)
    _loaded[path.name] = plugin
    try:
        exec(compile(source, str(plugin.path), "exec"), vars(module))
        if not plugin.registers:
            raise ValueError("it registers nothing; expected a call such as llava.plugin.register_norm")
    except Exception as error:
        forget(path.name)
        raise ValueError(f"{named_by}{path}: {type(error).__name__}: {error}") from error
    finally:
        _loading.remove(plugin)
    return plugin


def load_all(paths: str | list[str], named_by: str = "--plugin ") -> None:
    """Loads the files of a list, or of a text that joins them by commas or spaces; see `load`."""
    for text in [paths] if isinstance(paths, str) else paths:
        for path in filter(None, re.split(r"[,\s]+", text)):
            load(path, named_by)


def load_named() -> None:
    """Loads the files of the variable `VARIABLE`."""
    load_all(os.environ.get(VARIABLE, ""), f"{VARIABLE}=")


def forget(name: str) -> None:
    """Takes a file's parts out of the tables again."""
    for undo in reversed(_loaded.pop(name).undo):
        undo()
    sys.modules.pop(_module_name(name), None)


def _module_name(file_name: str) -> str:
    return f"llava_plugin_{re.sub(r'[^0-9A-Za-z_]', '_', file_name.removesuffix('.py'))}"


def claim(kind: str, table: dict[str, Any], name: str, entry: Any) -> None:
    """Adds an entry to a table for the file that is being loaded.

    Raises:
        ValueError: the table has the name, or no file is being loaded.
    """
    if not _loading:
        raise ValueError(f"a {kind} can be registered only in a file that --plugin or llava.plugin.load loads")
    if name in table:
        raise ValueError(f"the {kind} {name!r} exists already; take another name")
    table[name] = entry
    _loading[-1].undo.append(lambda: table.pop(name))
    _loading[-1].registers.append(f"{kind} {name}")


def on_forget(undo: Callable[[], object]) -> None:
    """Has `undo` called where the file that is being loaded fails."""
    _loading[-1].undo.append(undo)


# --- what is recorded -------------------------------------------------------------------------------------------------


def digests() -> dict[str, str]:
    """The SHA-256 of each loaded file, by its name."""
    return {name: plugin.sha256 for name, plugin in sorted(_loaded.items())}


def record() -> dict[str, dict[str, Any]]:
    """What `CONFIG_FIELD` holds: the loaded files."""
    return {
        name: {"sha256": plugin.sha256, "registers": list(plugin.registers)} for name, plugin in sorted(_loaded.items())
    }


def copy_beside(config: object, folder: str | Path) -> None:
    """Copies the files that a config names into the checkpoint's folder, where they are read, and not executed."""
    for name, facts in (getattr(config, CONFIG_FIELD, None) or {}).items():
        plugin, target = _loaded.get(name), Path(folder, name)
        if plugin and plugin.sha256 == facts["sha256"] and plugin.path != target.absolute():
            shutil.copyfile(plugin.path, target)


def plugins_beside(folder: Path) -> list[str]:
    """The names of the unchanged copies in a checkpoint's folder of the files that its config names."""
    config = folder / "config.json"
    named = json.loads(config.read_text()).get(CONFIG_FIELD) if config.is_file() else None
    return [
        name
        for name, facts in (named or {}).items()
        if name == Path(name).name
        and (folder / name).is_file()
        and hashlib.sha256((folder / name).read_bytes()).hexdigest() == facts["sha256"]
    ]


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
    """Refuses a model whose parts come from a plug-in that is not loaded.

    A file that the variable PLUGINS names is loaded here if its digest is the one that is needed.

    Raises:
        ValueError: such a model; the message says what to pass.
    """
    used = parts_used(fields)
    for file in dict.fromkeys(used.values()):
        digest = fields[CONFIG_FIELD][file]["sha256"]
        if file not in _loaded:
            _load_from_environment(file, digest)
        found = _loaded.get(file)
        if found and found.sha256 == digest:
            continue
        parts = ", ".join(part for part, name in used.items() if name == file)
        state = f"another {file} is loaded (SHA-256 {found.sha256})" if found else "it is not loaded"
        copy = Path(model_path, file)
        name = copy if copy.is_file() else file
        raise ValueError(
            f"{model_path}: its {parts} comes from the plug-in {file} (SHA-256 {digest}), and {state}. It is code, so "
            f"read {name} first; then pass --plugin {name}, set {VARIABLE}={name}, or call llava.plugin.load"
        )


def _load_from_environment(file: str, digest: str) -> None:
    for path in filter(None, re.split(r"[,\s]+", os.environ.get(VARIABLE, ""))):
        named = Path(path)
        if named.name == file and named.is_file() and hashlib.sha256(named.read_bytes()).hexdigest() == digest:
            load(named)
