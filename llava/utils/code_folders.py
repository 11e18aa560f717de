"""Cache folders from which libraries load code: one that another user can write into runs that user's code as you."""

import contextlib
import os
import stat
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def user_cache_home() -> Path:
    """The folder in which this user's programs keep what they can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


CODE_FOLDERS: dict[str, Callable[[], Path]] = {
    "TORCH_EXTENSIONS_DIR": lambda: user_cache_home() / "torch_extensions",  # C++ ops, which DeepSpeed has built
    "TORCHINDUCTOR_CACHE_DIR": lambda: Path(
        import_module("torch._inductor.runtime.cache_dir_utils").default_cache_dir()
    ),
    "TRITON_CACHE_DIR": lambda: Path(os.environ.get("TRITON_HOME", Path.home()), ".triton/cache"),
    "HF_MODULES_CACHE": lambda: Path(os.environ.get("HF_HOME", user_cache_home() / "huggingface"), "modules"),
}
"""The variable that names such a folder, and what its library takes without it."""


def refuse_shared_variable(variable: str) -> None:
    """`refuse_shared` for the folder of a variable of `CODE_FOLDERS`."""
    folder = Path(os.environ[variable]) if variable in os.environ else CODE_FOLDERS[variable]()
    refuse_shared(folder, f"{variable}=")


def refuse_shared(folder: Path, named_by: str) -> None:
    """Refuses a folder of code in which another user could have put some.

    It is made, for this user alone, where it is missing, so that nobody else makes it first.

    Args:
        named_by: the flag or variable in front of the path in the message.

    Raises:
        ValueError: it, or something in it, belongs to another user than this one and root, or others can write into it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts, fault, owners = folder.stat(), "", {folder.lstat().st_uid, folder.stat().st_uid}
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process may just have removed it
            owners.add(path.lstat().st_uid)
    if strangers := owners - {0, os.geteuid()}:
        fault = f"it or something in it belongs to user {min(strangers)}"
    group_writes = facts.st_mode & stat.S_IWGRP and facts.st_gid != facts.st_uid  # equal: the user's own group
    if group_writes or facts.st_mode & stat.S_IWOTH:
        fault = f"others can write into it (mode {stat.S_IMODE(facts.st_mode):o})"
    if fault:
        raise ValueError(f"{named_by}{folder}: code is executed from there, and {fault}; name a folder of your own")
