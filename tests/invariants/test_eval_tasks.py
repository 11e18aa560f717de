"""Benchmarks in training: their scores are evaluate.sh's on the saved model, and the weights do not depend on them."""

import importlib.util
import json
import random
from argparse import Namespace
from pathlib import Path

import benchmark_data
import numpy as np
import pytest
import torch
from benchmark_data import KINDS, PLAN, PROMPTS, picture
from training import build, flags

from llava.eval.evaluate import main as evaluate
from llava.eval.harness import environment
from llava.eval.in_process import Harness, load_tasks
from llava.eval.results import Answered, read_results
from llava.eval.tasks import TASKS, choose_limited, score_interval
from llava.train import train as train_module
from llava.train.heldout import kept_random_states
from llava.train.telemetry import LOG_FILE
from llava.utils.intervals import share_interval

INSTALLED = pytest.mark.skipif(
    importlib.util.find_spec("lmms_eval") is None, reason="the harness is not installed: EXTRAS=eval scripts/setup.sh"
)
ASKED = {"eval_tasks": "pope:5,mmstar,scienceqa:5,mmbench_en_dev_static:5,scenes", "per_device_eval_batch_size": 3}


@pytest.fixture(scope="module")
def hub(tiny, tmp_path_factory):
    """A folder with the benchmarks' data sets; records that teach them are `tiny/data/benchmarks.json`."""
    for colour in benchmark_data.PICTURES:
        picture(colour).save(tiny / f"data/images/{colour}.png")
    (tiny / "data/benchmarks.json").write_text(json.dumps(benchmark_data.records()))
    folder = tmp_path_factory.mktemp("hub")
    benchmark_data.write_all(folder)
    rows = [
        {"id": str(i), "image": picture(c), "question": PROMPTS["scenes"], "answer": a, "kind": k, "chance": 0.5}
        for i, ((c, a), k) in enumerate(zip(PLAN, KINDS, strict=True))
    ]
    benchmark_data.write(folder / "heldout/scenes", {"default": {"test": rows}})
    return folder


def evaluations(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / LOG_FILE).read_text().splitlines())
    return [line for line in lines if "eval/seconds" in line]


@INSTALLED
@pytest.mark.slow
def test_scores_are_those_of_evaluate_sh_on_the_saved_model(tiny, hub, tmp_path):
    options = {"version": "qwen_1_5", "data_path": tiny / "data/benchmarks.json", "per_device_train_batch_size": 15}
    options |= {"learning_rate": 1e-2, "lr_scheduler_type": "linear", "max_steps": 160, "telemetry_steps": 200}
    asked = ASKED | {"eval_tasks_dir": hub, "eval_strategy": "steps", "eval_steps": 80}
    train_module.train(flags(tiny, tmp_path / "run", 2, **options, **asked))
    first, last = evaluations(tmp_path / "run")
    assert (first["step"], last["step"]) == (80, 160)
    chosen = choose_limited(ASKED["eval_tasks"], "--eval_tasks")
    results = {}
    for limit in {limit for _, limit in chosen}:
        output = tmp_path / f"limit-{limit}"
        command = [str(tmp_path / "run"), "--together", "--data-dir", str(hub), "--output-dir", str(output)]
        command += ["--tasks", ",".join(task.name for task, of_task in chosen if of_task == limit)]
        command += ["--num-gpus", "0", *(["--limit", str(limit)] if limit else [])]
        assert evaluate(command) == 0
        results |= read_results(output).tasks
    for task, _ in chosen:
        result = results[task.name]
        assert last[f"eval/{task.name}"] == pytest.approx(result.score / 100, abs=1e-6), task.name
        assert last[f"eval/{task.name}_questions"] == len(result.samples)
        bounds = (last[f"eval/{task.name}_low"], last[f"eval/{task.name}_high"])
        assert bounds == pytest.approx(score_interval(task, result.samples), abs=1e-5)
        assert 0 < result.score < 100  # neither all right nor all wrong would tell little


@INSTALLED
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"per_device_train_batch_size": 2}, {"bf16": True, "stage": 1}])
def test_weights_are_bit_for_bit_the_same_without_benchmarks(tiny, hub, tmp_path, options):
    options = {"version": "qwen_1_5", "max_steps": 2, "mm_projector_type": "mlp2x_gelu", **options}
    stage = options.pop("stage", 2)
    options |= {"data_path": tiny / "data/finetune.json"}
    asked = ASKED | {"eval_tasks_dir": hub, "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    train_module.train(flags(tiny, tmp_path / "with", stage, **options, **asked))
    train_module.train(flags(tiny, tmp_path / "without", stage, **options))
    assert [line["step"] for line in evaluations(tmp_path / "with")] == [0, 1, 2]
    files = sorted((tmp_path / "without").glob("*.safetensors"))
    assert files
    for file in files:
        assert file.read_bytes() == (tmp_path / "with" / file.name).read_bytes()
    with_losses, without = (
        [line["loss"] for line in map(json.loads, (tmp_path / run / LOG_FILE).open()) if "loss" in line]
        for run in ("with", "without")
    )
    assert with_losses == without


@INSTALLED
def test_a_task_that_cannot_be_scored_is_named_and_others_are_scored(tiny, hub, tmp_path, monkeypatch, caplog):
    options = {"eval_tasks": "pope:3,scenes:2", "eval_tasks_dir": hub, "eval_strategy": "epoch", "version": "qwen_1_5"}
    model, trainer = build(flags(tiny, tmp_path / "run", 2, **options))
    score = Harness.score

    def failing(self, loaded, answer_all):
        result = score(self, loaded, answer_all)
        if loaded.task.name == "pope":
            raise KeyError("odd answer")
        return result

    monkeypatch.setattr(Harness, "score", failing)
    metrics = trainer.benchmarks.metrics(model.eval())
    assert metrics["eval_scenes_questions"] == 2 and not any("pope" in name for name in metrics)
    assert trainer.benchmarks.unscored == {"pope"}
    assert "--eval_tasks pope: lmms-eval cannot score the model's answers (KeyError: 'odd answer')" in caplog.text
    assert trainer.benchmarks.metrics(model, lambda: True) is None  # a signal
    monkeypatch.setattr(trainer.benchmarks, "_answer_all", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # what fails before all answers are there could leave other ranks behind
        trainer.benchmarks.metrics(model)


def test_random_states_are_as_before():
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]

    with kept_random_states():
        inside = draw()
    assert draw() == inside


def samples(*scores: tuple[float, str | None]) -> list[Answered]:
    return [Answered(str(i), score, "", "", group) for i, (score, group) in enumerate(scores)]


def test_an_interval_is_wilsons_for_the_questions_weights():
    plain = samples((1, None), (0, None), (0.5, None), (1, None))
    assert score_interval(TASKS["pope"], plain) == pytest.approx(share_interval(2.5, 4))
    kinds = samples((1, "a"), (0, "a"), (1, "a"), (1, "b"))  # the mean of 2/3 and 1; 4 / (1/3 + 1) = 3 questions
    assert score_interval(TASKS["mmstar"], kinds) == pytest.approx(share_interval(2.5, 3))
    assert score_interval(TASKS["mme"], plain) is None


def test_tasks_and_their_limits_are_read():
    chosen = choose_limited("mmstar:500, scenes", "--eval_tasks")
    assert [(task.name, limit) for task, limit in chosen] == [("mmstar", 500), ("scenes", None)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_tasks": "mmstr"}, "--eval_tasks mmstr: not known here; known: "),
        ({"eval_tasks": "mmvet"}, "--eval_tasks mmvet: another model judges its answers; run mmstar"),
        (
            {"eval_tasks": "docvqa_test"},
            "--eval_tasks docvqa_test: only the benchmark's server can score it; run docvq",
        ),
        ({"eval_tasks": "pope,hellaswag"}, "--eval_tasks hellaswag: it is scored by likelihoods"),
        ({"eval_tasks": "pope:many"}, "--eval_tasks pope:many: expected NAME or NAME:N .* found 'many'"),
        ({"eval_tasks": "pope:0"}, "--eval_tasks pope:0: expected NAME or NAME:N"),
        ({"eval_tasks": "pope,pope:3"}, "--eval_tasks pope,pope:3: names pope twice"),
        ({"eval_tasks": ","}, "--eval_tasks ,: names no task"),
        ({"eval_tasks": "pope", "eval_strategy": None}, "--eval_tasks pope: nothing says when it is read"),
        ({"eval_tasks": "pope", "version": "plain"}, "--eval_tasks pope: a captioner's template"),
        ({"eval_tasks": "pope", "eval_generate": 2}, "--eval_generate needs held-out records; .*eval_data_path$"),
        ({"eval_tasks_dir": "x", "eval_strategy": None}, "--eval_tasks_dir x needs --eval_tasks"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is_read(tiny, tmp_path, options, message):
    argv = flags(tiny, tmp_path / "run", 2, **{"eval_strategy": "epoch", "model_name_or_path": "/no"} | options)
    with pytest.raises(ValueError, match=message):
        train_module.train(argv)


@INSTALLED
def test_missing_and_damaged_data_is_refused_before_the_model_is_read(tiny, tmp_path):
    options = {"model_name_or_path": "/no", "eval_strategy": "epoch", "eval_tasks": "pope", "eval_tasks_dir": tmp_path}
    with pytest.raises(ValueError, match="--eval_tasks pope: .*POPE/README.md is missing; --eval_tasks_dir needs"):
        train_module.train(flags(tiny, tmp_path / "run", 2, **options))
    benchmark_data.write_all(tmp_path)
    for file in tmp_path.glob("lmms-lab-encoder/POPE/data/*.parquet"):
        file.write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="--eval_tasks pope: lmms-lab-encoder/POPE cannot be loaded"):
        train_module.train(flags(tiny, tmp_path / "run", 2, **options))


@INSTALLED
def test_data_sets_of_the_same_name_in_two_folders_are_two(tmp_path):
    for name, count in (("a", 3), ("b", 2)):
        rows = benchmark_data.pope(benchmark_data.POPE[:count])
        benchmark_data.write(tmp_path / name / "lmms-lab-encoder/POPE", {"default": {"test": rows}})
        (loaded,) = load_tasks([(TASKS["pope"], None)], {"pope": tmp_path / name}, "--eval_tasks", "--eval_tasks_dir")
        assert len(loaded.of_harness["pope"].dataset["test"]) == count
    caches = {environment([TASKS["pope"]], Namespace(num_gpus=0), tmp_path / n)["HF_DATASETS_CACHE"] for n in "ab"}
    assert len(caches) == 2


@INSTALLED
def test_a_question_that_does_not_fit_and_a_metric_that_is_not_measured_are_refused_before_the_first_step(
    tiny, hub, tmp_path
):
    options = ASKED | {"eval_tasks_dir": hub, "eval_strategy": "epoch", "version": "qwen_1_5"}
    with pytest.raises(ValueError, match="loss is not measured; expected one of pope, mmstar, scienceqa"):
        build(flags(tiny, tmp_path / "run", 2, **options, load_best_model_at_end=True, save_strategy="epoch"))
    short = tmp_path / "short"
    rows = benchmark_data.pope(benchmark_data.POPE[:4])
    rows[2]["question"] = "Is it? " * 3000
    benchmark_data.write(short / "lmms-lab-encoder/POPE", {"default": {"test": rows}})
    with pytest.raises(ValueError, match="--eval_tasks pope: .* tokens"):
        build(flags(tiny, tmp_path / "run", 2, **options | {"eval_tasks": "pope", "eval_tasks_dir": short}))
