"""The user's own Python files that add parts: `--plugin`, PLUGINS and `llava.plugin.load` execute them."""

import hashlib
import os
import sys
from pathlib import Path
from types import ModuleType

digests: dict[str, str] = {}
"""The SHA-256 of each loaded file, by its name."""
registered: set[str] = set()
"""The parts that `llava.plugin` has added, such as `norm my_norm`."""


def load(paths: str | Path, named_by: str = "--plugin ") -> None:
    """Executes Python files, joined by commas, that call `llava.plugin`; each is executed once.

    Raises ValueError where one is missing or fails, or another file of its name is loaded.
    """
    for path in [Path(name.strip()).absolute() for name in str(paths).split(",") if name.strip()]:
        try:
            code = path.read_bytes()
            digest = hashlib.sha256(code).hexdigest()
            if path.name not in digests:
                module = ModuleType(f"llava_plugin_{path.stem}")
                sys.modules[module.__name__] = module  # dataclasses, pickle and inspect look there
                exec(compile(code, str(path), "exec"), vars(module))
        except Exception as error:
            raise ValueError(f"{named_by}{path}: {type(error).__name__}: {error}") from error
        if digests.setdefault(path.name, digest) != digest:
            raise ValueError(f"{named_by}{path}: another file of this name is loaded; rename one of them")


def load_named() -> None:
    """Loads the files of the variable PLUGINS, which reaches the processes that a command starts too."""
    load(os.environ.get("PLUGINS", ""), "PLUGINS=")


def recorded() -> dict[str, str]:
    """The loaded files with their digests, as the setting `plugins`; empty without plug-ins."""
    return {"plugins": ", ".join(f"{name} SHA-256 {digests[name]}" for name in sorted(digests))} if digests else {}
