"""What identifies a run: flags, data, template, tokenizer, code, versions, devices, initial weights.

`resume.json`, in the output folder and in every checkpoint, holds the settings that a continuation must share, so that
its numbers stay the same. `run.json`, written before the first step, holds everything that decides the trained weights,
so that two runs can be compared: `{"format": 1, "starts": [{"configuration": {...}, "provenance": {...}}, ...]}`, with
one start more for each time that the run was continued.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import shlex
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from llava.conversation import get_template
from llava.data.dataset import LazySupervisedDataset
from llava.data.images import ImageStore
from llava.data.records import RecordTable, record_images
from llava.model.builder import read_config
from llava.model.llava_arch import LlavaMetaForCausalLM
from llava.model.multimodal_projector.adapter import ADAPTER_FILE
from llava.model.multimodal_projector.norm import projector_norm
from llava.model.zero3 import gathered
from llava.train.arguments import DataArguments, ModelArguments, TrainingArguments, decides_numbers
from llava.train.batches import global_batch_size, sample_order
from llava.train.checks import image_store
from llava.train.distributed import on_first
from llava.train.optim import part_of
from llava.utils import plugins
from llava.utils.digests import bytes_digest, model_digest, sampled_digest
from llava.utils.files import write_json, write_text
from llava.utils.machine import machine
from llava.utils.provenance import RUN_FILE, RUN_FORMAT, read_starts
from llava.utils.versions import software

SETTINGS_FILE = "resume.json"
Settings = dict[str, bool | int | float | str | None]
"""Flags and digests by name, as `resume.json` holds them."""

# Flags that say where a run writes and what it continues from.
_PLACES = {"output_dir", "run_name", "resume_from_checkpoint", "local_rank", "hub_token"}
_SAMPLE = 4096  # records whose pictures are read


# --- resume.json ------------------------------------------------------------------------------------------------------


def run_settings(
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    records: RecordTable,
    tokenizer: PreTrainedTokenizerBase,
) -> Settings:
    """What decides the numbers of a run, as JSON values. Every rank must call."""
    fields = [(args, f) for args in (model_args, data_args, training_args) for f in dataclasses.fields(args) if f.init]
    flags = {f.name: getattr(args, f.name) for args, f in fields if f.name[0] != "_" and decides_numbers(f.name)}
    settings = {k: v if isinstance(v, bool | int | float | None) else str(v) for k, v in flags.items()}
    settings |= {"world_size": training_args.world_size, "global_batch": global_batch_size(training_args)}
    # The part of DeepSpeed's configuration that decides which states a checkpoint holds.
    zero = training_args.hf_deepspeed_config.config.get("zero_optimization", {}) if training_args.deepspeed else None
    settings["deepspeed"] = "none" if zero is None else f"ZeRO-{zero.get('stage', 0)}"
    settings["data"] = f"{len(records)} records, SHA-256 {records.key}"
    settings["template"] = _digest(repr(get_template(model_args.version)))
    settings["tokenizer"] = tokenizer_digest(tokenizer)
    settings |= plugins.recorded()

    def contents() -> Settings:  # the same wherever the files are
        base, tower, cache_dir = model_args.model_name_or_path, model_args.vision_tower, training_args.cache_dir
        config = read_config(base, cache_dir=cache_dir)
        if own := getattr(config, "mm_vision_tower", None):  # LLaVA's checkpoints may leave the tower where it was
            tower = None if getattr(config, "mm_vision_config", None) else own
        return {
            "language_model_files": model_digest(base, cache_dir),
            "vision_tower_files": tower and model_digest(tower),
            "adapter_file": adapter_digest(model_args.pretrain_mm_mlp_adapter),
            "pictures": pictures_digest(image_store(data_args, records), records),
        }

    return settings | on_first(contents)


def pictures_digest(images: ImageStore, records: RecordTable) -> str:
    """A digest of the records' pictures by name and content, wherever they are.

    All are read if there are up to 4,096 records, otherwise those of 4,096 records that are spread evenly. Of zip files
    the checksums of all members count, of Parquet files 4,096 blocks of 64 KiB altogether (`sampled_digest`).
    """
    count = min(len(records), _SAMPLE)
    shown = (image for i in range(count) for image in record_images(records[len(records) * i // count]))
    blocks = max(1, _SAMPLE // len(records.sources))
    return f"SHA-256 {images.content(shown, partial(sampled_digest, blocks=blocks))}"


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of all that decides a text's ids: normaliser, splitting, merges, vocabulary and added tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str()) | {"truncation": None, "padding": None}  # these change with every call
    else:  # a tokenizer without the fast library
        file = getattr(tokenizer, "vocab_file", None)
        state = [sorted(tokenizer.get_vocab().items()), file and bytes_digest(Path(file))]
    return _digest(json.dumps([state, tokenizer.special_tokens_map], sort_keys=True, default=str))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def adapter_digest(path: str | None) -> str | None:
    """SHA-256 of the adapter file that the projector starts from (given by its path or folder), or None."""
    if not path:
        return None
    file = Path(path, ADAPTER_FILE) if Path(path).is_dir() else Path(path)
    return bytes_digest(file) if file.is_file() else None  # loading it raises an error that names it


def write_settings(folder: Path, settings: Settings) -> None:
    """Writes `resume.json` of a checkpoint or of the output folder."""
    write_json(folder / SETTINGS_FILE, {"settings": settings}, synced=True)


# --- run.json ---------------------------------------------------------------------------------------------------------


def write_run_record(
    model: LlavaMetaForCausalLM,
    dataset: LazySupervisedDataset,
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    settings: Settings,
    resumed: bool,
) -> None:
    """Writes `run.json`, or adds a start to it if the run is `resumed`. Every rank must call; one writes."""
    records, device, given = dataset.records, training_args.device, training_args.deepspeed
    assert isinstance(records, RecordTable)  # lists are for callers that record nothing
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    configuration = {
        "model": {name: value for name, value in dataclasses.asdict(model_args).items() if name != "plugin"},
        **({"plugins": plugins.digests} if plugins.digests else {}),
        "data": dataclasses.asdict(data_args) | {"records": records.key, "pictures": settings["pictures"]},
        "training": {k: v for k, v in training_args.to_dict().items() if k not in _PLACES},
        "deepspeed_config": json.loads(Path(given).read_text()) if isinstance(given, str) and given else given,
        "adapter": settings["adapter_file"],
        # Of the first epoch; the order of later ones follows from the same seed.
        "order": hashlib.sha256(np.fromiter(sample_order(dataset, training_args), np.int64).tobytes()).hexdigest(),
        "initial_weights": weights_digests(model),
        **software(),
        "devices": {"ranks": training_args.world_size, "kind": kind, **preloaded_libraries()},
    }
    if training_args.process_index == 0:
        path = Path(training_args.output_dir, RUN_FILE)
        starts = read_starts(path) if resumed and path.exists() else []
        provenance = {
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join([sys.executable, *sys.argv]),
            "folder": os.getcwd(),
            "machine": machine(),
        }
        starts.append({"configuration": configuration, "provenance": provenance})
        text = json.dumps({"format": RUN_FORMAT, "starts": starts}, indent=1, default=str)
        write_text(path, text + "\n", synced=True)


def preloaded_libraries() -> dict[str, str]:
    """The libraries of `LD_PRELOAD` that may change a run's numbers, as other kernels of MKL do; allocators do not."""
    names = [os.path.basename(path) for path in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()]
    others = " ".join(name for name in names if "malloc" not in name)
    return {"preloaded": others} if others else {}


def weights_digests(model: LlavaMetaForCausalLM) -> dict[str, str]:
    """SHA-256 of names, types and bytes of the parameters of each part; the projector's norm is a part of its own.

    Rank 0 reads the weights once, others only hand over what ZeRO-3 gathers, so that every rank must call.
    """
    norm = projector_norm(model.get_model().mm_projector)
    of_norm = set() if norm is None else {id(p) for p in norm.parameters()}
    digests: dict[str, hashlib._Hash] = {}
    for name, parameter in model.named_parameters():
        part = "mm_projector_norm" if id(parameter) in of_norm else part_of(name)
        with gathered(parameter):
            if PartialState().is_main_process:
                data = parameter.detach().cpu().contiguous().reshape(-1)
                digest = digests.setdefault(part, hashlib.sha256())
                digest.update(f"{name} {data.dtype}\0".encode())
                digest.update(data.view(torch.uint8).numpy().data)  # a copy would take twice as long as the sum
    return {part: digest.hexdigest() for part, digest in digests.items()}
