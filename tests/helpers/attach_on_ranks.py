"""Trains a tiny LLaVA with an attached norm, on one process or on two CPU ranks.

    python attach_on_ranks.py zero3 MODEL OUTPUT      # on every rank: the Trainer of transformers under ZeRO-3
    python attach_on_ranks.py fsdp MODEL OUTPUT       # on every rank: PyTorch's FSDP and a loop

MODEL is a folder of transformers. OUTPUT gets what `save_pretrained` writes, or `state.pt`, the full tensors.
"""

import json
import sys
from pathlib import Path

import torch
from paths import ROOT
from torch import nn
from transformers import LlavaForConditionalGeneration, Trainer, TrainingArguments
from vision_language_models import IMAGE, ids_for, pixels

from llava.attach import attach, load_attached

STEPS, SAMPLES = 2, 4
OPTIONS = {"max_steps": STEPS, "learning_rate": 1e-3, "adam_epsilon": 1e-4, "report_to": "none"}
OPTIONS |= {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}


def record() -> dict[str, torch.Tensor]:
    """The only record, so that ranks need no order."""
    ids = ids_for([16])["input_ids"][0]
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), "pixel_values": pixels(3, 16, 16)}


def attached(folder: str) -> nn.Module:
    return attach(LlavaForConditionalGeneration.from_pretrained(folder))


def by_trainer(model: nn.Module, arguments: TrainingArguments) -> Trainer:
    trainer = Trainer(model, arguments, train_dataset=[record()] * 16)
    trainer.train()
    return trainer


def by_loop(model: nn.Module) -> None:
    batch = {name: tensor[None] for name, tensor in record().items()}
    optimizer = torch.optim.AdamW(model.train().parameters(), 1e-3, eps=1e-4)
    for _ in range(STEPS):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def alone(way: str, model: str, output: str) -> dict[str, torch.Tensor]:
    """The state that one process reaches."""
    trained = attached(model)
    if way == "zero3":
        by_trainer(trained, TrainingArguments(output, use_cpu=True, per_device_train_batch_size=SAMPLES, **OPTIONS))
    else:
        by_loop(trained)
    return trained.state_dict()


def zero3(model: str, output: str) -> None:
    from llava.model.zero3 import full_state_dict, is_partitioned
    from llava.train.distributed import use_gloo_backend

    use_gloo_backend()
    config = json.loads((ROOT / "deepspeed_configs/zero3.json").read_text())
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # tiny tensors are partitioned too
    # Made before the model, so that loading partitions it.
    arguments = TrainingArguments(output, deepspeed=config, per_device_train_batch_size=SAMPLES // 2, **OPTIONS)
    trainer = by_trainer(attached(model), arguments)
    assert is_partitioned(trainer.model.model.multi_modal_projector.mm_norm)
    trainer.save_model()
    torch.distributed.barrier()
    again = load_attached(output)
    assert is_partitioned(again.model.multi_modal_projector)
    expected, read = full_state_dict(trainer.model), full_state_dict(again)
    assert expected.keys() == read.keys()
    assert all(torch.equal(tensor, read[name]) for name, tensor in expected.items())


def fsdp(model: str, output: str) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.distributed.init_process_group("gloo")
    trained, mesh = attached(model), init_device_mesh("cpu", (2,))
    inner = trained.model
    for part in (inner.multi_modal_projector, *inner.language_model.layers, trained):
        fully_shard(part, mesh=mesh)
    assert isinstance(inner.multi_modal_projector.mm_norm.weight, DTensor)
    by_loop(trained)
    state = get_model_state_dict(trained, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if torch.distributed.get_rank() == 0:
        Path(output).mkdir()
        torch.save(state, f"{output}/state.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    {"zero3": zero3, "fsdp": fsdp}[sys.argv[1]](*sys.argv[2:])
