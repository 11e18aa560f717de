"""Wheels for a machine without network that has Python, PyTorch and transformers: collected here, installed there.

`collect` fills FOLDER/1, FOLDER/2, ... with at most --mib each, so that one folder travels at a time; a wheel that does
not fit in the rest of a folder is cut in pieces. FOLDER/1 has the small ones, all but FlashAttention 4 and QLoRA's, and
notes the commit, which results of a copy of this tree without .git then name while its sources are unchanged.
`install` joins the wheels of which all pieces have come, and installs them for benchmarks/gpu_check.sh alone: into
outputs/gpu_packages, and LLaVA's own code with the transformers that it needs into outputs/gpu_upstream.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from llava.utils.commands import Parser, whole
from llava.utils.paths import ROOT

NEEDED = (
    "accelerate", "annotated-types", "cmeel", "cmeel-mimalloc", "deepspeed", "einops", "hjson", "iniconfig",
    "liger-kernel", "msgpack", "ninja", "peft", "pillow", "pluggy", "psutil", "py-cpuinfo", "pyarrow", "pydantic",
    "pydantic-core", "pygments", "pytest", "sentencepiece", "typing-extensions", "typing-inspection",
)  # fmt: skip
"""What the parts import beyond what every PyTorch and transformers require; a test holds that it is complete."""
OPTIONAL = (  # LLaVA's tokenizer, the study's model, QLoRA and FlashAttention 4
    "protobuf", "gguf", "bitsandbytes", "apache-tvm-ffi==0.1.15.post2", "flash-attn-4==4.0.0b36",
    "nvidia-cutlass-dsl==4.8.1", "nvidia-cutlass-dsl-libs-base==4.8.1", "nvidia-cutlass-dsl-libs-core==4.8.1",
    "nvidia-cutlass-dsl-libs-cu13==4.8.1", "quack-kernels==0.6.5", "torch-c-dlpack-ext==0.1.5",
)  # fmt: skip
UPSTREAM = (
    "transformers==4.37.2", "tokenizers==0.15.1", "accelerate==0.27.2", "huggingface-hub==0.36.2", "protobuf==4.25.9",
    "llava-torch==1.2.2.post1",
)  # fmt: skip
TARGETS = {"ours": ROOT / "outputs/gpu_packages", "upstream": ROOT / "outputs/gpu_upstream"}
# A folder of PYTHONPATH has no `.pth` files of its own read, by which wheels name further folders.
PATHS = "import os, site\n\nsite.addsitedir(os.path.dirname(__file__))\n"
# The image's own are too new for that transformers, which imports them where they are found.
HIDE = 'import sys\n\nsys.modules |= dict.fromkeys(("datasets", "deepspeed", "peft"))\n'


def main() -> None:
    parser = Parser(prog="gpu_wheels", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    collecting = verbs.add_parser("collect")
    collecting.add_argument("folder", type=Path)
    collecting.add_argument("--python", required=True, help="that machine's Python, such as 3.12")
    collecting.add_argument("--have", nargs="+", default=[], help="packages that are there")
    collecting.add_argument("--mib", type=whole(1), default=44, help="at most, per folder: 64 less this tree's 16")
    verbs.add_parser("install").add_argument("folder", type=Path)
    args = parser.parse_args()
    try:
        install(args.folder.resolve()) if args.verb == "install" else collect(args)
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")


def collect(args: argparse.Namespace) -> None:
    """Downloads what the other machine lacks, for Linux on x86-64; the folder appears when it is complete."""
    from benchmarks.common import write_commit

    if args.folder.is_dir() and any(args.folder.iterdir()):
        raise ValueError(f"{args.folder} is not empty; two versions of a wheel would clash, name a new folder")
    # PyTorch's wheels need glibc 2.28, so a machine that has PyTorch runs wheels for that version and for older ones.
    versions = [*(f"_2_{minor}" for minor in range(28, 4, -1)), "2014", "2010", "1"]
    words = [word for version in versions for word in ("--platform", f"manylinux{version}_x86_64")]
    words += ["--only-binary=:all:", "--implementation", "cp", "--python-version", args.python]
    tested = ["-c", ROOT / "constraints.txt"]
    partial = args.folder.with_name(f"{args.folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        ours, upstream = Path(folder, "ours"), Path(folder, "upstream")
        names = [name for name in [*NEEDED, *OPTIONAL] if name.partition("==")[0] not in ("deepspeed", *args.have)]
        pip("download", *tested, *words, "-d", ours, *names)
        pip("wheel", *tested, "-w", ours, "deepspeed")  # published as source only
        if not any(ours.glob("deepspeed-*-py3-none-any.whl")):
            raise ValueError("DeepSpeed's wheel was built for this machine alone")
        pip("download", *words, "-d", upstream, *UPSTREAM)
        write_pieces([*ours.glob("*.whl"), *upstream.glob("*.whl")], partial, args.mib * 2**20)
    write_commit(partial / "1")
    shutil.rmtree(args.folder, ignore_errors=True)
    partial.rename(args.folder)
    print(f"carry {args.folder}/1, then /2 and so on; then: WHEELS={args.folder} bash benchmarks/gpu_check.sh")


def pip(verb: str, *words: object) -> None:
    command = [sys.executable, "-m", "pip", verb, "-q", "--no-deps", "--disable-pip-version-check", *map(str, words)]
    subprocess.run(command, check=True)


def write_pieces(wheels: Sequence[Path], folder: Path, most: int) -> None:
    """Writes the wheels, the smallest first, into `folder`/1, /2, ..., which hold `most` bytes each."""
    number, room = 1, most
    # FlashAttention 4 after its libraries, or it would be chosen without them and fail; what QLoRA needs comes last.
    later = ("flash_attn", "bitsandbytes")
    for wheel in sorted(wheels, key=lambda wheel: (wheel.name.startswith(later), wheel.stat().st_size)):
        content, pieces = wheel.read_bytes(), []
        while content:
            number, room = (number, room) if room else (number + 1, most)
            pieces.append((number, content[:room]))
            content, room = content[room:], room - len(pieces[-1][1])
        for index, (place, piece) in enumerate(pieces, 1):
            path = folder / str(place) / wheel.parent.name / f"{wheel.name}.{index}of{len(pieces)}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(piece)
            print(f"{path.relative_to(folder)} {len(piece) / 2**20:.1f} MiB")


def install(folder: Path) -> None:
    """Installs the complete wheels of `folder`, once for the same ones; an installation that was killed is repeated."""
    for group, target in TARGETS.items():
        pieces: dict[tuple[str, int], dict[int, Path]] = defaultdict(dict)
        for file in folder.glob(f"*/{group}/*.whl.*of*"):
            name, _, place = file.name.rpartition(".")
            index, total = map(int, place.split("of"))
            pieces[name, total][index] = file
        for (name, total), files in pieces.items():
            if len(files) < total:
                print(f"{name}: {len(files)} of {total} pieces have come; it is installed when all have", flush=True)
        wheels = {name: files for (name, total), files in sorted(pieces.items()) if len(files) == total}
        done, installed = target / "wheels.txt", "\n".join(wheels)
        if not wheels or (done.is_file() and done.read_text() == installed):
            continue
        shutil.rmtree(target, ignore_errors=True)
        with tempfile.TemporaryDirectory() as joined:
            for name, files in wheels.items():
                Path(joined, name).write_bytes(b"".join(files[index].read_bytes() for index in sorted(files)))
            pip("install", "--no-index", "--no-compile", "--target", target, *(Path(joined, name) for name in wheels))
        (target / "sitecustomize.py").write_text(HIDE if group == "upstream" else PATHS)
        done.write_text(installed)


if __name__ == "__main__":
    main()
