"""Twenty steps of LLaVA's and LLaVA-NeXT's own training runs, repeated here with `--mm_projector_norm none`.

`tests/golden/train/runs.json` holds what their entry points recorded: flags, sample order, loss of every step,
optimizer groups, learning rates, and the files written.
"""

import json
from pathlib import Path

import pytest
import torch
from paths import GOLDEN
from safetensors.torch import load_file
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from llava.train import train as train_module
from llava.train.llava_trainer import LLaVATrainer

RUNS = json.loads((GOLDEN / "train/runs.json").read_text())
STAGE_1 = {"s2": "s1", "s2_gc": "s1", "n2": "n1", "n2_hi": "n1"}
# Trained by upstream without ever seeing a gradient; frozen here.
WITHOUT_GRADIENT = "vision_model.post_layernorm."
# Video, tiling and resampling, which this tree does not have, and the place the base model was read from.
CONFIG_FIELDS_LEFT_OUT = (
    {"_name_or_path", "vision_tower_pretrained", "mm_newline_position", "mm_resampler_type"}
    | {
        f"{prefix}_{name}"
        for prefix, names in {
            "image": ("crop_resolution", "grid_pinpoints", "split_resolution"),
            "mm_spatial_pool": ("mode", "stride"),
            "add": ("faster_video", "time_instruction"),
        }.items()
        for name in names
    }
    | {"rope_scaling", "faster_token_stride", "force_sample", "pos_skipping_range", "use_pos_skipping"}
)


class Recorder:
    """What a run did, step by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.losses, self.rates = [], []
        self.trainer = None
        training_step = LLaVATrainer.training_step

        def step(trainer, *args, **kwargs):
            self.trainer = trainer
            self.rates.append(trainer.lr_scheduler.get_last_lr())
            loss = training_step(trainer, *args, **kwargs)
            self.losses.append(loss.item())
            return loss

        monkeypatch.setattr(LLaVATrainer, "training_step", step)

    def settings_by_parameter(self) -> dict[str, tuple[float, float]]:
        """Parameter name -> (initial learning rate, weight decay)."""
        names = {p: name for name, p in self.trainer.model.named_parameters()}
        return {
            names[p]: (group["initial_lr"], group["weight_decay"])
            for group in self.trainer.optimizer.param_groups
            for p in group["params"]
        }


def upstreams_settings(run: str) -> dict[str, tuple[float, float]]:
    return {
        name: (group["lr"], group["weight_decay"])
        for group in RUNS[run]["param_groups"]
        for name in group["params"]
        if WITHOUT_GRADIENT not in name
    }


def recorded_tensors(prefix: str) -> dict[str, torch.Tensor]:
    tensors = load_file(GOLDEN / "train/projectors.safetensors")
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def repeat(run: str, folder: Path) -> Path:
    """Trains with upstream's flags, its samples in its order, from its projector; returns the output folder."""
    flags = dict(zip(*[iter(RUNS[run]["args"].split())] * 2, strict=True))
    inputs = GOLDEN / "train/inputs"
    records = json.loads((inputs / Path(flags["--data_path"]).name).read_text())
    order = RUNS[run]["sample_order"][: len(RUNS[run]["losses"]) * int(flags["--per_device_train_batch_size"])]
    (folder / "data.json").write_text(json.dumps([records[i] for i in order]))
    tensors = recorded_tensors(f"{STAGE_1[run]}/final/" if run in STAGE_1 else f"{run}/init/")
    adapter = {key: tensor for key, tensor in tensors.items() if "mm_projector" in key}
    torch.save(adapter, folder / "mm_projector.bin")
    flags.pop("--group_by_modality_length", None)  # the order is given
    flags |= {
        "--output_dir": folder / "out",
        "--model_name_or_path": inputs / Path(flags["--model_name_or_path"]).name,
        "--vision_tower": inputs / Path(flags["--vision_tower"]).name,
        "--image_folder": inputs / "img",
        "--data_path": folder / "data.json",
        "--pretrain_mm_mlp_adapter": folder / "mm_projector.bin",
        "--train_sampling_strategy": "sequential",
        "--label_masking": "upstream",
    }
    train_module.train([str(word) for pair in flags.items() for word in pair])
    return folder / "out"


def decay_qwen_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 4.40 does not recognise Qwen2's RMSNorm as a norm, and so lets its weight decay."""
    ours = LLaVATrainer.get_decay_parameter_names
    monkeypatch.setattr(
        LLaVATrainer,
        "get_decay_parameter_names",
        lambda trainer, model: (
            ours(trainer, model)
            + [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Qwen2RMSNorm)]
        ),
    )


@pytest.mark.numeric
@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_twenty_steps_equal_upstreams(run, tmp_path, monkeypatch):
    if run == "n2_hi":  # the only run with weight decay
        decay_qwen_norms(monkeypatch)
    recorder, upstream = Recorder(monkeypatch), RUNS[run]
    folder = repeat(run, tmp_path)

    assert recorder.losses == pytest.approx(upstream["losses"], rel=0, abs=1e-5)
    assert recorder.settings_by_parameter() == upstreams_settings(run)
    rates = [sorted(set(rates)) for rates in recorder.rates[1:]]
    assert rates == [pytest.approx(sorted(set(rates))) for rates in upstream["lrs_after_step"][:-1]]

    saved = load_file(folder / "model.safetensors")
    for name, tensor in recorded_tensors(f"{run}/final/").items():
        torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["s1", "s2", "n1", "n2"])
def test_files_keys_and_config_are_a_superset_of_upstreams(run, tmp_path):
    folder, upstream = repeat(run, tmp_path), RUNS[run]
    assert {name for name in upstream["files"] if not (folder / name).is_file()} == set()
    for name, shapes in upstream["files"].items():
        if shapes:
            tensors = load_file(folder / name) if name.endswith("safetensors") else torch.load(folder / name)
            found = {key: list(tensor.shape) for key, tensor in tensors.items()}
            assert {key: found.get(key) for key in shapes} == shapes
    config = json.loads((folder / "config.json").read_text())
    assert upstream["config"].keys() - config.keys() <= CONFIG_FIELDS_LEFT_OUT
    assert {f for f in upstream["config"].keys() & config.keys() if upstream["config"][f] != config[f]} <= {
        "architectures", "mm_vision_tower", "model_type", "sliding_window", "transformers_version"
    }  # fmt: skip


def test_weight_decay_leaves_qwens_norms_alone(tmp_path, monkeypatch):
    recorder = Recorder(monkeypatch)
    repeat("n2_hi", tmp_path)
    ours, upstreams = recorder.settings_by_parameter(), upstreams_settings("n2_hi")
    differing = {name for name in upstreams if ours[name] != upstreams[name]}
    assert differing == {name for name in upstreams if name.startswith("model.") and name.endswith("norm.weight")}
    assert recorder.losses == pytest.approx(RUNS["n2_hi"]["losses"], rel=0, abs=3e-3)
