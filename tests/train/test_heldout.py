"""Held-out loss in training: exact, also in its parts, the same on any number of ranks, and it changes no weight."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from data_files import write_varied
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from training import LORA, build, flags, logged, losses, same, stopped

from llava.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava.train import train as train_module
from llava.train.heldout import assigned, parts_of
from llava.train.llava_trainer import LLaVATrainer

EVALS = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.fixture(scope="module")
def heldout(tiny):
    """`--eval_data_path` of two files: pictures and text of varied lengths, and the tiny records."""
    write_varied(tiny, tiny / "data/varied.json")
    return f"{tiny}/data/varied.json,{tiny}/data/finetune.json"


def tensors(folder) -> dict[str, torch.Tensor]:
    """All weights that a folder holds, by file and name."""
    files = {f.name: load_file(f) for f in folder.glob("*.safetensors")}
    bins = [f for f in folder.glob("*.bin") if f.name != "training_args.bin"]
    files |= {f.name: torch.load(f, weights_only=True) for f in bins}
    return {f"{file} {name}": tensor for file, content in files.items() for name, tensor in content.items()}


def evaluations(folder) -> list[dict]:
    """The log's lines about held-out data, without what differs between equal runs."""
    return [{k: v for k, v in line.items() if k != "eval/seconds"} for line in logged(folder, "eval/loss")]


# --- which samples ----------------------------------------------------------------------------------------------------


def test_every_sample_counts_once_and_ranks_compute_one_modality_at_a_time():
    random = np.random.default_rng(0)
    lengths = (random.integers(1, 100, 53) * random.choice([-1, 1], 53)).tolist()
    parts = parts_of(lengths, max_samples=4, max_tokens=150)
    assert sorted(i for part in parts for i in part.samples) == list(range(53))
    for part in parts:
        assert {lengths[i] < 0 for i in part.samples} == {part.modality == "text"}
        longest = max(abs(lengths[i]) for i in part.samples)
        assert len(part.samples) == 1 or (len(part.samples) <= 4 and longest * len(part.samples) <= 150)
    for ranks in (1, 2, 3, 8):
        rounds = list(zip(*assigned(parts, ranks), strict=True))
        assert all(len({part.modality for part in parts_at_once}) == 1 for parts_at_once in rounds)
        given = [i for parts_at_once in rounds for part in parts_at_once for i in part.samples]
        assert sorted(i for i in given if i >= 0) == list(range(53))
        assert len([i for i in given if i < 0]) < 2 * ranks


# --- what is measured -------------------------------------------------------------------------------------------------


def test_losses_equal_an_independent_sum_in_float64_over_each_sample_alone(tiny, tmp_path, heldout):
    _, trainer = build(flags(tiny, tmp_path, 2, eval_data_path=heldout, **EVALS))
    dataset = trainer.heldout.dataset
    model = trainer.model.double().eval()
    visual = model.get_vision_tower().num_tokens
    sums = {}
    with torch.no_grad():
        for i in range(len(dataset)):
            ids, labels = dataset[i]["input_ids"], dataset[i]["labels"]
            images = dataset[i].get("images")
            logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], images=images).logits[0]
            widths = torch.where(ids == IMAGE_TOKEN_INDEX, visual, 1)
            labels = labels.repeat_interleave(widths)[1 : len(logits)]
            loss = cross_entropy(logits[: len(labels)].double(), labels, ignore_index=IGNORE_INDEX, reduction="sum")
            kind = "_text" if images is None else "_image"
            for name in ("", kind):
                before = sums.get(name, (0.0, 0))
                sums[name] = (before[0] + loss.item(), before[1] + int((labels != IGNORE_INDEX).sum()))
    model.float()
    totals = trainer.heldout.totals(model, lambda batch: batch)
    found = trainer.heldout.metrics(totals)
    assert found.keys() == {"eval_loss", "eval_loss_image", "eval_loss_text"}
    for name, (loss, count) in sums.items():
        assert found[f"eval_loss{name}"] == pytest.approx(loss / count, rel=1e-6)
    assert totals[:, 1].tolist() == [sums["_image"][1], sums["_text"][1]]


# --- what it leaves behind --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, {"dataloader_num_workers": 1}),
        (2, LORA | {"lora_dropout": 0.5}),
        (2, {"bf16": True, "max_tokens_per_micro_batch": 450, "gradient_accumulation_steps": 2}),
    ],
)
def test_a_run_with_evaluation_ends_in_the_same_weights(tiny, tmp_path, heldout, stage, options):
    options |= {"max_steps": 3}
    train_module.train(flags(tiny, tmp_path / "without", stage, **options))
    train_module.train(
        flags(tiny, tmp_path / "with", stage, eval_data_path=heldout, eval_on_start=True, **EVALS, **options)
    )
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert same(tensors(tmp_path / "with"), tensors(tmp_path / "without"))
    found = evaluations(tmp_path / "with")
    assert [line["step"] for line in found] == [0, 1, 2, 3]
    assert found[-1]["eval/loss"] < found[0]["eval/loss"]


@pytest.mark.slow
def test_a_continued_run_logs_what_the_uninterrupted_one_does(tiny, tmp_path, heldout):
    options = {"eval_data_path": heldout, "eval_on_start": True, "max_steps": 4, "save_strategy": "steps"}
    options |= {"save_steps": 2, **EVALS}
    train_module.train(flags(tiny, tmp_path / "whole", 2, **options))
    stopped(tmp_path / "whole", 2, tmp_path / "resumed")
    train_module.train(flags(tiny, tmp_path / "resumed", 2, **options))
    assert evaluations(tmp_path / "resumed") == evaluations(tmp_path / "whole")


@pytest.mark.slow
def test_a_continued_run_saves_and_evaluates_as_its_own_flags_say(tiny, tmp_path, heldout):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    train_module.train(flags(tiny, tmp_path / "whole", 2, **options))
    stopped(tmp_path / "whole", 2, tmp_path / "resumed")
    train_module.train(
        flags(tiny, tmp_path / "resumed", 2, eval_data_path=heldout, **EVALS, **options | {"save_steps": 1})
    )
    assert [line["step"] for line in evaluations(tmp_path / "resumed")] == [3, 4]
    assert (tmp_path / "resumed/checkpoint-3").is_dir()


@pytest.mark.slow
def test_a_signal_within_an_epoch_starts_no_evaluation(tiny, tmp_path, heldout, monkeypatch):
    options = {"eval_data_path": heldout, "eval_strategy": "epoch", "save_strategy": "epoch"}
    options |= {"per_device_train_batch_size": 8, "max_steps": 6}
    argv = flags(tiny, tmp_path / "run", 2, **options)
    train_module.train(flags(tiny, tmp_path / "whole", 2, **options))
    compute = LLaVATrainer.training_step

    def signalled(trainer, *args):
        if trainer.state.global_step == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute(trainer, *args)

    monkeypatch.setattr(LLaVATrainer, "training_step", signalled)
    with pytest.raises(SystemExit):
        train_module.train(argv)
    assert not evaluations(tmp_path / "run")
    train_module.train(argv)
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole")
    assert same(tensors(tmp_path / "run"), tensors(tmp_path / "whole"))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_data_path": "x.json"}, "--eval_data_path x.json: nothing says when it is read"),
        (EVALS, "--eval_strategy needs held-out records; name them with --eval_data_path"),
        (
            {"eval_data_path": "x.json", "lr_scheduler_type": "reduce_lr_on_plateau", **EVALS},
            "--lr_scheduler_type reduce_lr_on_plateau would let held-out data decide the learning rate",
        ),
    ],
)
def test_wrong_flags_are_named(tiny, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train_module.train(flags(tiny, tmp_path, 2, **options))


def test_bad_held_out_records_are_refused_or_counted(tiny, tmp_path, heldout, caplog):
    records = json.loads((tiny / "data/finetune.json").read_text())
    missing = next(r for r in records if "image" in r) | {"id": "gone", "image": "gone.png"}
    (tmp_path / "eval.json").write_text(json.dumps([*records, missing]))
    options = {"eval_data_path": tmp_path / "eval.json", "max_steps": 1, **EVALS}
    with pytest.raises(ValueError, match="eval.json: .*/gone.png does not exist; check --eval_image_folder and the"):
        train_module.train(flags(tiny, tmp_path / "run", 2, **options))
    train_module.train(flags(tiny, tmp_path / "run", 2, on_bad_record="skip", **options))
    assert "--eval_data_path: 1 records are left out; python -m llava.data.preflight --data_path" in caplog.text
    assert not (tmp_path / "run/quarantine.jsonl").exists()
