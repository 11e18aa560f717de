"""The model card: what it says is recorded or given, what it cannot know it leaves out, and it is valid for the hub."""

import json
import re

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from training import flags, logged

from llava.eval.results import Answered, Results, TaskResult, write_results
from llava.export.__main__ import main
from llava.export.card import norm_gain
from llava.train.train import train
from llava.utils.intervals import share_interval


@pytest.fixture(scope="module")
def stages(tiny, tmp_path_factory):
    """The folders of two stages, the second from the first's adapter."""
    root = tmp_path_factory.mktemp("runs")
    train(flags(tiny, root / "pretrain", 1))
    train(flags(tiny, root / "finetune", 2, pretrain_mm_mlp_adapter=root / "pretrain", seed=7))
    return root


@pytest.fixture
def write_card(stages):
    """A function from flags to the card's text."""

    def write(*arguments, folder=stages / "finetune"):
        (folder / "README.md").unlink(missing_ok=True)
        command = ["card", "--model-path", folder, *arguments]
        assert main([str(word) for word in command]) == 0
        return (folder / "README.md").read_text()

    return write


def results(score, scores):
    samples = [Answered(str(number), value, "yes", "yes") for number, value in enumerate(scores)]
    task = TaskResult("accuracy", score, samples, 25.0, 1.0)
    return Results("/home/me/secret/ckpt", "0", "evaluate", {}, {}, "2026-11-22", {"scenes": task})


def test_the_hub_can_read_the_metadata_and_nothing_in_it_is_invented(write_card, stages, capsys):
    bare = ModelCard(write_card()).data.to_dict()
    assert bare == {"pipeline_tag": "image-text-to-text", "tags": ["llava", "vision-language", "gwc_layernorm"]}
    assert main(["card", "--model-path", str(stages / "finetune")]) == 2
    assert "README.md: already there" in capsys.readouterr().err
    flags = ("--license", "apache-2.0", "--base-model", "a/llm", "--base-model", "b/tower", "--dataset", "c/pictures")
    full = ModelCard(write_card(*flags)).data.to_dict()
    assert full["license"] == "apache-2.0" and full["datasets"] == ["c/pictures"]
    assert full["base_model"] == ["a/llm", "b/tower"]


def test_both_stages_are_told_with_settings_and_norms_and_without_folders(write_card, stages, tiny):
    text = write_card()
    rows = dict(re.findall(r"\| (.+?) \| `(.*?)` \|", text.partition("Stage 2")[2]))
    assert rows["seed"] == "7" and rows["learning_rate"] == "0.001" and rows["steps"] == "2"
    assert rows["data"] == "finetune.json" and rows["samples per step"] == "4"
    first = logged(stages / "pretrain")[0]["norm/llm_input"]
    assert f"first and last measured step: {first:.4g}, " in text.partition("Stage 2")[0]
    config = json.loads((stages / "finetune/config.json").read_text())
    assert f"| target norm of a visual token | {config['mm_projector_norm_target']} |" in text
    assert f"| {config['mm_projector_norm_init_gain']}, {norm_gain(stages / 'finetune')} |" in text
    assert str(tiny) not in text and str(stages) not in text and "/tmp" not in text


def test_the_gain_is_that_of_the_weight_files_in_both_layouts(tmp_path):
    gain, bias, linear = torch.full((8,), -0.25), torch.zeros(8), torch.ones(8, 8)
    for prefix, norm in (("model.mm_projector.", "3"), ("model.multi_modal_projector.", "norm")):
        tensors = {f"{prefix}0.weight": linear, f"{prefix}{norm}.weight": gain, f"{prefix}{norm}.bias": bias}
        save_file(tensors | {"model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
        assert norm_gain(tmp_path) == 0.25
    (tmp_path / "model.safetensors").unlink()
    for name in ("non_lora_trainables.bin", "mm_projector.bin"):  # with a norm before the MLP too
        torch.save({"mm_projector.9.weight": torch.ones(8), "mm_projector.10.weight": gain}, tmp_path / name)
        assert norm_gain(tmp_path) == 0.25


def test_results_have_wilson_intervals_only_where_the_score_is_the_mean(write_card, tmp_path, capsys):
    write_results(results(75.0, [1, 1, 1, 0]), tmp_path)
    low, high = share_interval(3, 4)
    text = write_card("--results", tmp_path)
    assert "is of /home/me/secret/ckpt, which by its digest is not the model" in capsys.readouterr().out
    assert f"| 75.00 | {100 * low:.1f} to {100 * high:.1f} | 25.0 | 4 |" in text
    (score,) = ModelCard(text).data.eval_results
    assert (score.dataset_name, score.metric_type, score.metric_value) == ("scenes", "accuracy", 75.0)
    write_results(results(40.0, [1, 1, 1, 0]), tmp_path)
    assert "| 40.00 | not a mean over questions | 25.0 | 4 |" in write_card("--results", tmp_path)
