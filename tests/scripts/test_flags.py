"""The trainer's command line: what its help shows, what it refuses, and what a finished run says last."""

import argparse
import dataclasses
import re
import shlex
import subprocess
import sys

import pytest
import transformers
from paths import ROOT
from training import flags

from llava.model.multimodal_projector.norm import NORM_FIELDS
from llava.train import train as train_module
from llava.train.arguments import DataArguments, ModelArguments, TrainingArguments
from llava.train.closing import closing_lines
from llava.train.flags import REFUSED, REST, FlagParser, group_of, parse_flags
from llava.train.sections import FLAGS

REQUIRED = ["--model_name_or_path", "x", "--output_dir", "y"]


@pytest.fixture(scope="module")
def sections():
    """The help's groups by title, each a mapping from an option as it is shown to its text."""
    groups = {}
    for group in FlagParser()._action_groups:
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        groups[group.title] = {"/".join(action.option_strings): action.help for action in shown}
    return groups


def test_help_is_grouped_and_every_flag_stands_in_it_once_with_a_text(sections):
    for title in ("model", "norm", "data", "optimisation", "saving and resuming", "logging"):
        assert len(sections[title]) > 3, title
    options = [option for group in sections.values() for option in group if option != "-h/--help"]
    assert len(options) == len(set(options)) > 100
    assert all(re.fullmatch("--[a-z0-9_]+", option) for option in options)  # one spelling, no --no_x
    assert all(text for group in sections.values() for text in group.values())
    printed = FlagParser().format_help()
    assert all(f"  {option} " in printed for option in options)
    assert "--no_padding_free" not in printed and "--mm-projector" not in printed


def test_every_flag_of_this_tree_has_a_group_and_a_text():
    owners = (ModelArguments, DataArguments, TrainingArguments)
    fields = {field.name: field for owner in owners for field in dataclasses.fields(owner)}
    own = fields.keys() - {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert own <= FLAGS.keys() | set(NORM_FIELDS) <= fields.keys()
    assert not [name for name in own if group_of(name) == REST or not fields[name].metadata["help"]]


def test_flag_that_cannot_work_is_neither_shown_nor_taken(sections, capsys):
    shown = {option for group in sections.values() for option in group}
    assert not {f"--{name}" for names in REFUSED.values() for name in names.split()} & shown
    for argument, reason in (
        (["--prediction_loss_only", "True"], "scripts/evaluate.sh"),
        (["--do_eval", "True"], "--eval_strategy says whether"),
        (["--torch_compile", "True"], "--compile_layers True"),
        (["--label_smoothing_factor", "0.1"], "no smoothing"),
        (["--push_to_hub"], "then send it with python -m llava.export push"),
        (["--fsdp", "full_shard"], "--deepspeed"),
        (["--auto_find_batch_size", "True"], "order of the data"),
        (["--no_dataloader_in_order"], "same order"),
        (["--neftune_noise_alpha", "5"], "one row with visual tokens"),
    ):
        assert reason in refusal(argument, capsys)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (["--learning_rat", "1"], "error: --learning_rat is not a flag; did you mean --learning_rate?"),
        (["--mm-projector-nrom=none"], "--mm-projector-nrom is not a flag; did you mean --mm_projector_norm?"),
        (["--qqqqqq"], "error: --qqqqqq is not a flag (--help"),
        (["stray"], "error: stray is not a flag"),
        (["--learning_rate", "abc"], "argument --learning_rate: invalid float value: 'abc'"),
        (["--save_strategy", "best"], "argument --save_strategy: invalid choice: 'best'"),
        (["--train_sampling_strategy", "group_by_length"], "argument --train_sampling_strategy: invalid choice"),
        (["--max_step", "5"], "--max_step is not a flag; did you mean --max_steps?"),
    ],
)
def test_wrong_flag_is_named_in_one_line(argument, message, capsys):
    assert message in refusal(argument, capsys)


def refusal(argument: list[str], capsys) -> str:
    """The one line on stderr of a command line with a fault."""
    with pytest.raises(SystemExit) as stop:
        parse_flags([*REQUIRED, *argument])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_spellings_of_llavas_scripts_and_of_the_library_are_taken():
    words = ["--evaluation_strategy", "no", "--per_device_eval_batch_size", "4", "--lazy_preprocess", "True"]
    words += ["--gradient_checkpointing", "True", "--mm_use_im_start_end", "False", "--max-steps", "7", "--bf16"]
    words += ["--no_padding_free", "--no-trial-save", "--local_rank=0", "--mm_patch_merge_type", "flat"]
    _, _, training = parse_flags([*REQUIRED, *words])
    assert (training.max_steps, training.bf16, training.padding_free) == (7, True, False)
    assert training.trial_save is False and training.activation_checkpointing is True


def test_what_is_trained_and_on_what_data_cannot_change_after_parsing():
    model_args, data_args, _ = parse_flags(REQUIRED, attn_implementation="eager")
    assert model_args.attn_implementation == "eager"
    chosen, _, _ = parse_flags([*REQUIRED, "--attn_implementation", "sdpa"], attn_implementation="eager")
    assert chosen.attn_implementation == "sdpa"
    for arguments, name in ((model_args, "vision_tower"), (data_args, "data_path")):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"--{name} is parsed"):
            setattr(arguments, name, "other")
        assert getattr(dataclasses.replace(arguments, **{name: "other"}), name) == "other"


# --- what a run says --------------------------------------------------------------------------------------------------


def messages(caplog, logger: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == f"llava.train.{logger}"]


@pytest.mark.parametrize(("decay", "lines"), [(0.0, 1), (0.1, 2)])
def test_groups_with_the_same_settings_are_one_line(tiny, tmp_path, caplog, decay, lines):
    caplog.set_level("INFO")
    train_module.train(flags(tiny, tmp_path, 1, max_steps=1, weight_decay=decay))
    logged = [line for line in messages(caplog, "optim") if line.startswith("optimizer group")]
    assert len(logged) == lines
    assert decay or "6 tensors, 1,920 parameters" in logged[0]


def test_finished_run_says_where_the_model_is_and_what_comes_next(tiny, tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.delenv("PRESET", raising=False)
    monkeypatch.chdir(tmp_path)
    train_module.train(flags(tiny, "stage 1", 1, max_steps=1))
    where, following = messages(caplog, "closing")[-2:]
    adapter = tmp_path / "stage 1/mm_projector.bin"
    assert where == f"stage 1 is done, projector and norm are in {adapter}" and adapter.is_file()
    words = shlex.split(following.split("settings: ")[1])
    assert words[:2] == [f"MODEL_PATH={tiny}/llama", f"VISION_TOWER={tiny}/siglip"]
    assert words[2:] == ["NORM=gwc_layernorm", f"PRETRAIN_ADAPTER={adapter}", "bash", "scripts/finetune.sh"]
    caplog.clear()
    train_module.train(flags(tiny, "stage 2", 2, max_steps=1))
    where, following = messages(caplog, "closing")[-2:]
    assert where.startswith(
        f"the model is in {tmp_path}/stage 2; to talk to it: python -m llava.serve.cli --model-path"
    )
    asked = shlex.split(following.split("its scores: ")[1])
    assert asked[:5] == ["python", "-m", "llava.eval.answer", "--model-path", f"{tmp_path}/stage 2"]


@pytest.mark.slow
def test_closing_lines_reach_the_console_of_the_real_command(tiny, tmp_path):
    command = [sys.executable, "-m", "llava.train.train", *flags(tiny, tmp_path, 1, max_steps=1)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "bash scripts/finetune.sh" in run.stderr.splitlines()[-1]


def test_next_command_names_the_preset_or_merges_adapters(monkeypatch):
    monkeypatch.setenv("PRESET", "demo")
    model_args = ModelArguments(model_name_or_path="m", vision_tower="v", mm_projector_norm="none")
    assert closing_lines(model_args, DataArguments(), "/out", adapter_only=True, lora=False)[1].endswith(
        ": PRESET=demo NORM=none PRETRAIN_ADAPTER=/out/mm_projector.bin bash scripts/finetune.sh"
    )
    assert closing_lines(model_args, DataArguments(), "/out", adapter_only=False, lora=True)[1].endswith(
        ": python -m llava.model.merge_lora --model-path /out --save-model-path /out-merged"
    )


def test_after_training_on_own_data_the_next_command_scores_own_questions():
    def last_line(**fields):
        model_args = ModelArguments(model_name_or_path="m")
        return closing_lines(model_args, DataArguments(**fields), "/out", adapter_only=False, lora=False)[-1]

    assert last_line(data_path="playground/data/scenes/finetune.json").endswith(": bash scripts/evaluate.sh /out")
    own = last_line(data_path="mine.json", image_folder="/pictures", eval_data_path="held out.json")
    assert "--data 'held out.json' --image-folder /pictures --output answers.jsonl" in own
    assert own.endswith("&& python -m llava.eval.score answers.jsonl") and "evaluate.sh" not in own
    assert "--data QUESTIONS --image-folder IMAGES" in last_line(data_path="mine.json")
    assert "evaluate.sh" not in last_line(data_path="playground/data/scenes/finetune.json,mine.json")
