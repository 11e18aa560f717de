"""Time and memory to prepare and preflight 100,000 records with small pictures, and to index 779,289 Parquet rows.

The records are conversations like LLaVA's (one in ten text only) with JPEGs of a few KB, once as JSON beside a zip file
and once as Parquet shards whose rows hold the pictures. Each start is its own process and finds no cache: it reads the
records into their table, lists the zip file's members, checks every record with the pictures' headers, and again with
the pictures decoded. The files were just written, so they are in the system's page cache. Imports are left out.

Memory is the proportional share (PSS) of the process and of those that it starts, added up and read every 50 ms.
"""

import argparse
import contextlib
import io
import itertools
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks import common
from llava.utils.commands import Parser, whole
from llava.utils.processes import descendants

_SHARD = 3_118  # rows: 250 shards hold 779,289
_CONVERSATIONS, _PICTURES = 2000, 500  # different ones, which repeat


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--records", type=whole(1), default=100_000)
    parser.add_argument("--rows", type=whole(1), default=779_289, help="rows of the Parquet index")
    common.add_result_flags(parser, quick="a tenth of the records")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        data, images, check = args.one
        print(json.dumps(started(data, None if images == "-" else images, check == "check")))
        return
    if args.quick:
        args.records, args.rows = args.records // 10, args.rows // 10
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder), args.records, args.rows)
    meta = {"distinct_records": _CONVERSATIONS, "distinct_pictures": _PICTURES}
    print(common.write_result("data_preflight", rows, folder=common.result_folder(args), **meta))


def measured(folder: Path, records: int, rows: int) -> list[dict]:
    """A start for each kind of input."""
    conversations = list(common.conversation_records(min(_CONVERSATIONS, records), "x.jpg", text_only=0.1))
    pictures = [small_jpeg(seed) for seed in range(min(_PICTURES, records))]
    cases = [
        ("json and zip", write_json_and_zip(folder / "zip", conversations, pictures, records), True),
        ("parquet", (write_shards(folder / "few", conversations, pictures, records), "-"), True),
        ("parquet, index only", (write_shards(folder / "many", conversations, pictures[:1], rows), "-"), False),
    ]
    time.sleep(2.5)  # time stamps this old are trusted
    results = []
    for what, (data, images), check in cases:
        results.append({"input": what} | run_watched([data, images, "check" if check else "index"]))
        print(results[-1], flush=True)
    return results


def started(data: str, images: str | None, check: bool) -> dict:
    """One start: seconds of its parts."""
    from llava.conversation import get_template
    from llava.data.images import ImageStore
    from llava.data.preflight import Rules, preflight
    from llava.data.records import load_records

    times = [time.perf_counter()]
    table = load_records(data, check=False)
    times.append(time.perf_counter())
    result = {"records": len(table), "index_s": times[1] - times[0]}
    if check:
        store = ImageStore(images)
        times.append(time.perf_counter())
        for name, full in (("headers_s", False), ("decoded_s", True)):
            rules = Rules(get_template("qwen_1_5"), "upstream", full)
            manifest, _ = preflight(table, store, rules, show_progress=False)
            times.append(time.perf_counter())
            result[name] = times[-1] - times[-2]
            assert not manifest.faults, manifest.faults
        result["members_s"] = times[2] - times[1]
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in result.items()}


def run_watched(arguments: list[str | Path]) -> dict:
    """The result of one start, with the peak memory of all its processes together, in MiB."""
    command = [sys.executable, "-m", "benchmarks.data_preflight", "--one", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak, most = 0.0, 0
        while process.poll() is None:
            sizes = []
            for member in (process.pid, *descendants(process.pid)):
                with contextlib.suppress(OSError):  # it has just ended
                    sizes.append(common.memory_mib(member, "Pss"))
            peak, most = max(peak, sum(sizes)), max(most, len(sizes))
            time.sleep(0.05)
        lines = process.stdout.read().strip().splitlines()
    if process.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return json.loads(lines[-1]) | {"processes": most, "peak_mib": round(peak)}


# --- inputs -----------------------------------------------------------------------------------------------------------


def small_jpeg(seed: int) -> bytes:
    """A picture of about 4 KB."""
    levels = np.random.default_rng(seed).integers(0, 256, (14, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(levels).resize((128, 112), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def write_json_and_zip(folder: Path, conversations: list[dict], pictures: list[bytes], count: int) -> tuple[Path, Path]:
    """Writes `data.json` and `images.zip` with `count` records and pictures; returns their paths."""
    folder.mkdir()
    numbered = zip(range(count), itertools.cycle(conversations), strict=False)
    records = (
        record | {"id": str(i)} | ({"image": f"{i % 100:05d}/{i}.jpg"} if "image" in record else {})
        for i, record in numbered
    )
    common.write_records(folder / "data.json", records)
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for index in range(count):
            archive.writestr(f"{index % 100:05d}/{index}.jpg", pictures[index % len(pictures)])
    return folder / "data.json", folder / "images.zip"


def write_shards(folder: Path, conversations: list[dict], pictures: list[bytes], count: int) -> Path:
    """Writes shards like LLaVA-NeXT's: 100 rows per row group; `image` is a struct of bytes and path, or null."""
    folder.mkdir()
    total = -(-count // _SHARD)
    for shard, start in enumerate(range(0, count, _SHARD)):
        rows = range(start, min(start + _SHARD, count))
        records = [conversations[i % len(conversations)] for i in rows]
        images = [
            {"bytes": pictures[i % len(pictures)], "path": None} if "image" in record else None
            for i, record in zip(rows, records, strict=True)
        ]
        columns = {
            "id": [str(i) for i in rows],
            "conversations": [record["conversations"] for record in records],
            "data_source": ["synthetic"] * len(rows),
            "image": pa.array(images, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        }
        path = folder / f"train-{shard:05d}-of-{total:05d}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=100)
    return folder


if __name__ == "__main__":
    main()
