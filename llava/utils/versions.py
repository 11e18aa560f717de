"""Which code and packages run: the tree's commit, the digest of its sources, the versions of packages."""

import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence

from llava.utils import plugins
from llava.utils.paths import CODE, IS_CHECKOUT, ROOT

_SHARED = ("llava/*.py", "llava/utils/**/*.py", "llava/data/**/*.py", "llava/model/**/*.py")
TRAINING = (*_SHARED, "llava/train/**/*.py")
EVALUATION = (*_SHARED, "llava/eval/**/*.py")
ANALYSIS = (*_SHARED, "llava/analysis/**/*.py")
"""The source files that may decide trained weights, scores of benchmarks, and measurements."""
PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "deepspeed", "peft", "numpy", "pillow", "liger-kernel")
"""The packages that training computes with."""
LLAVA_CODE = "llava (code)"
"""The digest of the sources among the versions of a result."""


def git_commit() -> str | None:
    """The commit of this tree, with `+changes` where tracked files differ from it; None outside a git checkout.

    The documentation and the benchmarks' results decide nothing that is measured: changes there do not count.
    """
    if not IS_CHECKOUT:  # the repository around an installed package is another one
        return None
    places = [".", ":!benchmarks/results", ":!docs"]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno", "--", *places) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def version_of(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def code_digest(sources: Sequence[str] = TRAINING) -> str:
    """SHA-256 of source files; unlike the commit it also tells uncommitted changes apart."""
    digest = hashlib.sha256()
    for path in sorted(file for pattern in sources for file in CODE.glob(pattern)):
        digest.update(f"{path.relative_to(CODE)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def made_by(sources: Sequence[str], packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """What a result depends on besides its inputs and settings: packages, the code of `sources`, and plug-ins.

    Raises ValueError: a file of PLUGINS cannot be loaded.
    """
    plugins.load_named()
    return {name: version_of(name) for name in packages} | {LLAVA_CODE: code_digest(sources)} | plugins.recorded()


def software(packages: Sequence[str] = PACKAGES) -> dict[str, dict[str, str | None]]:
    """The code and the versions that run here, as `run.json` holds them."""
    return {
        "code": {"digest": code_digest(), "commit": git_commit()},
        "versions": {name: version_of(name) for name in packages} | {"python": platform.python_version()},
    }
