"""A comparison refuses runs that differ in more than the arm, naming the field and both values."""

import json

import pytest
from comparison_runs import change, write_run, write_scores

from llava.compare.arms import parse_arm
from llava.compare.record import add_run, new_record
from llava.compare.runs import Run, check_flags, check_present, check_results, check_runs
from llava.compare.tables import own_table
from llava.utils.provenance import RUN_FILE
from llava.utils.versions import code_digest, version_of

ARMS = ("none", "layernorm", "layernorm@default")


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path, seed, arm, 0.5) for seed in (1, 2) for arm in ARMS]


def test_runs_that_differ_in_arm_and_seed_alone_are_accepted(runs):
    for stage in ("pretrain", "finetune"):
        check_runs(runs, stage)
    check_results(runs)
    record = new_record()
    for run in runs:
        add_run(record, run, run.results)
    fields = {row["field"].removeprefix("pretrain.") for row in own_table(record) if "finetune" not in row["field"]}
    assert fields == {"model.mm_projector_norm", "model.mm_projector_norm_init", "config.mm_projector_norm"} | {
        "training.seed",
        "order",
        "initial_weights.mm_mlp_adapter",
    }


@pytest.mark.parametrize(
    ("field", "value", "before"),
    [
        ("training.learning_rate", 2e-3, 1e-3),
        ("order", "order-9", "order-1"),
        ("data.records", "abd", "abc"),
        ("initial_weights.mm_language_model", "y", "x"),
        ("initial_weights.mm_mlp_adapter", "z", "1 "),
        ("code.digest", "e", "d"),
        ("versions.torch", "0.2.0", "0.1.0"),
        ("devices.kind", "H200", "cpu"),
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


@pytest.mark.parametrize(
    ("name", "reason"),
    [("pre_layernorm_mlp0x_gelu", "is not one of: none, .*pre_layernorm_mlpNx_gelu"), ("mlp2x_gelu", "leave it out")]
    + [("pre_layernorm_mlp2x_gelu-fixed", "is not one of"), ("scale-fixed", "docs/study.md names the commit")]
    + [("vocab_mix_mlp2x_gelu", "docs/study.md names the commit")],
)
def test_other_names_of_arms_are_refused(name, reason):
    with pytest.raises(ValueError, match=f"--arms {name}: .*{reason}"):
        parse_arm(name)


def test_a_run_continued_with_another_configuration_is_refused(runs):
    path = runs[1].folder("pretrain") / RUN_FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"starts": content["starts"] * 2}))
    check_runs(runs, "pretrain")
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


def test_a_rerun_with_other_evaluation_data_is_refused_since_it_may_choose_the_best_weights(tmp_path):
    run = write_run(tmp_path, 1, "none", 0.5)
    check_flags(run, "pretrain", {"output_dir": "elsewhere", "seed": "1"})
    with pytest.raises(ValueError, match=r"eval_data_path: '\(absent\)' \(trained\), 'b.json' \(now\)"):
        check_flags(run, "pretrain", {"eval_data_path": "b.json"})


def test_a_run_without_a_seed_in_its_folder_s_name_may_not_be_resumed_with_another(tmp_path):
    seeded = write_run(tmp_path, 1, "none", 0.5)
    run = Run(tmp_path / "seed-1", None, "none")
    change_command(run, "--seed 1")
    check_flags(run, "pretrain", {"seed": "1"})
    with pytest.raises(ValueError, match=r"seed: '1' \(trained\), '2' \(now\)"):
        check_flags(run, "pretrain", {"seed": "2"})
    check_flags(seeded, "pretrain", {"seed": "2"})  # its folder's name has the seed


def change_command(run, words):
    path = run.folder("pretrain") / RUN_FILE
    content = json.loads(path.read_text())
    content["starts"][-1]["provenance"]["command"] = f"train {words}"
    path.write_text(json.dumps(content))
