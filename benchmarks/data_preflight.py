"""Time and memory to prepare and preflight 100,000 records with small pictures, and to index 779,289 Parquet rows.

The records are conversations like LLaVA's (one in ten text only) with JPEGs of a few KB, as JSON beside a zip file and
as Parquet shards whose rows hold the pictures. Each start is its own process and finds no cache: it reads the records
into their table. Those beside the zip file are also checked, with the pictures' headers and again with the pictures
decoded. The files were just written, so they are in the system's page cache. Imports are left out.

Memory is the proportional share (PSS) of the process and of those that it starts, added up and read every 50 ms.
"""

import contextlib
import itertools
import os
import tempfile
import time
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import common
from llava.utils.commands import Parser
from llava.utils.processes import descendants

_SHARD = 3_118  # rows: 250 shards hold 779,289
_CONVERSATIONS, _PICTURES = 2000, 500  # different ones, which repeat


def main() -> None:
    parser = Parser(description=__doc__)
    common.add_output_dir(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder), 100_000, 779_289)
    meta = {"distinct_records": _CONVERSATIONS, "distinct_pictures": _PICTURES}
    print(common.write_result("data_preflight", rows, folder=args.output_dir, **meta))


def measured(folder: Path, records: int, rows: int) -> list[dict]:
    """A start for each kind of input."""
    conversations = list(common.conversation_records(min(_CONVERSATIONS, records), "x.jpg", text_only=0.1))
    pictures = []
    for seed in range(min(_PICTURES, records)):
        common.write_photo(folder / "x.jpg", 128, 112, seed)
        pictures.append((folder / "x.jpg").read_bytes())
    cases = [
        ("json and zip", write_json_and_zip(folder / "zip", conversations, pictures, records)),
        ("parquet, index only", (write_shards(folder / "shards", conversations, pictures[0], rows), None)),
    ]
    time.sleep(2.5)  # time stamps this old are trusted
    results = []
    for what, (data, images) in cases:
        results.append({"input": what} | run_watched(data, images))
        print(results[-1], flush=True)
    return results


def started(data: Path, images: Path | None) -> dict:
    """One start: seconds of its parts; without pictures the index alone."""
    from llava.conversation import get_template
    from llava.data.images import ImageStore
    from llava.data.preflight import Rules, preflight
    from llava.data.records import load_records

    times = [time.perf_counter()]
    table = load_records(str(data), check=False)
    times.append(time.perf_counter())
    result = {"records": len(table), "index_s": round(times[1] - times[0], 2)}
    for name, full in (("headers_s", False), ("decoded_s", True)) if images else ():
        rules = Rules(get_template("qwen_1_5"), "upstream", full)
        manifest, _ = preflight(table, ImageStore(images), rules, show_progress=False)
        times.append(time.perf_counter())
        result[name] = round(times[-1] - times[-2], 2)
        assert not manifest.faults, manifest.faults
    return result


def run_watched(data: Path, images: Path | None) -> dict:
    """The result of one start, with the peak memory of all its processes together, in MiB."""
    peak = 0.0
    with common.own_process() as process:
        pid = process.submit(os.getpid).result()
        result = process.submit(started, data, images)
        while not result.done():
            sizes = []
            for member in (pid, *descendants(pid)):
                with contextlib.suppress(OSError):  # it has just ended
                    sizes.append(common.memory_mib(member))
            peak = max(peak, sum(sizes))
            time.sleep(0.05)
    return result.result() | {"peak_mib": round(peak)}


# --- inputs -----------------------------------------------------------------------------------------------------------


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


def write_shards(folder: Path, conversations: list[dict], picture: bytes, count: int) -> Path:
    """Writes shards like LLaVA-NeXT's: 100 rows per row group; `image` is a struct of bytes and path, or null."""
    folder.mkdir()
    total = -(-count // _SHARD)
    for shard, start in enumerate(range(0, count, _SHARD)):
        rows = range(start, min(start + _SHARD, count))
        records = [conversations[i % len(conversations)] for i in rows]
        images = [{"bytes": picture, "path": None} if "image" in record else None for record in records]
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
