"""The model card: what it says is recorded or given, what it cannot know it leaves out, and it is valid for the hub."""

import json
import re

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from training import flags

from llava.eval.results import Answered, Results, TaskResult, write_results
from llava.export.__main__ import main
from llava.export.card_facts import Stage, base_name, hub_id, read_facts, recorded_bases
from llava.train.train import train
from llava.utils.intervals import share_interval
from llava.utils.provenance import RUN_FILE


@pytest.fixture(scope="module")
def stages(tiny, tmp_path_factory):
    """The folders of two stages, the second from the first's adapter."""
    root = tmp_path_factory.mktemp("runs")
    train(flags(tiny, root / "pretrain", 1))
    train(flags(tiny, root / "finetune", 2, pretrain_mm_mlp_adapter=root / "pretrain", seed=7))
    return root


@pytest.fixture
def write_card(stages, tmp_path):
    """A function from flags to the card's text."""

    def write(*arguments, folder=None):
        path = tmp_path / "README.md"
        command = ["card", "--model-path", folder or stages / "finetune", "--output", path, *arguments]
        assert main([str(word) for word in command]) == 0
        return path.read_text()

    return write


def results(score, scores, name="scenes"):
    samples = [Answered(str(number), value, "yes", "yes") for number, value in enumerate(scores)]
    task = TaskResult("accuracy", score, samples, 25.0, 1.0)
    return Results("/home/me/secret/ckpt", "0", "evaluate", {}, {}, "2026-11-22", {name: task})


def test_the_hub_can_read_the_metadata_and_nothing_in_it_is_invented(write_card, capsys):
    bare = ModelCard(write_card()).data.to_dict()
    assert bare == {"pipeline_tag": "image-text-to-text", "tags": ["llava", "vision-language", "gwc_layernorm"]}
    printed = capsys.readouterr().out
    for flag in ("--license", "--language", "--base-model", "--dataset"):
        assert f"left out, as nothing records it for certain; give it by {flag}" in printed
    flags = ("--license", "apache-2.0", "--language", "en", "--base-model", "a/llm", "--base-model", "b/tower")
    full = ModelCard(write_card(*flags, "--dataset", "c/pictures")).data.to_dict()
    assert full["license"] == "apache-2.0" and full["language"] == ["en"] and full["datasets"] == ["c/pictures"]
    assert full["base_model"] == ["a/llm", "b/tower"]


def test_the_recipe_is_the_flags_that_differ_from_their_defaults(write_card, tiny):
    text = write_card()
    rows = dict(re.findall(r"\| `--(\S+)` \| `(.*?)` \|", text.partition("Stage 2.")[2]))
    assert rows["seed"] == "7" and rows["learning_rate"] == "0.001" and rows["max_steps"] == "2"
    assert rows["mm_projector_norm"] == "gwc_layernorm" and rows["model_name_or_path"] == "llama"
    assert "lora_r" not in rows and "padding_free" not in rows
    assert "data: pretrain.json" in text and "data: finetune.json" in text and "4 samples a step; 2 steps" in text


def test_no_folder_of_the_machine_is_in_the_card(write_card, stages, tiny):
    assert str(tiny) not in write_card() and str(stages) not in write_card() and "/tmp" not in write_card()


def test_the_norm_is_told_with_target_gains_and_logged_norms(write_card, stages):
    text, facts = write_card(), read_facts(stages / "finetune")
    config = json.loads((stages / "finetune/config.json").read_text())
    assert f"| target norm of a visual token | {config['mm_projector_norm_target']:.6g} |" in text
    assert f"| gain at the start | {config['mm_projector_norm_init_gain']:.6g} |" in text
    assert f"| mean gain now | {facts.gain:.6g} |" in text
    log = [json.loads(line) for line in (stages / "pretrain/train_log.jsonl").read_text().splitlines()]
    assert "stage 1, first step | stage 1, last step | stage 2, last step" in text
    assert f"as the language model gets them | {log[0]['norm/llm_input']:.4g} |" in text


def test_the_gain_is_that_of_the_weight_files_in_both_layouts(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llava_norm", "mm_projector_norm": "layernorm"}')
    gain, bias, linear = torch.full((8,), -0.25), torch.zeros(8), torch.ones(8, 8)
    for prefix, norm in (("model.mm_projector.", "3"), ("model.multi_modal_projector.", "norm")):
        tensors = {f"{prefix}0.weight": linear, f"{prefix}{norm}.weight": gain, f"{prefix}{norm}.bias": bias}
        save_file(tensors | {"model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
        assert read_facts(tmp_path).gain == 0.25


def test_results_have_wilson_intervals_only_where_the_score_is_the_mean(write_card, tmp_path):
    write_results(results(75.0, [1, 1, 1, 0]), tmp_path)
    low, high = share_interval(3, 4)
    row = f"| 75.00 | {100 * low:.1f} to {100 * high:.1f} | 25.0 | 4 |"
    assert row in write_card("--results", tmp_path)
    write_results(results(40.0, [1, 1, 1, 0]), tmp_path)
    assert "| 40.00 | not a mean over questions | 25.0 | 4 |" in write_card("--results", tmp_path)


def test_the_hub_reads_the_scores_from_the_metadata(write_card, tmp_path):
    write_results(results(75.0, [1, 1, 1, 0]), tmp_path)
    (score,) = ModelCard(write_card("--results", tmp_path)).data.eval_results
    assert (score.dataset_name, score.metric_type, score.metric_value) == ("scenes", "accuracy", 75.0)


def test_names_from_files_cannot_break_out_of_the_page(write_card, tmp_path):
    write_results(results(75.0, [1, 1, 1, 0], "a | b`\n---\n<script>*x*"), tmp_path)
    text = write_card("--results", tmp_path)
    assert "| a \\| b\\` --- &lt;script&gt;\\*x\\* | accuracy |" in text
    assert ModelCard(text).data.pipeline_tag == "image-text-to-text"


def test_a_readme_that_the_command_did_not_write_or_that_was_edited_stays(write_card, stages, tmp_path, capsys):
    path = tmp_path / "README.md"
    command = ["card", "--model-path", str(stages / "finetune"), "--output", str(path)]
    first = write_card()
    assert main(command) == 0 and path.read_text() == first  # twice: its own file is replaced
    for content, why in (("mine", "was not written by this command"), (first + "more\n", "was edited")):
        path.write_text(content)
        assert main(command) == 2 and path.read_text() == content
        assert why in (line := capsys.readouterr().err) and line.count("\n") == 1 and "--overwrite" in line
    assert main([*command, "--overwrite"]) == 0 and path.read_text() == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--license", "My Licence!"], "expected a licence's id on the hub"),
        (["--language", "English"], "expected a code such as en"),
        (["--base-model", "/home/me/llm"], "expected a hub id, OWNER/NAME"),
        (["--run-dir", "nowhere"], "nowhere/run.json: no such file"),
        (["--results", "nowhere"], "no such file"),
        (["--model-path", "nowhere"], "no config.json there with a model_type"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(stages, capsys, arguments, message):
    command = ["card", "--model-path", str(stages / "finetune"), *arguments]
    try:
        status = main(command)
    except SystemExit as ended:
        status = ended.code
    line = capsys.readouterr().err
    assert status == 2 and message in line and line.count("\n") == 1


def test_transformers_loads_an_exported_folder_with_trust_for_its_code(tmp_path, write_card):
    config = {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {"image_size": 64}}
    for remote in ({}, {"auto_map": {"AutoConfig": "m.C"}}):
        (tmp_path / "config.json").write_text(json.dumps(config | remote))
        text = write_card("--repo", "me/model", folder=tmp_path)
        assert ModelCard(text).data.library_name == "transformers"
        assert 'pipeline("image-text-to-text", model="me/model"' in text and "vllm serve me/model" in text
        assert "return_full_text=False" in text  # else the whole chat is printed
        assert ("trust_remote_code=True" in text) == ("needs the plugin" in text) == bool(remote)


@pytest.mark.parametrize("base", [None, "owner/llm"])
@pytest.mark.parametrize("part", ["lora", "projector"])
def test_a_partial_model_loads_on_its_base_and_is_tagged_as_an_adapter(tmp_path, write_card, part, base):
    (tmp_path / "config.json").write_text('{"model_type": "llava_llama"}')
    (tmp_path / {"lora": "adapter_config.json", "projector": "mm_projector.bin"}[part]).touch()
    text = write_card("--repo", "me/part", *(("--base-model", base) if base else ()), folder=tmp_path)
    assert f'load_pretrained_model("me/part", "{base or "BASE"}", "llava")' in text
    merge = f"merge_lora --model-path me/part --model-base {base or 'BASE'} --save-model-path part-merged\n"
    export = "python -m llava.export hf --model-path part-merged --output-dir part-hf"
    assert (merge in text) == (export in text) == (part == "lora") and "--model-path me/part --output-dir" not in text
    data = ModelCard(text).data.to_dict()
    assert data["tags"][-2:] == ["adapter", part]
    assert data.get("base_model_relation") == ("adapter" if base else None)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """The hub's cache with a language model, a tower and a set of pictures."""
    for name in ("models--Qwen--Qwen2.5-7B", "models--owner--tower"):
        (tmp_path / "hub" / name / "snapshots").mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_only_what_the_hub_cache_holds_is_called_a_hub_id(hub_cache, tmp_path, monkeypatch):
    (tmp_path / "models/llm").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id("Qwen/Qwen2.5-7B") == "Qwen/Qwen2.5-7B"
    for path in ("models/llm", "./llm", "/srv/llm", "data/a.json", "a/b/c", "", None):
        assert hub_id(path) is None
    assert hub_id("models/llm", tmp_path) is None
    assert hub_id("checkpoints/vicuna") is None  # a folder that is gone


def test_base_models_are_all_recorded_or_none_is(hub_cache, tmp_path):
    def bases(llm, tower):
        settings = {"model_name_or_path": llm, "vision_tower": tower}
        return recorded_bases([Stage({"model": settings}, tmp_path, 1, [], None)])

    assert bases("Qwen/Qwen2.5-7B", "owner/tower") == ["Qwen/Qwen2.5-7B", "owner/tower"]
    assert bases("Qwen/Qwen2.5-7B", None) == ["Qwen/Qwen2.5-7B"]
    assert bases("checkpoints/vicuna", "owner/tower") == []


def test_values_of_flags_lose_their_folders_and_stay_whole(hub_cache):
    assert base_name("/srv/x/llm/") == "llm" and base_name("data/a.json,/srv/b.json") == "a.json, b.json"
    assert base_name("1e-3,2") == "1e-3,2" and base_name(r"C:\models\llm") == "llm"
    assert base_name("Qwen/Qwen2.5-7B") == "Qwen/Qwen2.5-7B"
    assert base_name({"x": "/home/me/q", "y": 2}) == base_name('{"x": "/home/me/q", "y": 2}') == "{'x': 'q', 'y': 2}"
    assert base_name(["/home/me/q", {"z": "a/b/c"}]) == "['q', {'z': 'c'}]"


def test_a_run_that_is_not_recorded_gives_a_card_without_recipe(stages, tmp_path, write_card):
    (tmp_path / "config.json").write_bytes((stages / "finetune/config.json").read_bytes())
    assert not (tmp_path / RUN_FILE).exists()
    text = write_card(folder=tmp_path)
    assert "## Training" not in text and "Mean L2 norms" not in text and "target norm" in text
