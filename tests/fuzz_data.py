"""A fuzz target over records and pictures: files with damaged bytes go all the way to samples.

    python tests/fuzz_data.py --seconds 600 --seed 1

Each case changes a few bytes of a JSON, JSONL, Parquet, zip or picture file, reads it, preflights it, and makes samples
of what was let through. Allowed are samples, faults of named records, and a ValueError or OSError that names the file.
Anything else, or a case of more than 20 seconds, ends the run and leaves its files and seed.
"""

import argparse
import faulthandler
import io
import json
import random
import shutil
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from conftest import byte_tokenizer
from PIL import Image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from llava.conversation import get_template
from llava.data import cache
from llava.data.dataset import LazySupervisedDataset
from llava.data.images import ImageStore
from llava.data.manifest import Rules, preflight
from llava.data.records import load_records

_LONGEST_CASE = 20.0  # seconds
_KINDS = ("json", "jsonl", "parquet", "zip", "picture")
_PICTURES = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")
_PIECES = [b"", b"\x00", b"\xff", b'"', b"{", b"]", b"\\u", b"<image>", b"../", b"null", b"1e999", b"\xed\xa0\xbd"]


def run(folder: Path, seed: int, seconds: float, cases: int | None = None) -> tuple[int, Counter]:
    """So many cases, or as many as fit in `seconds`; what came of them.

    Raises:
        AssertionError: a case ended in another way than it may.
    """
    cache._CLOCK_STEP = 0.0
    warnings.simplefilter("ignore")  # Pillow's, about damaged pictures
    tokenizer = byte_tokenizer()
    end, done, outcomes = time.monotonic() + seconds, 0, Counter()
    while done != cases and time.monotonic() < end:
        place = folder / f"{seed}-{done}"
        place.mkdir(parents=True)
        faulthandler.dump_traceback_later(_LONGEST_CASE, exit=True)
        try:
            outcomes.update(_case(place, random.Random(f"{seed} {done}"), tokenizer))
        except Exception as error:
            raise AssertionError(f"case {done} of seed {seed}, files in {place}: {error!r}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(place)
        done += 1
    return done, outcomes


def _case(folder: Path, rng: random.Random, tokenizer) -> Counter:
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
    manifest, _ = preflight(table, store, rules, show_progress=False)
    for found in manifest.faults.values():
        assert all(f"{data}: record {index}" in text for index, text in found)
    bad = manifest.bad_records()
    counted = Counter(faults=len(bad))
    if len(bad) == table.total:
        return counted
    processor = SiglipImageProcessorPil(size={"height": 8, "width": 8})
    options = {"label_masking": masking, "show_progress": False}
    samples = LazySupervisedDataset(
        table.without(bad), tokenizer, version, processor, store, "square", 2, 4096, **options
    )  # fmt: skip
    for index in range(len(samples)):
        assert len(samples[index]["input_ids"])
    return counted + Counter(samples=len(samples))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    done, outcomes = run(Path(tempfile.mkdtemp(prefix="fuzz-")), args.seed, args.seconds)
    print(f"{done} cases: {dict(outcomes)}")


if __name__ == "__main__":
    main()
