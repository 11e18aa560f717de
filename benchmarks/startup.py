"""Time to the first batch and memory per worker, for a table of 779,289 records; cold and warm.

Cold converts the JSON file and measures all lengths; warm finds both in the cache. Each start is its own process;
imports of Python and torch are left out, since they do not depend on the data. Records are conversations like LLaVA's
(two thirds with a 1-megapixel JPEG, about 2 KB of JSON each); there are 2,000 different ones, which repeat.

A batch is the 16 samples that a rank takes in a step of stage 2 on 8 GPUs. The memory of a further worker is the growth
of all processes' proportional memory (PSS) from two workers to four, divided by two.
"""

import itertools
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import common
from llava.utils.commands import Parser, whole

DISTINCT = 2000  # different records
BATCHES = 4  # of 16 samples, before memory is read


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--records", type=whole(1), default=779_289)
    common.add_output_dir(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder), args.records)
    meta = {"distinct_records": DISTINCT, "batches_before_memory": BATCHES}
    print(common.write_result("startup", rows, folder=args.output_dir, **meta))


def measured(folder: Path, count: int) -> list[dict[str, Any]]:
    """The rows of a cold start, and of warm ones with two and with four workers."""
    source = folder / f"{count}.json"
    common.write_photo(folder / "photo.jpg")
    records = list(common.conversation_records(DISTINCT, "photo.jpg", text_only=1 / 3))
    common.write_records(source, itertools.islice(itertools.cycle(records), count))
    time.sleep(2.5)  # a time stamp this old is trusted; only a start right after the file was written finds a newer one
    rows, tokenizer = [], str(common.npm_tokenizer("qwen2_5"))
    for cache, workers in (("cold", 2), ("warm", 2), ("warm", 4)):
        row = {"records": count, "json_mb": source.stat().st_size // 10**6, "cache": cache}
        with common.own_process() as process:
            rows.append(row | process.submit(started, source, tokenizer, workers).result())
    _, two, four = (row.pop("all_pss_mib") for row in rows)
    rows[2]["further_worker_mib"] = round((four - two) / 2, 1)
    print(*rows, sep="\n")
    return rows


def started(source: Path, tokenizer_folder: str, workers: int) -> dict[str, Any]:
    """One start: seconds to the first batch, and memory after `BATCHES` batches."""
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    from llava.conversation import get_template
    from llava.data.dataset import DataCollatorForSupervisedDataset, LazySupervisedDataset
    from llava.data.images import ImageStore
    from llava.data.preflight import Rules, preflight
    from llava.data.records import load_records
    from llava.mm_utils import load_tokenizer
    from llava.train.batches import sample_order, step_loader

    tokenizer = load_tokenizer(tokenizer_folder, model_max_length=4096)
    processor = SiglipImageProcessorPil(size={"height": 384, "width": 384})
    begin = time.perf_counter()
    records = load_records(str(source), check=False)
    rules = Rules(get_template("qwen_1_5"), "upstream")
    preflight(records, ImageStore(source.parent), rules, show_progress=False)
    options = {"label_masking": "upstream", "show_progress": False}
    dataset = LazySupervisedDataset(
        records, tokenizer, "qwen_1_5", processor, str(source.parent), "square", 729, 4096, **options
    )
    dataset.modality_lengths()
    args = settings(workers)
    batches = iter(step_loader(sample_order(dataset, args), dataset, DataCollatorForSupervisedDataset(0), args))
    next(batches)
    first = time.perf_counter()
    for _ in range(BATCHES):
        next(batches)
    return {
        "workers": workers,
        "first_batch_s": round(first - begin, 2),
        "all_pss_mib": sum(map(common.memory_mib, ("self", *(worker.pid for worker in batches._workers)))),
    }


def settings(workers: int) -> SimpleNamespace:
    """The training arguments that the data loader reads: one rank, 16 samples per step."""
    loader = {"dataloader_num_workers": workers, "dataloader_pin_memory": False, "dataloader_prefetch_factor": None}
    loader |= {"dataloader_drop_last": False, "dataloader_persistent_workers": False}
    order = {"seed": 42, "data_seed": None, "group_by_modality_length": True, "length_group_window": 1}
    step = {"train_batch_size": 1, "world_size": 1, "gradient_accumulation_steps": 16, "process_index": 0}
    step |= {"padding_free": True, "loss_reduction": "token_mean", "max_tokens_per_micro_batch": None}
    return SimpleNamespace(**loader, **order, **step, device=SimpleNamespace(type="cpu"))


if __name__ == "__main__":
    main()
