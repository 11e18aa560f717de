"""Fuzz targets over records and pictures: files go all the way to samples and batches.

    python tests/nightly/fuzz_data.py --target bytes --seconds 600 --seed 1
    python tests/nightly/fuzz_data.py --target keys --seconds 600 --seed 1

A case of `bytes` changes a few bytes of a JSON, JSONL, Parquet, zip or picture file, reads it, preflights it, and makes
samples of what was let through. A case of `keys` writes records with misspelt, missing, moved and further keys and
placeholders; every sample must have the pictures that its record names, one for each `<image>` of its text, and
untouched records must pass. Allowed are samples, faults of named records, and a ValueError or OSError that names the
file. Anything else, or a case of more than 20 seconds, ends the run and leaves its files and seed.
"""

import argparse
import faulthandler
import io
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
from llava.data.collate import DataCollatorForSupervisedDataset
from llava.data.dataset import LazySupervisedDataset
from llava.data.images import ImageStore
from llava.data.preflight import Rules, preflight
from llava.data.records import RecordTable, load_records
from llava.mm_utils import process_images
from llava.utils import digests

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # so that it also runs as a file
from tiny_models import byte_tokenizer

_LONGEST_CASE = 20.0  # seconds
_KINDS = ("json", "jsonl", "parquet", "zip", "picture")
_PICTURES = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")
_PROCESSOR = SiglipImageProcessorPil(size={"height": 8, "width": 8})
_PIECES = [b"", b"\x00", b"\xff", b'"', b"{", b"]", b"\\u", b"<image>", b"../", b"null", b"1e999", b"\xed\xa0\xbd"]


def run(
    folder: Path, seed: int, seconds: float, cases: int | None = None, target: str = "bytes"
) -> tuple[int, Counter]:
    """Runs `cases` cases, or as many as fit in `seconds`; returns their number, and how often each outcome came.

    Raises:
        AssertionError: a case ended in a way that is not allowed.
    """
    digests._CLOCK_STEP = 0.0
    warnings.simplefilter("ignore")  # Pillow's, about damaged pictures
    tokenizer = byte_tokenizer()
    end, done, outcomes = time.monotonic() + seconds, 0, Counter()
    while done != cases and time.monotonic() < end:
        place = folder / f"{seed}-{done}"
        place.mkdir(parents=True)
        faulthandler.dump_traceback_later(_LONGEST_CASE, exit=True)
        try:
            outcomes.update(_TARGETS[target](place, random.Random(f"{seed} {done}"), tokenizer))
        except Exception as error:
            raise AssertionError(f"case {done} of seed {seed}, files in {place}: {error!r}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(place)
        done += 1
    return done, outcomes


# --- bytes ------------------------------------------------------------------------------------------------------------


def _bytes_case(folder: Path, rng: random.Random, tokenizer) -> Counter:
    kind = rng.choice(_KINDS)
    data, images = _write(folder, kind, rng)
    target = {"zip": images, "picture": folder / "images/a.img"}.get(kind, data)
    target.write_bytes(_damaged(target.read_bytes(), rng))
    version, masking = rng.choice([("chatml", "assistant"), ("v1", "upstream"), ("qwen_1_5", "assistant")])
    try:
        table = load_records(str(data), check=False)
        store = ImageStore(images)
    except (ValueError, OSError) as error:
        assert target.name in str(error), error
        return Counter(["refused"])
    rules = Rules(get_template(version), masking, full_decode=True)
    bad, samples = _let_through(table, store, rules, tokenizer, version)
    for index in range(len(samples)):
        assert len(samples[index]["input_ids"])
    return Counter(faults=len(bad), samples=len(samples))


def _let_through(table: RecordTable, store: ImageStore, rules: Rules, tokenizer, version: str, length: int = 4096):
    """The records at fault, each of which is named, and the samples of the others."""
    manifest, _ = preflight(table, store, rules, show_progress=False)
    for faults in manifest.faults.values():
        assert all(f"{table.sources[0]}: record {index}" in text for index, text in faults)
    bad = manifest.bad_records()
    if len(bad) == len(table):
        return bad, []
    options = {"label_masking": rules.label_masking, "show_progress": False}
    return bad, LazySupervisedDataset(
        table.without(bad), tokenizer, version, _PROCESSOR, store, "square", 2, length, **options
    )  # fmt: skip


def _write(folder: Path, kind: str, rng: random.Random) -> tuple[Path, Path]:
    """Five good records with their pictures: the records' path, and the pictures'."""
    pictures = [_picture(rng.choice(_PICTURES), rng) for _ in range(5)]
    records = [_record(index, rng) for index in range(5)]
    (folder / "images").mkdir()
    (folder / "images/a.img").write_bytes(pictures[0])
    images = folder / "images"
    if kind == "zip":
        images = folder / "images.zip"
        with zipfile.ZipFile(images, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
            archive.writestr("a.img", pictures[0])
    if kind == "parquet":
        column = [{"bytes": data, "path": None} if i % 3 else None for i, data in enumerate(pictures)]
        texts = {name: [record[name] for record in records] for name in ("id", "conversations")}
        codec = rng.choice(["none", "snappy", "zstd"])
        pq.write_table(pa.table(texts | {"image": column}), folder / "a.parquet", row_group_size=2, compression=codec)
        return folder / "a.parquet", images
    data = folder / ("a.json" if kind == "json" else "a.jsonl")
    lines = map(json.dumps, records)
    data.write_text("[" + ",\n".join(lines) + "]" if kind == "json" else "\n".join(lines))
    return data, images


def _record(index: int, rng: random.Random) -> dict:
    turns = []
    for number in range(rng.choice((1, 2))):
        question = ("<image>\n" if number == 0 else "") + rng.choice(["what?", "où?", "😀 \\ ?"])
        turns += [{"from": "human", "value": question}, {"from": "gpt", "value": rng.choice(["yes", "no \n", ""])}]
    return {"id": f"r{index}", "image": "a.img", "conversations": turns}


def _picture(kind: str, rng: random.Random) -> bytes:
    mode = rng.choice(["RGB", "L", "P"] if kind != "WEBP" else ["RGB"])
    image = Image.frombytes("L", (16, 12), rng.randbytes(192)).convert(mode if kind != "JPEG" or mode != "P" else "L")
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def _damaged(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        start = rng.randrange(len(data) + 1)
        stop = min(len(data), start + rng.choice((0, 1, 1, 4, 30)))
        piece = rng.choice([*_PIECES, rng.randbytes(4), data[:20]])
        data = data[:start] + piece + data[stop:]
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.1 else data


# --- keys -------------------------------------------------------------------------------------------------------------

_COLOURS = [(0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]  # of the pictures 0.png to 4.png
_NEAR_IMAGE = [
    "images", "Image", "IMAGE", "image ", " image", "imag\u0435", "img", "imgs", "image_path", "image_file", "picture",
    "imagePath", "pic", "photo", "file_name", "path", "video", "media", "pixel_values", "iamge", "x", "", "im\n",
]  # fmt: skip
_NEAR_TURNS = ["conversation", "Conversations", "conversations ", "messages", "dialog", "texts", "turns", "x"]
_EXTRA = {"model": "x", "metadata": {"image": "0.png"}, "image_size": [3, 4], "image_id": "7", "weight": 1.5, "n": None}
_NEAR_TOKEN = ["<Image>", "<image", "<image >", "<img>", "<|image|>", "<imaQA_GT_caption_based_noisyge>", "<video>", ""]


def _keys_case(folder: Path, rng: random.Random, tokenizer) -> Counter:
    originals = [_good_record(index, rng) for index in range(5)]
    records = [_changed(record, rng) if rng.random() < 0.7 else record for record in originals]
    pictures = [Image.new("RGB", (8, 8), colour) for colour in _COLOURS]
    (folder / "images").mkdir()
    for number, picture in enumerate(pictures):
        picture.save(folder / f"images/{number}.png")
    data, records = _write_records(folder, records, rng)
    version, masking = rng.choice(_TEMPLATES)
    rules = Rules(get_template(version), masking, full_decode=rng.random() < 0.5)
    try:
        table = load_records(str(data), check=False)
    except (ValueError, OSError) as error:
        assert data.name in str(error), error
        return Counter(["refused"])
    assert len(table) == len(records)
    length = rng.choice((20, 60, 4096, 4096))
    bad, samples = _let_through(table, ImageStore(folder / "images"), rules, tokenizer, version, length)
    untouched = [index for index, record in enumerate(records) if record == originals[index]]
    assert version == "plain" or not set(untouched) & set(bad), "a good record was refused"
    made = [samples[index] for index in range(len(samples))]
    for sample, index in zip(made, np.delete(np.arange(len(records)), bad).tolist(), strict=True):
        _check_sample(sample, records[index], pictures, tokenizer, whole=length == 4096)
    if made:
        batch = DataCollatorForSupervisedDataset(0)(made)
        assert len(batch.get("images", ())) == int((batch["input_ids"] == IMAGE_TOKEN_INDEX).sum())
    with_pictures = sum("images" in sample for sample in made)
    return Counter(faults=len(bad), samples=len(made), with_pictures=with_pictures)


def _check_sample(sample: dict, record: dict, pictures: list[Image.Image], tokenizer, whole: bool) -> None:
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
        assert torch.equal(pixels, process_images([pictures[number]], _PROCESSOR, None)[0]), "another picture"
    borders = [-1, *(ids == IMAGE_TOKEN_INDEX).nonzero().flatten().tolist(), len(ids)]
    assert not any("<image>" in tokenizer.decode(ids[a + 1 : b]) for a, b in pairwise(borders)), record


def _good_record(index: int, rng: random.Random) -> dict:
    names = [f"{rng.randrange(len(_COLOURS))}.png" for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))]
    texts = [rng.choice(["what?", "où?", "", "a < b"]) for _ in range(rng.choice((1, 2)))]
    for _ in names:
        place = rng.randrange(len(texts))
        texts[place] = rng.choice([f"<image>{texts[place]}", f"{texts[place]} <image>\n"])
    turns = [turn for t in texts for turn in ({"from": "human", "value": t}, {"from": "gpt", "value": "yes"})]
    record = {"id": f"r{index}", "conversations": turns}
    if names or rng.random() < 0.3:
        record[rng.choice(("image", "images"))] = names[0] if len(names) == 1 and rng.random() < 0.7 else names
    return record


def _changed(record: dict, rng: random.Random) -> dict:
    record = json.loads(json.dumps(record))
    for _ in range(rng.choice((1, 1, 2))):
        record = rng.choice(_CHANGES)(record, rng)
    return record


def _renamed(record: dict, old: str, new: str) -> dict:
    return {new if key == old else key: value for key, value in record.items()}


def _image_key(record: dict) -> str:
    return next((key for key in ("image", "images") if key in record), "image")


def _other_image_key(record: dict, rng: random.Random) -> dict:
    return _renamed(record, _image_key(record), rng.choice(_NEAR_IMAGE))


def _no_image_key(record: dict, rng: random.Random) -> dict:
    return {key: value for key, value in record.items() if key not in ("image", "images")}


def _image_in_a_turn(record: dict, rng: random.Random) -> dict:
    turns = record.get("conversations")
    if isinstance(turns, list) and turns:
        rng.choice(turns)[rng.choice(_NEAR_IMAGE + ["image"])] = record.pop(_image_key(record), "0.png")
    return record


def _other_image(record: dict, rng: random.Random) -> dict:
    values = [
        None,
        [],
        "",
        {},
        {"path": "0.png"},
        [None],
        [["0.png"]],
        3,
        "0.png",
        ["0.png", "1.png"],
        "9.png",
        "../0.png",
    ]
    return record | {rng.choice((_image_key(record), "image", "images")): rng.choice(values)}


def _other_turns_key(record: dict, rng: random.Random) -> dict:
    return _renamed(record, "conversations", rng.choice(_NEAR_TURNS))


def _other_turn_key(record: dict, rng: random.Random) -> dict:
    turns = record.get("conversations")
    if not isinstance(turns, list):
        return record
    if rng.random() < 0.3:
        return record | {"conversations": [_as_message(t) if rng.random() < 0.8 else t for t in turns]}
    old, new = rng.choice([("from", "role"), ("value", "content"), ("from", "From"), ("value", "text")])
    return record | {"conversations": [_renamed(t, old, new) if rng.random() < 0.8 else t for t in turns]}


def _as_message(turn: dict) -> dict:
    if {"from", "value"} - turn.keys():
        return turn
    further = {key: value for key, value in turn.items() if key not in ("from", "value")}
    role = {"human": "user", "gpt": "assistant"}.get(turn["from"], turn["from"])
    return {"role": role, "content": turn["value"]} | further


def _further_keys(record: dict, rng: random.Random) -> dict:
    return record | dict(rng.sample(sorted(_EXTRA.items(), key=str), 2)) | {rng.choice(_NEAR_IMAGE): "0.png"}


def _other_placeholders(record: dict, rng: random.Random) -> dict:
    turns = record.get("conversations")
    if isinstance(turns, list) and turns and isinstance(turn := rng.choice(turns), dict) and "value" in turn:
        near, text = rng.choice(_NEAR_TOKEN), turn["value"]
        turn["value"] = rng.choice(
            [
                text.replace("<image>", near),
                text + "<image>",
                text + near,
                f"<im{text}age>",
                text.replace("<image>", "", 1),
            ]
        )
    return record


_CHANGES = (
    _other_image_key, _other_image_key, _no_image_key, _image_in_a_turn, _other_image, _other_turns_key,
    _other_turn_key, _further_keys, _other_placeholders, _other_placeholders,
)  # fmt: skip


def _write_records(folder: Path, records: list[dict], rng: random.Random) -> tuple[Path, list[dict]]:
    """The records' file, of any kind and name; and the records as it holds them."""
    if rng.random() < 0.4 and _write_table(folder, records, rng):
        return folder / "a.parquet", records
    data = folder / rng.choice(("a.json", "a.jsonl"))
    text = (
        json.dumps(records, indent=rng.choice((None, 1))) if rng.random() < 0.5 else "\n".join(map(json.dumps, records))
    )
    data.write_text(text, encoding=rng.choice(("utf-8", "utf-8-sig")))
    return data, records


def _write_table(folder: Path, records: list[dict], rng: random.Random) -> bool:
    """Whether the records could be written as rows with paths, bytes, or structs of both for pictures."""
    style = rng.choice(("path", "bytes", "struct", "struct without path"))

    def value(cell: object) -> object:
        if isinstance(cell, list):
            return [value(item) for item in cell]
        if style == "path" or not isinstance(cell, str) or not (folder / "images" / cell).is_file():
            return cell
        content = (folder / "images" / cell).read_bytes()
        both = {"bytes": content, "path": rng.choice((None, cell))}
        return {"bytes": content, "struct": both, "struct without path": {"bytes": content}}[style]

    keys = dict.fromkeys(key for record in records for key in record)
    held = {"conversations", "id", "metadata"}
    try:
        table = {k: pa.array([r.get(k) if k in held else value(r.get(k)) for r in records]) for k in keys}
        pq.write_table(pa.table(table), folder / "a.parquet", row_group_size=rng.choice((1, 2, 5)))
    except pa.ArrowException:  # columns of several types, or of none
        return False
    return True


_TEMPLATES = [
    ("chatml", "assistant"), ("v1", "upstream"), ("v1", "assistant"), ("qwen_1_5", "upstream"), ("plain", "upstream")
]  # fmt: skip
_TARGETS = {"bytes": _bytes_case, "keys": _keys_case}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=list(_TARGETS), default="bytes")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # samples that are cut are warned of
    done, outcomes = run(Path(tempfile.mkdtemp(prefix="fuzz-")), args.seed, args.seconds, target=args.target)
    print(f"{done} cases: {dict(outcomes)}")


if __name__ == "__main__":
    main()
