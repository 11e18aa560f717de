"""Where this tree is, and the names of its files and checkpoints."""

from pathlib import Path

CODE = Path(__file__).resolve().parents[2]
"""The folder that holds the package: the repository, or where pip has installed it."""
IS_CHECKOUT = (CODE / "scripts/lib.sh").is_file()
NEEDS_CHECKOUT = "this calls the repository's scripts, which an installed package does not have; run it in a clone"
ROOT = CODE if IS_CHECKOUT else CODE / "llava/recipes"
"""Holds `scripts` and `deepspeed_configs`: the repository, or the copies of them in an installed package."""
WORK = ROOT if IS_CHECKOUT else Path()
"""Where prepared data and outputs go by default: the repository, or else the working directory."""


def shipped(path: str) -> str:
    """`path`, or, if nothing is there, the file of that name that ships with this tree."""
    inside = ROOT / path
    return str(inside) if path and not Path(path).exists() and inside.is_file() else path


def checkpoint_name(path: str) -> str:
    """What a checkpoint is called in tables: the last two parts of a folder's path, or the hub id as it is."""
    parts = [part for part in Path(path).parts if part != "/"]
    return "/".join(parts[-2:]) if Path(path).is_dir() else path
