"""Collects the wheels that benchmarks/gpu_check.sh needs on a machine with PyTorch and transformers, but no network.

They are the wheels of the dependencies in pyproject.toml, of DeepSpeed, Liger's kernels and pytest, and of all that
these require, except what every supported PyTorch and transformers require, and except --have. They have the versions
of constraints.txt, and are for Linux on x86-64. The folder appears only when it is complete. It also notes the commit,
which the results of a copy of this tree without .git then name, as long as the copy's sources are unchanged.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from benchmarks.common import ROOT, write_commit
from llava.utils.commands import Parser

EXTRA = ("deepspeed", "liger-kernel", "pytest")
# What every supported release of PyTorch and transformers requires. Newer releases require more (pydantic), so that the
# requirements of the releases that are installed here do not say what the other machine has.
BARE = ("torch", "triton", "transformers", "numpy", "packaging", "pyyaml", "tqdm", "filelock", "huggingface-hub",
        "safetensors", "tokenizers")  # fmt: skip
FROM_SOURCE = ("deepspeed",)  # published as source only
# PyTorch's wheels need glibc 2.28, so a machine that has PyTorch runs wheels for that version and for older ones.
PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(28, 4, -1)), "manylinux2014", "manylinux2010", "manylinux1")


class WheelError(Exception):
    """The wheels cannot be collected; the message says why and what to do."""


def main() -> int:
    parser = Parser(prog="gpu_check.sh wheels", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for the wheels; must not exist, or be empty")
    own = "{}.{}".format(*sys.version_info)
    parser.add_argument("--python", default=own, type=version, help=f"version on the other machine (default: {own})")
    parser.add_argument("--have", nargs="+", default=[], metavar="NAME", help="further packages of the other machine")
    parser.add_argument("--max-mib", type=float, default=64.0, help="largest total size in MiB (default: 64)")
    args = parser.parse_args()
    try:
        wheels = collect(args.folder, args.python, {*BARE, *args.have}, args.max_mib)
    except (WheelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{table(wheels)}\nnow carry {args.folder} and call: WHEELS={args.folder} bash benchmarks/gpu_check.sh")
    return 0


def version(text: str) -> str:
    """The type of --python."""
    if not re.fullmatch(r"3\.\d+", text):
        raise argparse.ArgumentTypeError(f"expected a version such as 3.12, found {text!r}")
    return text


def collect(folder: Path, python: str, have: set[str], max_mib: float) -> list[Path]:
    """Fills `folder` with the wheels that a machine with `have` lacks, and returns them.

    Raises:
        WheelError: the folder is not empty, pip failed, or the wheels exceed `max_mib`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WheelError(f"{folder} is not an empty folder; two versions of a wheel would clash, name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as temporary:
        collected = Path(temporary, "wheels")
        collected.mkdir()
        closure(needed(), lambda names: fetch(names, python, collected), python, have)
        total = sum(wheel.stat().st_size for wheel in collected.iterdir()) / 2**20
        if total > max_mib:
            raise WheelError(
                f"the wheels take {total:.1f} MiB, expected at most {max_mib:g} (--max-mib); name what the other "
                f"machine has by --have\n{table(collected.iterdir())}"
            )
        write_commit(collected)
        if folder.exists():
            folder.rmdir()
        collected.chmod(0o755)
        shutil.move(collected, folder)
    return sorted(folder.glob("*.whl"))


def needed() -> set[str]:
    """What the parts of gpu_check import, apart from what those packages require themselves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {*EXTRA, *(Requirement(line).name for line in project["dependencies"])}


Requires = Callable[[set[str]], dict[str, list[str]]]


def closure(names: Iterable[str], requires: Requires, python: str, without: Iterable[str]) -> set[str]:
    """`names` and all that they require on Linux with that Python, except `without`; canonical names.

    Args:
        requires: the lines `Requires-Dist` of every package of a set, by its name.
    """
    machine = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    excluded = set(map(canonicalize_name, without))
    complete: set[str] = set()
    new = set(map(canonicalize_name, names)) - excluded
    while new:
        complete |= new
        requirements = [Requirement(line) for lines in requires(new).values() for line in lines]
        applies = [r for r in requirements if not r.marker or r.marker.evaluate(machine)]
        if extras := [str(r) for r in applies if r.extras]:
            raise WheelError(f"extras are not followed: {', '.join(extras)}; add their packages to gpu_wheels.EXTRA")
        new = {canonicalize_name(r.name) for r in applies} - complete - excluded
    return complete


def fetch(names: set[str], python: str, folder: Path) -> dict[str, list[str]]:
    """Puts the wheels of `names` into `folder`; returns their requirements.

    Raises:
        WheelError: pip failed; its message is above.
    """
    pip = [sys.executable, "-m", "pip"]
    common = ["-q", "--no-deps", "--constraint", ROOT / "constraints.txt"]
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    foreign = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    if ready := sorted(names.difference(FROM_SOURCE)):
        call([*pip, "download", *common, *foreign, "-d", folder, *ready])
    if source := sorted(names.intersection(FROM_SOURCE)):
        call([*pip, "wheel", *common, "-w", folder, *source])
    wheels = {str(parse_wheel_filename(wheel.name)[0]): wheel for wheel in folder.iterdir()}
    for name in source:
        if not wheels[name].name.endswith("-py3-none-any.whl"):
            raise WheelError(f"{wheels[name].name} was built for this machine, expected a wheel for any (py3-none-any)")
    return {name: requirements_of(wheels[name]) for name in names}


def call(command: list[object]) -> None:
    if subprocess.run(list(map(str, command))).returncode:
        raise WheelError("pip failed, its message is above")


def requirements_of(wheel: Path) -> list[str]:
    """The lines `Requires-Dist` of a wheel."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.count("/") == 1 and name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(files.read(name).decode()).get_all("Requires-Dist", [])


def table(wheels: Iterable[Path]) -> str:
    """The sizes of the wheels in MiB, the largest first, and their sum."""
    sizes = sorted(((wheel.stat().st_size / 2**20, wheel.name) for wheel in wheels), reverse=True)
    sizes.append((sum(size for size, _ in sizes), "in total"))
    return "\n".join(f"{size:8.2f} MiB  {name}" for size, name in sizes)


if __name__ == "__main__":
    sys.exit(main())
