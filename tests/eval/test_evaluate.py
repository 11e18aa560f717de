"""scripts/evaluate.sh: unmodified tasks of stock lmms-eval and lm-eval, offline, on a checkpoint with known scores."""

import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path

import benchmark_data
import pytest
from benchmark_data import HELLASWAG, KINDS, PLAN, YES_NO, answer, by_group, picture
from training import flags

from llava.eval.evaluate import main
from llava.eval.harness import collect
from llava.eval.results import read_results
from llava.eval.tasks import TASKS
from llava.train.train import train
from playground import heldout

SCENES = [("black" if index in (2, 5) else colour, target) for index, (colour, target) in enumerate(PLAN)]
"""Pictures of which the checkpoint has nothing to say to two."""
EXPECTED = dict.fromkeys(("ocrbench", "seedbench_2_plus", "ai2d"), 5 / 7) | {
    "mmbench_en_dev_static": 4 / 7,  # one question is right in one order of its options only
    "mmstar": (3 / 5 + 2 / 2) / 2,  # the mean of both kinds
    "scienceqa": 6 / 9,  # one right of two without a picture
    "pope": 5 / 8,
    "textvqa_val": 5 / 8,
    "mme": (0.25 + 1)
    / 2,  # two pictures with two questions each, of one picture one is right; cognition is not counted
    "scenes": 3 / 7,
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("lmms_eval", "lm_eval")),
        reason="the harnesses are not installed: EXTRAS=eval bash scripts/setup.sh",
    ),
]


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    """Says A (POPE: Yes) to warm colours, B (No) to cold ones, nothing to black."""
    for colour in benchmark_data.PICTURES:
        picture(colour).save(tiny / f"data/images/{colour}.png")
    (tiny / "data/benchmarks.json").write_text(json.dumps(benchmark_data.records()))
    folder = tmp_path_factory.mktemp("benchmarks") / "finetune"
    options = {"version": "qwen_1_5", "data_path": tiny / "data/benchmarks.json", "per_device_train_batch_size": 15}
    options |= {"learning_rate": 1e-2, "lr_scheduler_type": "linear", "max_steps": 100, "telemetry_steps": 200}
    train(flags(tiny, folder, 2, **options))
    return folder


def write_scenes(folder: Path) -> None:
    """Held-out pictures and questions as the playground leaves them."""
    (folder / "images").mkdir(parents=True)
    records = []
    for index, (colour, target) in enumerate(SCENES):
        picture(colour).save(folder / f"images/{index}.png")
        turns = [("human", f"<image>\n{benchmark_data.PROMPTS['scenes']}"), ("gpt", target.lower() + ".")]
        record = {"id": f"scenes {index}", "image": f"{index}.png", "kind": KINDS[index]}
        record["conversations"] = [{"from": who, "value": text} for who, text in turns]
        records.append(record | {"choices": ["a", "b"] if KINDS[index] == "one" else ["a", "b", "c", "d"]})
    (folder / "heldout.json").write_text(json.dumps(records))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder with every data set."""
    root = tmp_path_factory.mktemp("hub")
    write_scenes(root / "scenes")
    heldout.prepare(heldout.Settings(), root)
    hub = root / heldout.FOLDER
    benchmark_data.write_all(hub)
    rows = benchmark_data.hellaswag()
    benchmark_data.write(hub / "Rowan/hellaswag", {"default": {"train": rows, "validation": rows}})
    return hub


@pytest.fixture(scope="module")
def evaluated(checkpoint, hub, tmp_path_factory):
    """What evaluate.sh printed about all tasks, and its output folder."""
    output, printed = tmp_path_factory.mktemp("evaluate"), io.StringIO()
    words = [checkpoint, "--data-dir", hub, "--output-dir", output, "--num-gpus", 0, "--tasks", ",".join(EXPECTED)]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = main([*map(str, words), "--together", "--batch-size", "3"])
    assert status == 0, printed.getvalue()
    return printed.getvalue(), output


@pytest.fixture(scope="module")
def results(evaluated):
    return read_results(evaluated[1])


@pytest.mark.parametrize("task", EXPECTED)
def test_every_unmodified_task_gives_the_known_score(results, task):
    assert results.tasks[task].score == pytest.approx(100 * EXPECTED[task], abs=1e-3)


def test_every_sample_is_recorded_with_answer_target_and_score(results):
    samples = results.tasks["ai2d"].samples
    assert [sample.id for sample in samples] == [str(index) for index in range(len(PLAN))]
    assert [sample.answer for sample in samples] == [answer("ai2d", colour) for colour, _ in PLAN]
    assert [sample.target for sample in samples] == [target for _, target in PLAN]
    assert [bool(sample.score) for sample in samples] == [answer("ai2d", colour) == target for colour, target in PLAN]
    (twice,) = [sample for sample in results.tasks["mmbench_en_dev_static"].samples if sample.id == "4"]
    assert (twice.answer, twice.target, twice.score) == ("A | A", "A | B", 0)
    assert by_group(results.tasks["mmstar"]) == pytest.approx({"kind one": 60, "kind two": 100})
    assert set(by_group(results.tasks["seedbench_2_plus"])) == {"Chart", "Map"}
    assert len(by_group(results.tasks["ocrbench"])) == 2
    assert [sample.score for sample in results.tasks["mme"].samples] == [0.25, 1]
    people = results.tasks["textvqa_val"].samples
    assert [sample.answer for sample in people] == [answer("pope", colour) for colour, _ in YES_NO]
    assert {sample.target for sample in people} == {""}  # lmms-eval writes the name of the field


def test_stock_lm_eval_asks_the_checkpoint_and_its_choices_are_read_as_it_scored_them(
    checkpoint, hub, tmp_path, monkeypatch
):
    """In this process: lm-eval's command first reads its 13,000 other tasks."""
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(hub)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks/hellaswag"
    model = {"pretrained": str(checkpoint), "dtype": "float32", "max_length": 512}
    options = {
        "batch_size": 3,
        "device": "cpu",
        "task_manager": TaskManager(include_path=folder, include_defaults=False),
    }
    tracker = EvaluationTracker(output_path=str(tmp_path))
    done = simple_evaluate("hf", model, tasks=["hellaswag"], evaluation_tracker=tracker, **options)
    samples = done.pop("samples")
    tracker.save_results_aggregated(results=done, samples=samples)
    tracker.save_results_samples(task_name="hellaswag", samples=samples["hellaswag"])
    result = collect(TASKS["hellaswag"], tmp_path, seconds=1)
    assert result.score == 25  # every question has each of its four labels once
    assert [sample.target for sample in result.samples] == [ending for item in HELLASWAG for ending in item[3]]
    assert [sample.answer == sample.target for sample in result.samples] == [s.score == 1 for s in result.samples]


def test_own_tasks_report_kinds_and_chance_and_count_what_has_no_answer(evaluated, results):
    scenes = results.tasks["scenes"]
    assert scenes.samples[0].id == "scenes 0"
    assert by_group(scenes) == pytest.approx({"one": 40, "two": 50})
    assert scenes.chance == pytest.approx(100 * (5 / 2 + 2 / 4) / 7)
    assert re.search(r"^scenes: 42\.86 % \(chance 42\.86 %, .*7 samples, 2 without an answer\)$", evaluated[0], re.M)


@pytest.mark.parametrize("task", [task for task in TASKS.values() if not task.own], ids=lambda task: task.name)
def test_every_task_is_one_of_the_harness_with_our_data_set(task):
    folder = Path(importlib.util.find_spec(task.harness).origin).parent / "tasks"
    files = [file for file in folder.glob(f"{task.name.partition('_')[0]}*/**/*") if file.suffix in ("", ".yaml")]
    texts = {file: file.read_text() for file in files if file.is_file()}
    (own,) = {file.parent for file, text in texts.items() if re.search(rf'^(task|group): "?{task.name}"?$', text, re.M)}
    beside = "\n".join(text for file, text in texts.items() if own in file.parents)
    assert re.search(rf"^dataset_path: {task.dataset}$", beside, re.M)
