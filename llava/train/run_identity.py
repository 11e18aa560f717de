"""What identifies a run: flags, data, template, tokenizer, code, versions, devices, initial weights.

It serves two purposes. `run_identity` holds what a continuation must share with the run, so that its numbers stay the
same (`resume.json`); `run_configuration` holds everything that decides the trained weights, so that two runs can be
compared (`run.json`).
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
from llava.train.arguments import (
    CHANGEABLE,
    DataArguments,
    ModelArguments,
    TrainingArguments,
    decides_numbers,
)
from llava.train.batches import sample_order
from llava.train.heldout import eval_data_arguments
from llava.train.optim import part_of
from llava.train.ranks import from_first
from llava.train.run_checks import image_store
from llava.utils import plugins
from llava.utils.digests import bytes_digest, model_digest, sampled_digest
from llava.utils.versions import software

Setting = bool | int | float | str | None
Settings = dict[str, Setting]
"""What `run_identity` gives: flags and digests by name, as `resume.json` holds them."""

# Flags that say where a run writes and what it continues from.
_PLACES = {"output_dir", "overwrite_output_dir", "run_name", "resume_from_checkpoint", "local_rank", "hub_token"}
# Sections of a DeepSpeed configuration that only measure or print.
_DEEPSPEED_REPORTS = {
    "timers", "wall_clock_breakdown", "memory_breakdown", "steps_per_print", "dump_state", "flops_profiler",
    "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet",
}  # fmt: skip
# The settings in which a continuation may differ. Samples stay in order on another number of ranks.
ALLOWED = {*CHANGEABLE.split(), "world_size", "adapter_file"}
PICTURES = "pictures"
CONTENTS = (PICTURES, "language_model_files", "vision_tower_files", "adapter_file", "eval_pictures")
"""The settings that say what files hold which flags name by their paths. Every run has the first."""
_SAMPLE = 4096  # records whose pictures are read


def run_identity(
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    records: RecordTable,
    tokenizer: PreTrainedTokenizerBase,
    eval_records: RecordTable | None = None,
) -> Settings:
    """What decides the numbers of a run, as JSON values: the settings in `resume.json`. Every rank must call.

    They include the held-out records if they choose the best checkpoint.
    """
    flags = {f.name: getattr(args, f.name) for args in (model_args, data_args, training_args) for f in _fields(args)}
    flags["deepspeed"] = _deepspeed_settings(training_args)
    settings = _settings(flags)
    settings["world_size"] = training_args.world_size
    settings["data"] = f"{len(records)} records, SHA-256 {records.key}"
    if eval_records is not None and training_args.metric_for_best_model:
        settings["eval_data"] = f"{len(eval_records)} records, SHA-256 {eval_records.key}"
    is_first = training_args.process_index == 0
    contents = _contents(model_args, data_args, training_args, records, eval_records) if is_first else {}
    settings |= from_first(contents)
    settings["template"] = _digest(repr(get_template(model_args.version)))
    settings["tokenizer"] = tokenizer_digest(tokenizer)
    if plugins.digests:
        settings["plugins"] = ", ".join(f"{name} SHA-256 {digest}" for name, digest in sorted(plugins.digests.items()))
    return settings


def _contents(
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    records: RecordTable,
    eval_records: RecordTable | None,
) -> Settings:
    """The settings named in `CONTENTS`, which are the same wherever the files are."""
    base, tower = model_args.model_name_or_path, model_args.vision_tower
    if not tower:
        config = read_config(base, cache_dir=training_args.cache_dir)
        if not getattr(config, "mm_vision_config", None):  # LLaVA's checkpoints may leave the tower where it was
            tower = getattr(config, "mm_vision_tower", None)
    contents = {
        PICTURES: pictures_digest(image_store(data_args, records), records),
        "language_model_files": model_digest(base, training_args.cache_dir),
        "vision_tower_files": tower and model_digest(tower),
        "adapter_file": adapter_digest(model_args.pretrain_mm_mlp_adapter),
    }
    if eval_records is not None and training_args.metric_for_best_model:
        images = image_store(eval_data_arguments(data_args), eval_records)
        contents["eval_pictures"] = pictures_digest(images, eval_records)
    return contents


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


def default_settings() -> Settings:
    """What `run_identity` gives for the flags' defaults: a run that is older than a flag ran with its default."""
    fields = [f for args in (ModelArguments, DataArguments, TrainingArguments) for f in _fields(args)]
    return _settings({f.name: f.default for f in fields if f.default is not dataclasses.MISSING})


def run_configuration(
    model: LlavaMetaForCausalLM,
    dataset: LazySupervisedDataset,
    model_args: ModelArguments,
    data_args: DataArguments,
    training_args: TrainingArguments,
    identity: Settings,
) -> dict[str, Any]:
    """Everything that decides the trained weights, as `run.json` holds it. Every rank must call."""
    records = dataset.records
    assert isinstance(records, RecordTable)  # lists are for callers that record nothing
    contents = {k: identity[k] for k in (PICTURES, "eval_data", "eval_pictures") if k in identity}
    mixture = {"mixture": records.source_counts()} if records.source_names else {}
    return {
        "model": {name: value for name, value in dataclasses.asdict(model_args).items() if name != "plugin"},
        **({"plugins": plugins.digests} if plugins.digests else {}),
        "data": dataclasses.asdict(data_args) | {"records": records.key} | contents | mixture,
        "training": {k: v for k, v in training_args.to_dict().items() if k not in _PLACES},
        "deepspeed_config": decisive_deepspeed_config(training_args.deepspeed),
        "adapter": adapter_digest(model_args.pretrain_mm_mlp_adapter),
        "order": order_digest(sample_order(dataset, training_args)),
        "initial_weights": weights_digests(model, training_args.process_index == 0),
        **software(),
        "devices": {"ranks": training_args.world_size, "kind": device_name(training_args.device)},
    }


def _settings(flags: dict[str, Any]) -> Settings:
    """The flags that can change the numbers, as JSON values."""
    decisive = {k: v for k, v in flags.items() if decides_numbers(k)}
    return {k: v if isinstance(v, bool | int | float | None) else str(v) for k, v in decisive.items()}


def _fields(args: Any) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(args) if f.init and not f.name.startswith("_")]


def _deepspeed_settings(args: TrainingArguments) -> str:
    """The part of the DeepSpeed configuration that decides which states a checkpoint holds."""
    if not args.deepspeed:
        return "none"
    config = args.hf_deepspeed_config.config
    return f"ZeRO-{config.get('zero_optimization', {}).get('stage', 0)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def weights_digests(model: LlavaMetaForCausalLM, is_first: bool = True) -> dict[str, str]:
    """SHA-256 of names, types and bytes of the parameters of each part; the projector's norm is a part of its own.

    The cost is one reading of the weights. Under ZeRO-3 one parameter at a time is gathered, and every rank must call.

    Args:
        model: the model whose weights are read.
        is_first: whether this rank writes the record; the others only help to gather, and get an empty dict.
    """
    norm = projector_norm(model.get_model().mm_projector)
    of_norm = set() if norm is None else {id(p) for p in norm.parameters()}
    digests: dict[str, hashlib._Hash] = {}
    for name, parameter in model.named_parameters():
        part = "mm_projector_norm" if id(parameter) in of_norm else part_of(name)
        with gathered(parameter):
            if not is_first:
                continue
            data = parameter.detach().cpu().contiguous().reshape(-1)
            digest = digests.setdefault(part, hashlib.sha256())
            digest.update(f"{name} {data.dtype}\0".encode())
            digest.update(data.view(torch.uint8).numpy().data)  # a copy would take twice as long as the sum
    return {part: digest.hexdigest() for part, digest in digests.items()}


def order_digest(order: Iterable[int]) -> str:
    """SHA-256 of the first epoch's order of samples; later epochs follow from the same seed."""
    return hashlib.sha256(np.fromiter(order, np.int64).tobytes()).hexdigest()


def adapter_digest(path: str | None) -> str | None:
    """SHA-256 of the adapter file that the projector starts from (given by its path or folder), or None."""
    if not path:
        return None
    file = Path(path, ADAPTER_FILE) if Path(path).is_dir() else Path(path)
    return bytes_digest(file) if file.is_file() else None  # loading it raises an error that names it


def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def decisive_deepspeed_config(given: Any) -> Any:
    """The configuration that `--deepspeed` names, without what only measures or prints; as given if there is none."""
    config = json.loads(Path(given).read_text()) if isinstance(given, str) and given else given
    return {key: value for key, value in config.items() if key not in _DEEPSPEED_REPORTS} if config else config
