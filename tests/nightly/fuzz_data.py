"""Fuzzes records and pictures: files go all the way to samples and batches.

    python tests/nightly/fuzz_data.py --target bytes|keys --seconds 600 --seed 1

A case of `bytes` changes a few bytes of a file. A case of `keys` writes records with misspelt, missing, moved and
further keys and placeholders; every sample must have the pictures that its record names, one for each `<image>` of its
text, and untouched records must pass. Allowed are samples, faults of named records, and a ValueError or OSError that
names the file. Anything else, or a case of more than 20 seconds, ends the run and leaves its files and seed.
"""

import argparse
import faulthandler
import json
import logging
import random
import shutil
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from llava.constants import IMAGE_TOKEN_INDEX
from llava.conversation import get_template
from llava.data.dataset import DataCollatorForSupervisedDataset, LazySupervisedDataset
from llava.data.images import ImageStore
from llava.data.preflight import Rules, preflight
from llava.data.records import load_records
from llava.mm_utils import process_images
from llava.utils import digests

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # so that it also runs as a file
from tiny_models import byte_tokenizer

_LONGEST_CASE = 20.0  # seconds
_KINDS = ("json", "jsonl", "parquet", "zip", "picture")
_COLOURS = [(0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]  # of the pictures 0.png to 4.png
_TEMPLATES = [("chatml", "assistant"), ("v1", "upstream"), ("qwen_1_5", "assistant"), ("plain", "upstream")]
_PICTURES = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")
_PROCESSOR = SiglipImageProcessorPil(size={"height": 8, "width": 8})
_PIECES = [b"", b"\x00", b"\xff", b'"', b"{", b"]", b"\\u", b"<image>", b"../", b"null", b"1e999", b"\xed\xa0\xbd"]


def run(
    folder: Path, seed: int, seconds: float, cases: int | None = None, target: str = "bytes"
) -> tuple[int, Counter]:
    """Runs `cases` cases, or as many as fit in `seconds`; returns their number, and how often each outcome came."""
    digests._CLOCK_STEP = 0.0
    warnings.simplefilter("ignore")  # Pillow's, about damaged pictures
    tokenizer, case = byte_tokenizer(), {"bytes": _bytes_case, "keys": _keys_case}[target]
    end, done, outcomes = time.monotonic() + seconds, 0, Counter()
    while done != cases and time.monotonic() < end:
        place = folder / f"{seed}-{done}"
        place.mkdir(parents=True)
        faulthandler.dump_traceback_later(_LONGEST_CASE, exit=True)
        try:
            outcomes.update(case(place, random.Random(f"{seed} {done}"), tokenizer))
        except Exception as error:
            raise AssertionError(f"case {done} of seed {seed}, files in {place}: {error!r}") from error
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(place)
        done += 1
    return done, outcomes


# --- files ------------------------------------------------------------------------------------------------------------


def _good_record(index: int, rng: random.Random) -> dict:
    names = [f"{rng.randrange(len(_COLOURS))}.png" for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))]
    texts = [rng.choice(["what?", "où?", "", "😀 \\ < b"]) for _ in range(rng.choice((1, 2)))]
    for _ in names:
        place = rng.randrange(len(texts))
        texts[place] = rng.choice([f"<image>{texts[place]}", f"{texts[place]} <image>\n"])
    turns = [turn for t in texts for turn in ({"from": "human", "value": t}, {"from": "gpt", "value": "yes"})]
    record = {"id": f"r{index}", "conversations": turns}
    if names or rng.random() < 0.3:
        record[rng.choice(("image", "images"))] = names[0] if len(names) == 1 and rng.random() < 0.7 else names
    return record


def _write(folder: Path, kind: str, records: list[dict], form: str, rng: random.Random) -> tuple[Path, Path]:
    """Writes records and pictures; returns the records' file, and the folder or zip file of the pictures."""
    images = folder / "images"
    images.mkdir()
    for number, colour in enumerate(_COLOURS):
        Image.new("RGB", (8, 8), colour).save(images / f"{number}.png", form)
    if kind == "zip":
        with zipfile.ZipFile(folder / "images.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for file in images.iterdir():
                archive.write(file, file.name)
        images = folder / "images.zip"
    if kind == "parquet" and _write_table(folder, records, rng):
        return folder / "a.parquet", images
    data = folder / ("a.json" if kind == "json" else "a.jsonl")
    data.write_text(json.dumps(records) if kind == "json" else "\n".join(map(json.dumps, records)))
    return data, images


def _write_table(folder: Path, records: list[dict], rng: random.Random) -> bool:
    """Whether the records could be written as rows with paths, or structs of bytes and path, for pictures."""
    as_struct, keys = rng.random() < 0.7, dict.fromkeys(key for record in records for key in record)

    def value(cell: object) -> object:
        if isinstance(cell, list):
            return [value(item) for item in cell]
        if not as_struct or not isinstance(cell, str) or not (folder / "images" / cell).is_file():
            return cell
        return {"bytes": (folder / "images" / cell).read_bytes(), "path": cell}

    try:
        table = {k: [r.get(k) if k in ("conversations", "id") else value(r.get(k)) for r in records] for k in keys}
        pq.write_table(pa.table(table), folder / "a.parquet", row_group_size=rng.choice((1, 2, 5)))
    except pa.ArrowException:  # columns of several types, or of none
        return False
    return True


def _let_through(data: Path, images: Path, template: tuple[str, str], tokenizer, length: int = 4096):
    """The records at fault, each of which is named, and the samples of the others; ValueError or OSError if refused."""
    table, store = load_records(str(data), check=False), ImageStore(images)
    rules = Rules(get_template(template[0]), template[1], full_decode=True)
    manifest, _ = preflight(table, store, rules, show_progress=False)
    for faults in manifest.faults.values():
        assert all(f"{table.sources[0]}: record {index}" in text for index, text in faults)
    bad = manifest.bad_records()
    if len(bad) == len(table):
        return bad, []
    options = {"label_masking": template[1], "show_progress": False}
    return bad, LazySupervisedDataset(
        table.without(bad), tokenizer, template[0], _PROCESSOR, store, "square", 2, length, **options
    )  # fmt: skip


# --- bytes ------------------------------------------------------------------------------------------------------------


def _bytes_case(folder: Path, rng: random.Random, tokenizer) -> Counter:
    kind = rng.choice(_KINDS)
    data, images = _write(folder, kind, [_good_record(i, rng) for i in range(5)], rng.choice(_PICTURES), rng)
    target = {"zip": images, "picture": images / "0.png"}.get(kind, data)
    target.write_bytes(_damaged(target.read_bytes(), rng))
    try:
        bad, samples = _let_through(data, images, rng.choice(_TEMPLATES[:3]), tokenizer)
    except (ValueError, OSError) as error:
        assert target.name in str(error), error
        return Counter(["refused"])
    for index in range(len(samples)):
        assert len(samples[index]["input_ids"])
    return Counter(faults=len(bad), samples=len(samples))


def _damaged(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        start = rng.randrange(len(data) + 1)
        stop = min(len(data), start + rng.choice((0, 1, 1, 4, 30)))
        piece = rng.choice([*_PIECES, rng.randbytes(4), data[:20]])
        data = data[:start] + piece + data[stop:]
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.1 else data


# --- keys -------------------------------------------------------------------------------------------------------------

_NEAR_IMAGE = [
    "images", "image", "Image", " image", "imag\u0435", "img", "image_path", "picture", "file_name", "video", "",
]  # fmt: skip
_NEAR_TURNS = ["conversation", "Conversations", "messages", "texts", "x"]
_NEAR_TOKEN = ["<Image>", "<image", "<img>", "<|image|>", "<imaQA_GT_caption_based_noisyge>", "<video>", ""]
_IMAGES = [None, [], "", {}, {"path": "0.png"}, [None], [["0.png"]], 3, "0.png", ["0.png", "1.png"], "9.png"]


def _keys_case(folder: Path, rng: random.Random, tokenizer) -> Counter:
    originals = [_good_record(index, rng) for index in range(5)]
    records = [_changed(json.loads(json.dumps(r)), rng) if rng.random() < 0.7 else r for r in originals]
    data, images = _write(folder, rng.choice(_KINDS[:3]), records, "PNG", rng)
    template, length = rng.choice(_TEMPLATES), rng.choice((20, 60, 4096, 4096))
    try:
        bad, samples = _let_through(data, images, template, tokenizer, length)
    except (ValueError, OSError) as error:
        assert data.name in str(error), error
        return Counter(["refused"])
    untouched = [index for index, record in enumerate(records) if record == originals[index]]
    assert template[0] == "plain" or not set(untouched) & set(bad), "a good record was refused"
    made = [samples[index] for index in range(len(samples))]
    for sample, index in zip(made, np.delete(np.arange(len(records)), bad).tolist(), strict=True):
        _check_sample(sample, records[index], tokenizer, whole=length == 4096)
    if made:
        batch = DataCollatorForSupervisedDataset(0)(made)
        assert len(batch.get("images", ())) == int((batch["input_ids"] == IMAGE_TOKEN_INDEX).sum())
    with_pictures = sum("images" in sample for sample in made)
    return Counter(faults=len(bad), samples=len(made), with_pictures=with_pictures)


def _check_sample(sample: dict, record: dict, tokenizer, whole: bool) -> None:
    """Checks that the sample has the record's pictures, one for each `<image>` of its text, and not that word."""
    named = record.get("image") or record.get("images") or []
    named = named["path"] if isinstance(named, dict) else named  # a struct's row
    expected = [int(name[0]) for name in ([named] if isinstance(named, str) else named)]
    turns = next(record[key] for key in ("conversations", "messages", "conversation") if record.get(key))
    written = sum(turn.get("value", turn.get("content")).count("<image>") for turn in turns)
    if not written and any("role" in turn for turn in turns):  # messages may leave the places open
        written = len(expected)
    images = sample.get("images", torch.empty(0))
    ids = sample["input_ids"]
    assert len(images) == int((ids == IMAGE_TOKEN_INDEX).sum())
    assert len(expected) == written and (len(images) == written if whole else len(images) <= written), record
    for pixels, number in zip(images, expected, strict=False):
        picture = Image.new("RGB", (8, 8), _COLOURS[number])
        assert torch.equal(pixels, process_images([picture], _PROCESSOR, None)[0]), "another picture"
    borders = [-1, *(ids == IMAGE_TOKEN_INDEX).nonzero().flatten().tolist(), len(ids)]
    assert not any("<image>" in tokenizer.decode(ids[a + 1 : b]) for a, b in pairwise(borders)), record


def _changed(record: dict, rng: random.Random) -> dict:
    """The record with one misspelt, missing, moved or further key, or another placeholder."""
    image_key, turns = next((key for key in ("image", "images") if key in record), "image"), record["conversations"]
    turn, near = rng.choice(turns), rng.choice(_NEAR_TOKEN)
    text = turn["value"]
    change = rng.randrange(7)
    if change == 0:
        return _renamed(record, image_key, rng.choice(_NEAR_IMAGE))
    if change == 1:
        value = record.pop(image_key, "0.png")  # gone, or in a turn
        turn |= {rng.choice(_NEAR_IMAGE): value} if rng.random() < 0.7 else {}
    elif change == 2:
        record[rng.choice((image_key, "image", "images"))] = rng.choice(_IMAGES)
    elif change == 3:
        return _renamed(record, "conversations", rng.choice(_NEAR_TURNS))
    elif change == 4:  # messages, sometimes with a turn left as it was
        roles = {"human": "user", "gpt": "assistant"}
        messages = [{"role": roles[t["from"]], "content": t["value"]} if rng.random() < 0.8 else t for t in turns]
        return record | {"conversations": messages}
    elif change == 5:
        record |= {"model": "x", "metadata": {"image": "0.png"}, rng.choice(_NEAR_IMAGE): "0.png"}
    else:
        turn["value"] = rng.choice([text.replace("<image>", near), text + "<image>", text + near, f"<im{text}age>"])
    return record


def _renamed(record: dict, old: str, new: str) -> dict:
    return {new if key == old else key: value for key, value in record.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", default="bytes")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # samples that are cut are warned of
    print(*run(Path(tempfile.mkdtemp(prefix="fuzz-")), args.seed, args.seconds, target=args.target))
