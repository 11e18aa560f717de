"""`python -m llava.compare run`: its steps, what is refused before it, and runs that differ in more than the arm."""

import json
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
from comparison_runs import Caller, change, write_run, write_scores
from paths import ROOT
from shell import kill

from llava.compare.__main__ import main
from llava.compare.arms import Arm, parse_arm
from llava.compare.engine import DEMO, refuse_ignored
from llava.compare.plan import read_plan
from llava.compare.planned import Planned
from llava.compare.quickstart import Quickstart
from llava.compare.record import add_run, new_record
from llava.compare.run import Comparison
from llava.compare.runs import Run, check_flags, check_present, check_results, check_runs, is_finished
from llava.compare.tables import Statistics, caveats, own_table
from llava.launch.settings import NAMES
from llava.utils.provenance import DONE, RUN_FILE
from llava.utils.versions import code_digest, version_of

ARMS = ("none", "layernorm", "layernorm@default")
PLAN = ROOT / "docs/data/study-plan.json"


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path, seed, arm, 0.5) for seed in (1, 2) for arm in ARMS]


def test_a_page_has_the_tasks_of_its_call_whatever_other_calls_left(tmp_path):
    comparison = Comparison("demo", [*ARMS], [1], tmp_path, tasks="scenes")
    run = write_run(tmp_path, 1, "none", 0.5)
    scored = run.results.tasks.popitem()[1]
    run.results.tasks.update(pope=scored, scenes=scored)
    assert list(comparison.results_of(run).tasks) == ["scenes"]


def test_a_stage_1_in_another_folder_is_refused_with_other_flags_too(tmp_path, monkeypatch):
    comparison = Comparison("demo", ["none"], [1], tmp_path)
    write_run(tmp_path, 1, "none", 0.5)
    run = comparison.runs[0]
    shutil.copytree(run.folder("pretrain"), run.folder("checkpoints"))
    shutil.rmtree(run.folder("finetune"))
    flags = run.flags("checkpoints") | {"learning_rate": "0.5"}
    monkeypatch.setattr(Comparison, "recipe", lambda *_: {"flags": flags})
    shutil.rmtree(run.folder("pretrain"))
    comparison.check_settings()
    with pytest.raises(ValueError, match="checkpoints was trained with different flags"):
        comparison.check_settings("checkpoints")


# --- what must be equal -----------------------------------------------------------------------------------------------


def test_runs_that_differ_in_arm_its_rates_and_seed_alone_are_accepted_and_the_page_has_the_rates(runs):
    for run in (run for run in runs if run.arm == "layernorm"):
        change(run, "pretrain", "training.learning_rate", 2e-3)
    for stage in ("pretrain", "finetune"):
        check_runs(runs, stage)
    check_results(runs)
    record = new_record()
    for run in runs:
        add_run(record, run, run.results)
    fields = {row["field"].removeprefix("pretrain.") for row in own_table(record) if "finetune" not in row["field"]}
    assert fields == {"model.mm_projector_norm", "model.mm_projector_norm_init", "config.mm_projector_norm"} | {
        "training.learning_rate",
        "training.seed",
        "order",
        "initial_weights.mm_mlp_adapter",
    }
    notes = caveats(Statistics(record))
    assert "layernorm was trained at its own rates: 0.002 in stage 1, 0.001 in stage 2." in notes
    for entry in record["runs"]:
        entry["own"] = record["runs"][0]["own"]
    (note,) = (note for note in caveats(Statistics(record)) if "rates" in note)
    assert note.startswith("Every arm was trained with one set of learning rates (0.001 in stage 1, 0.001 in stage 2)")


@pytest.mark.parametrize(
    ("field", "value", "before"),
    [
        ("training.weight_decay", 0.1, 0.0),
        ("order", "order-9", "order-1"),
        ("initial_weights.mm_language_model", "y", "x"),
        ("initial_weights.mm_mlp_adapter", "z", "1 "),
        ("code.digest", "e", "d"),
    ],
)
def test_any_other_difference_is_refused_with_field_and_both_values(runs, field, value, before):
    change(runs[1], "pretrain", field, value)
    with pytest.raises(ValueError) as refused:
        check_runs(runs, "pretrain")
    message = str(refused.value)
    assert f"{field}: {before!r} (none, seed 1), {value!r} (layernorm, seed 1)" in message
    assert str(runs[1].folder("pretrain")) in message


def test_budget_counts_the_steps_that_were_taken(runs):
    log = runs[4].folder("finetune") / "train_log.jsonl"
    log.write_text("\n".join(log.read_text().splitlines()[:-1]))
    with pytest.raises(ValueError, match=r"steps: 5 \(none, seed 2\), 4 \(layernorm, seed 2\)"):
        check_runs(runs, "finetune")


def test_a_folder_must_hold_the_run_of_its_name_and_stage_2_its_stage_1(runs):
    change(runs[2], "pretrain", "model.mm_projector_norm_init", "text_norm")
    with pytest.raises(ValueError, match=r"layernorm@default.*\n.*norm_init: 'default' \(expected\), 'text_norm'"):
        check_runs(runs, "pretrain")
    (runs[1].folder("pretrain") / "mm_projector.bin").write_text("trained again")
    with pytest.raises(ValueError, match="adapter"):
        check_runs(runs, "finetune")
    change(runs[0], "pretrain", "training.seed", 3)
    with pytest.raises(ValueError, match=r"training.seed: 1 \(expected\), 3 \(found\)"):
        check_runs(runs[:1], "pretrain")


def test_another_projector_is_an_arm_whose_own_weights_may_differ(tmp_path):
    arms = ("none", "layernorm", "pre_layernorm_mlp2x_gelu")
    runs = [write_run(tmp_path, 1, arm, 0.5) for arm in arms]
    check_runs(runs, "pretrain")
    change(runs[1], "pretrain", "model.mm_projector_type", "pre_layernorm_mlp2x_gelu")
    with pytest.raises(ValueError, match=r"mm_projector_type: 'mlp2x_gelu' \(expected\), 'pre_layernorm_mlp2x_gelu'"):
        check_runs(runs, "pretrain")
    change(runs[1], "pretrain", "model.mm_projector_type", "mlp2x_gelu")
    change(runs[1], "pretrain", "initial_weights.mm_mlp_adapter", "z")
    with pytest.raises(ValueError, match="mm_mlp_adapter: '1 ' .*, 'z'"):
        check_runs(runs, "pretrain")


def test_a_run_continued_with_another_configuration_is_refused(runs):
    path = runs[1].folder("pretrain") / RUN_FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"starts": content["starts"] * 2}))
    check_runs(runs, "pretrain")
    for flag in ("report_to", "save_steps", "logging_steps", "dataloader_num_workers", "dataloader_prefetch_factor"):
        check_flags(runs[1], "pretrain", {flag: "2"})
        change(runs[1], "pretrain", f"training.{flag}", 2)
    check_runs(runs, "pretrain")
    with pytest.raises(ValueError, match=r"dataloader_drop_last: '\(absent\)' \(trained\), 'True' \(now\)"):
        check_flags(runs[1], "pretrain", {"dataloader_drop_last": "True"})
    change(runs[1], "pretrain", "training.learning_rate", 5e-3)
    with pytest.raises(ValueError, match=r"continued.*\n.*learning_rate: 0.001 \(at first\), 0.005 \(later\)"):
        check_runs(runs, "pretrain")


def test_scores_of_other_questions_settings_or_weights_are_refused(runs):
    write_scores(runs[1], 0.5, "wrong", {"scenes": 239})
    with pytest.raises(ValueError, match="scenes-239"):
        check_results(runs)
    del runs[1].__dict__["results"]
    write_scores(runs[1], 0.5, "wrong", {"scenes": 240, "pope": 4})
    with pytest.raises(ValueError, match="tasks.pope"):
        check_results(runs)
    (runs[0].folder("finetune") / "mm_projector.bin").write_text("trained again")
    with pytest.raises(ValueError, match="different weights"):
        check_results(runs)


def test_changed_code_or_packages_are_refused_and_another_commit_is_not(runs):
    with pytest.raises(ValueError) as refused:
        check_present(runs)
    message = str(refused.value)
    assert "code.digest: 'd' (none, seed 1)" in message and "versions.torch: '0.1.0' (none, seed 1)" in message
    for run in runs:
        for stage in ("pretrain", "finetune"):
            change(run, stage, "code", {"digest": code_digest(), "commit": "an older one"})
            change(run, stage, "versions", {"torch": version_of("torch"), "not-installed": None})
    check_present(runs)


def test_a_rerun_with_other_flags_is_refused_but_for_those_of_arm_seed_and_place(tmp_path):
    run = write_run(tmp_path, 1, "none", 0.5)
    check_flags(run, "pretrain", {"output_dir": "elsewhere", "seed": "1"})
    with pytest.raises(ValueError, match=r"data_path: '\(absent\)' \(trained\), 'b.json' \(now\)"):
        check_flags(run, "pretrain", {"data_path": "b.json"})
    without_seed = Run(tmp_path / "seed-1", None, "none")  # whose folder does not name it
    with pytest.raises(ValueError, match=r"seed: '\(absent\)' \(trained\), '2' \(now\)"):
        check_flags(without_seed, "pretrain", {"seed": "2"})


# --- the command ------------------------------------------------------------------------------------------------------


def test_an_arm_is_a_norm_with_its_initial_norm_and_other_names_are_refused():
    assert parse_arm("none") == Arm("none", "")
    assert parse_arm("gwc_layernorm") == Arm("gwc_layernorm", "text_norm")
    assert parse_arm("layernorm@default") == Arm("layernorm", "default")
    assert parse_arm("rmsnorm@4x-fixed") == Arm("rmsnorm", "4x", learnable=False)
    for name in ("pre_layernorm_mlp0x_gelu", "pre_layernorm_mlp2x_gelu-fixed", "scale-fixed"):
        with pytest.raises(ValueError, match=f"--arms {name}: .* is not one of: none.*docs/study.md names the commit"):
            parse_arm(name)
    with pytest.raises(ValueError, match="--arms mlp2x_gelu: .*leave it out"):
        parse_arm("mlp2x_gelu")


@pytest.mark.slow
def test_every_step_in_order_a_killed_call_leaves_a_lock_and_a_rerun_resumes_or_trains_nothing(tmp_path):
    call = Caller(tmp_path, "run", NUM_GPUS=1, LAUNCHER="python", ANALYSIS="theory", DATA=tmp_path / "data.json")
    flags = ("--arms", "none,layernorm@default", "--seeds", "7,", "--tasks", "pope")
    last = "train 7 layernorm@default pretrain"
    calls, _, _, family = call.signalled(last, signal.SIGKILL, *flags, HANGS=last)
    assert calls == ["train 7 none pretrain", "train 7 none finetune", "evaluate none", last]
    locked = call(*flags, LOCK_SECONDS=1)  # the training lives on and writes into the folder
    assert locked.returncode == 2 and "waiting for its end" in locked.stderr and not call.seen()
    assert "in use by another call or by a training that it left; wait for its end" in locked.stderr
    kill(family)
    done = call(*flags, LOCK_SECONDS=5)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = ["evaluate none", "evaluate layernorm@default", "measure theory analysis"]
    lines = call.seen()
    assert [line for line in lines if line.startswith("train")] == [last, "train 7 layernorm@default finetune"]
    assert [line for line in lines if not line.startswith("train")] == measured
    assert (call.out / "report.html").is_file()
    assert call(*flags).returncode == 0 and call.seen() == measured  # which find out what is finished


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--seeds", "0"], "--seeds 0"),
        (["--arms", "none,batchnorm"], "'batchnorm' is not one of: none, layernorm"),
        (["--arms", "none,layernorm@0x"], "--mm_projector_norm_init"),
        (["--arms", "layernorm,none"], "baseline"),
        (["--tasks", "pope,popee"], "popee"),
        ("ANALYSIS=theorie", "ANALYSIS: expected some of"),
        ("EVALUATE_FLAGS=--limt 8", "EVALUATE_FLAGS: scripts/evaluate.sh has no --limt 8"),
        ("ARMS=none,clip", "ARMS=none,clip: only the quickstart reads it"),
        ("OUTPUT_ROOT=elsewhere", "give --output-dir"),
    ],
)
def test_wrong_arguments_are_refused_by_name_before_anything_runs(tmp_path, capsys, monkeypatch, flags, named):
    if isinstance(flags, str):
        monkeypatch.setenv(*flags.split("="))
        flags = []
    assert main(["run", "--output-dir", str(tmp_path / "out"), *flags]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


EXPERIMENTS = {
    "demo": lambda folder: Comparison(DEMO, ["none", "layernorm"], [42, 43], folder),
    "recipe": lambda folder: Comparison("llama-3.2-3b", ["none", "layernorm"], [42, 43], folder),
    "plan": lambda folder: Planned(DEMO, ["none", "layernorm"], [42, 43], folder, plan=read_plan(PLAN)),
    "quickstart": lambda folder: Quickstart(DEMO, ["none", "layernorm"], [], folder, "scenes"),
}


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_every_variable_of_the_recipe_is_honoured_in_every_run_or_refused(tmp_path, monkeypatch, kind):
    for module in ("quickstart", "engine"):
        monkeypatch.setattr(
            f"llava.compare.{module}.resolve_devices", lambda environment: SimpleNamespace(on_gpu=False)
        )
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    refused = set()
    for name in sorted(NAMES - {"MAX_STEPS"}):  # a plan refuses that when it is read
        with monkeypatch.context() as own:
            own.setenv(name, "/own/value")
            try:
                settings = list(EXPERIMENTS[kind](tmp_path).every_settings())
                refuse_ignored(settings)
            except ValueError as error:
                assert f"{name}=/own/value: " in str(error)
                refused.add(name)
            else:
                assert {(os.environ | run)[name] for run in settings} == {"/own/value"}
    assert {"PRESET", "NORM", "OUTPUT_DIR", "DRY_RUN"} <= refused
    assert not refused & {"DATA_PATH", "IMAGE_FOLDER", "MODEL_PATH", "LEARNING_RATE", "EVAL_DATA_PATH", "LORA"}


def test_a_stage_is_finished_with_its_mark_and_its_weights_or_adapters(tmp_path):
    for weights in ("model.safetensors", "model-1-of-2.safetensors", "adapter_model.safetensors"):
        folder = tmp_path / weights
        folder.mkdir()
        (folder / DONE).touch()
        assert not is_finished(folder)
        (folder / weights).touch()
        assert is_finished(folder)


def test_own_questions_without_a_score_are_refused_before_anything_runs(tmp_path, capsys):
    good, bad = {"question_id": 0, "text": "Was it?", "expected": "yes"}, {"question_id": 1, "text": "Is it?"}
    records = {"no expected answer": bad, "question 0 is also that of": good}
    records["'3' cannot be the expected answer"] = bad | {"expected": "3", "kind": "yes_no"}
    words = ["run", "--output-dir", str(tmp_path / "out"), "--question-images", str(tmp_path)]
    for message, record in records.items():
        (tmp_path / "mine.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(record)}\n")
        assert main([*words, "--questions", str(tmp_path / "mine.jsonl")]) == 2
        error = capsys.readouterr().err
        assert "--questions" in error and message in error and not (tmp_path / "out").exists()
