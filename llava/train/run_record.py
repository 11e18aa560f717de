"""What a run was made from, written to `run.json` before its first step, so that two runs can be compared.

`{"format": 1, "starts": [{"configuration": {...}, "provenance": {...}}, ...]}`: one start, and one more each time the
run was continued from a checkpoint. `configuration` has everything that decides the trained weights: flags, data, order
of samples, initial weights, adapter, code, versions, devices. `provenance` says when, where and by which command.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from llava.model.multimodal_projector.adapter import ADAPTER_FILE
from llava.model.multimodal_projector.norm import projector_norm
from llava.model.zero3 import gathered
from llava.provenance import RUN_FILE, RUN_FORMAT, code_digest, git_commit, read_starts, version_of
from llava.train.batches import sample_order
from llava.train.checkpoint import replace_file
from llava.train.optim import part_of

PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "deepspeed", "peft", "numpy", "pillow", "liger-kernel")
# Flags that say where a run writes and what it continues, not what it computes.
PLACES = {"output_dir", "overwrite_output_dir", "run_name", "resume_from_checkpoint", "local_rank", "hub_token"}


def write_run_record(trainer: Any, model_args: Any, data_args: Any, training_args: Any, resumed: bool) -> None:
    """Writes `run.json`, or adds a start to it where the run is `resumed`. Every rank must call; one writes."""
    configuration = {
        "model": dataclasses.asdict(model_args),
        "data": dataclasses.asdict(data_args) | {"records": trainer.train_dataset.records.key},
        "training": {k: v for k, v in training_args.to_dict().items() if k not in PLACES},
        "deepspeed_config": _json_file(training_args.deepspeed),
        "adapter": adapter_digest(model_args.pretrain_mm_mlp_adapter),
        "order": order_digest(sample_order(trainer.train_dataset, training_args)),
        "initial_weights": weights_digests(trainer.model),
        "code": {"digest": code_digest(), "commit": git_commit()},
        "versions": {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES},
        "devices": {"ranks": training_args.world_size, "kind": device_name(training_args.device)},
    }
    if training_args.process_index == 0:
        path = Path(training_args.output_dir, RUN_FILE)
        starts = read_starts(path) if resumed and path.exists() else []
        starts.append({"configuration": configuration, "provenance": provenance()})
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"format": RUN_FORMAT, "starts": starts}, indent=1, default=str) + "\n")


def provenance() -> dict[str, str]:
    """When, where and by which command this process runs."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"started": now, "command": shlex.join([sys.executable, *sys.argv]), "folder": os.getcwd()}


def weights_digests(model: nn.Module) -> dict[str, str]:
    """SHA-256 of names, types and bytes of the parameters of each part; the projector's norm is a part of its own.

    Costs one reading of the weights; under ZeRO-3 one parameter at a time is gathered, and every rank must call.
    """
    norm = projector_norm(model.get_model().mm_projector)
    of_norm = set() if norm is None else {id(p) for p in norm.parameters()}
    digests: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        part = "mm_projector_norm" if id(parameter) in of_norm else part_of(name)
        with gathered(parameter):
            data = parameter.detach().cpu().contiguous().reshape(-1)
            digest = digests.setdefault(part, hashlib.sha256())
            digest.update(f"{name} {data.dtype}\0".encode() + data.view(torch.uint8).numpy().tobytes())
    return {part: digest.hexdigest() for part, digest in digests.items()}


def order_digest(order: Iterable[int]) -> str:
    """SHA-256 of the first epoch's order of samples; later epochs follow from the same seed."""
    return hashlib.sha256(np.fromiter(order, np.int64).tobytes()).hexdigest()


def adapter_digest(path: str | None) -> str | None:
    """SHA-256 of the adapter file that the projector starts from (given by its path or folder), or None."""
    if not path:
        return None
    file = Path(path)
    return hashlib.sha256((file / ADAPTER_FILE if file.is_dir() else file).read_bytes()).hexdigest()


def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _json_file(path: Any) -> Any:
    return json.loads(Path(path).read_text()) if isinstance(path, str) and path else path
