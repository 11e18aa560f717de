"""scripts/evaluate.sh: unmodified tasks of stock lmms-eval and lm-eval, offline, on a checkpoint with known scores."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import benchmark_data
import pytest
import torch
from benchmark_data import HELLASWAG, KINDS, MMLU, PLAN, POPE, answer, by_group, picture
from paths import ROOT
from training import flags

from llava.asking import load_assistant
from llava.eval.evaluate import main
from llava.eval.results import read_results
from llava.train.train import train
from playground import heldout

TASKS = (
    "mmbench_en_dev_static",
    "mmstar",
    "ocrbench",
    "seedbench_2_plus",
    "scienceqa",
    "scienceqa_img",
    "ai2d",
    "pope",
)
ALL = (*TASKS, "scenes", "hellaswag", "mmlu")
HITS = [answer("ai2d", colour) == target for colour, target in PLAN]
EXPECTED = dict.fromkeys(TASKS, 5 / 7) | {
    "mmbench_en_dev_static": 4 / 7,  # one question is right in one order of its options only
    "mmstar": (3 / 5 + 2 / 2) / 2,  # the mean of both kinds
    "scienceqa": 6 / 9,  # one right of two without a picture
    "pope": 5 / 8,
    "scenes": 5 / 7,
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("lmms_eval", "lm_eval")),
        reason="the harnesses are not installed: EXTRAS=eval bash scripts/setup.sh",
    ),
]


def evaluate(checkpoint: Path, hub: Path, output: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = ["bash", "scripts/evaluate.sh", str(checkpoint), "--data-dir", str(hub), "--output-dir", str(output)]
    environment = os.environ | {"LLAVA_PYTHON": sys.executable, "HF_HOME": str(output / "cache")}
    command += ["--num-gpus", "0", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    """Says A (POPE: Yes) to warm colours, B (No) to cold ones, nothing to black."""
    for colour in benchmark_data.PICTURES:
        picture(colour).save(tiny / f"data/images/{colour}.png")
    (tiny / "data/benchmarks.json").write_text(json.dumps(benchmark_data.records()))
    folder = tmp_path_factory.mktemp("benchmarks") / "finetune"
    options = {"version": "qwen_1_5", "data_path": tiny / "data/benchmarks.json", "per_device_train_batch_size": 15}
    options |= {"learning_rate": 1e-2, "lr_scheduler_type": "linear", "max_steps": 160, "telemetry_steps": 200}
    train(flags(tiny, folder, 2, **options))
    return folder


@pytest.fixture(scope="module")
def assistant(checkpoint):
    return load_assistant(str(checkpoint))


@torch.inference_mode()
def likeliest(assistant, context: str, continuations: list[str], by_length: bool) -> int:
    """Which continuation the model finds likeliest, computed one by one in float64."""
    scores = []
    for text in continuations:
        ids = assistant.tokenizer(context + text, add_special_tokens=False, return_tensors="pt").input_ids
        first = len(assistant.tokenizer(context, add_special_tokens=False).input_ids)
        logits = assistant.model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        score = logits.gather(1, ids[0, 1:, None])[first - 1 :].sum()
        scores.append(float(score) / (len(text) - 1 if by_length else 1))
    return max(range(len(scores)), key=scores.__getitem__)


def hellaswag_choices(assistant) -> list[int]:
    contexts = [f"{activity}: {first} {second.capitalize()}" for activity, first, second, _ in HELLASWAG]
    endings = [[f" {ending}" for ending in item[3]] for item in HELLASWAG]
    return [likeliest(assistant, context, e, True) for context, e in zip(contexts, endings, strict=True)]


def mmlu_choices(assistant, subject: str) -> list[int]:
    """The model's choices on `subject`, whose name stands above the question."""
    head = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
    letters = ["A", "B", "C", "D"]
    chosen = []
    for question, choices in MMLU:
        options = "\n".join(f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True))
        context = f"{head}{question}\n{options}\nAnswer:"
        chosen.append(likeliest(assistant, context, [f" {letter}" for letter in letters], False))
    return chosen


def mmlu_subjects() -> list[str]:
    folder = Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks/mmlu/default"
    return sorted(file.stem.removeprefix("mmlu_") for file in folder.glob("mmlu_*.yaml"))


def write_heldout(root: Path, name: str, plan: list[tuple[str, str]]) -> None:
    """Held-out pictures and questions as the playground leaves them."""
    (root / name / "images").mkdir(parents=True)
    records = []
    for index, (colour, target) in enumerate(plan):
        picture(colour).save(root / name / f"images/{index}.png")
        turns = [("human", f"<image>\n{benchmark_data.PROMPTS['scenes']}"), ("gpt", target.lower() + ".")]
        records.append(
            {
                "id": f"{name} {index}",
                "image": f"{index}.png",
                "conversations": [{"from": who, "value": text} for who, text in turns],
                "kind": KINDS[index],
                "choices": ["a", "b"] if KINDS[index] == "one" else ["a", "b", "c", "d"],
            }
        )
    (root / name / "heldout.json").write_text(json.dumps(records))


@pytest.fixture(scope="module")
def runs(checkpoint, assistant, tmp_path_factory):
    """What two calls of evaluate.sh printed and left: on all tasks, `stamps` with pictures to which the checkpoint says
    nothing, and on data at which it raises."""
    root = tmp_path_factory.mktemp("evaluate")
    hub, bad = root / heldout.FOLDER, root / "bad"
    write_heldout(root, "scenes", PLAN)
    write_heldout(root, "stamps", [(("black", "A") if index in (2, 5) else item) for index, item in enumerate(PLAN)])
    heldout.prepare(heldout.Settings(), root)
    benchmark_data.write_all(hub)
    chosen = hellaswag_choices(assistant)
    labels = [chosen[0], chosen[1], (chosen[2] + 1) % 4, chosen[3]]
    rows = benchmark_data.hellaswag(labels)
    benchmark_data.write(hub / "Rowan/hellaswag", {"default": {"train": rows, "validation": rows}})
    rows = benchmark_data.mmlu([0, 2])
    splits = {"test": rows, "validation": rows, "dev": rows}
    benchmark_data.write(hub / "cais/mmlu", dict.fromkeys(mmlu_subjects(), splits))
    rows = benchmark_data.pope(POPE[:4])
    rows[2]["question"] = "Is <image> warmer than <image>?"  # one picture for two places: `generate` raises
    benchmark_data.write(bad / "lmms-lab-encoder/POPE", {"default": {"test": rows}})
    every = ["--tasks", ",".join([*ALL, "stamps"]), "--mmlu-fewshot", "0", "--together"]
    with ThreadPoolExecutor() as pool:
        all_tasks = pool.submit(evaluate, checkpoint, hub, root / "out", *every, "--batch-size", "3")
        failing = pool.submit(evaluate, checkpoint, bad, root / "failed", "--tasks", "pope")
        return {"all": (all_tasks.result(), hub, root / "out"), "bad": (failing.result(), bad, root / "failed")}


@pytest.fixture(scope="module")
def results(runs):
    process, _, output = runs["all"]
    assert process.returncode == 1, process.stdout[-3000:] + process.stderr[-6000:]
    result = read_results(output)
    assert set(result.tasks) == set(ALL), process.stdout[-3000:] + process.stderr[-6000:]
    return result


@pytest.mark.parametrize("task", EXPECTED)
def test_every_unmodified_task_gives_the_known_score(results, task):
    assert results.tasks[task].score == pytest.approx(100 * EXPECTED[task], abs=1e-3)


def test_every_sample_is_recorded_with_answer_target_and_score(results):
    samples = results.tasks["ai2d"].samples
    assert [sample.id for sample in samples] == [str(index) for index in range(len(PLAN))]
    assert [sample.answer for sample in samples] == [answer("ai2d", colour) for colour, _ in PLAN]
    assert [sample.target for sample in samples] == [target for _, target in PLAN]
    assert [bool(sample.score) for sample in samples] == HITS
    (twice,) = [sample for sample in results.tasks["mmbench_en_dev_static"].samples if sample.id == "4"]
    assert (twice.answer, twice.target, twice.score) == ("A | A", "A | B", 0)
    assert by_group(results.tasks["mmstar"]) == pytest.approx({"kind one": 60, "kind two": 100})
    assert set(by_group(results.tasks["seedbench_2_plus"])) == {"Chart", "Map"}
    assert len(by_group(results.tasks["ocrbench"])) == 2


def test_the_harnesss_answers_are_those_of_our_own_greedy_decoding(assistant, results):
    turns = [[{"from": "human", "value": f"<image>\n{benchmark_data.PROMPTS['pope']}"}]] * len(POPE)
    own = assistant.answer(turns, [picture(colour) for colour, _ in POPE], do_sample=False, max_new_tokens=8)
    assert own == [answer("pope", colour) for colour, _ in POPE]
    assert [sample.answer for sample in results.tasks["pope"].samples] == own


def test_likelihood_tasks_choose_as_the_model_does_one_by_one(assistant, results):
    assert results.tasks["hellaswag"].score == pytest.approx(75)
    chosen = [HELLASWAG[i][3][choice] for i, choice in enumerate(hellaswag_choices(assistant))]
    assert [sample.answer for sample in results.tasks["hellaswag"].samples] == chosen
    result = results.tasks["mmlu"]
    subjects = mmlu_subjects()
    assert len(result.samples) == 2 * len(subjects) == 114
    for subject in (subjects[0], subjects[-1]):
        samples = [sample for sample in result.samples if sample.group == subject]
        assert [sample.answer for sample in samples] == ["ABCD"[i] for i in mmlu_choices(assistant, subject)]
        assert [sample.target for sample in samples] == ["A", "C"]
    right = sum(sample.answer == sample.target for sample in result.samples)
    assert 0 < right < 114 and result.score == pytest.approx(100 * right / 114)


def test_own_tasks_report_kinds_and_chance(results):
    scenes = results.tasks["scenes"]
    assert scenes.samples[0].id == "scenes 0"
    assert by_group(scenes) == pytest.approx({"one": 60, "two": 100})
    assert scenes.chance == pytest.approx(100 * (5 / 2 + 2 / 4) / 7)


def test_the_result_file_says_what_made_it(checkpoint, results):
    assert results.checkpoint == str(checkpoint)
    assert results.versions["lmms-eval"] and results.versions["lm-eval"]
    assert results.settings["conv_template"] == "qwen_1_5"
    assert results.command.startswith(f"bash scripts/evaluate.sh {checkpoint}")


def test_empty_answers_fail_their_task_and_name_the_samples(runs):
    process, _, _ = runs["all"]
    assert re.findall(r"doc (\d+): empty answer", process.stderr) == ["2", "5"]
    assert "error: 1 of 12 tasks failed: stamps" in process.stderr


def test_an_error_of_the_model_fails_its_task_with_the_end_of_the_log(runs):
    process, _, output = runs["bad"]
    assert process.returncode == 1
    assert "pope failed" in process.stderr and re.search(r"^ *ValueError: ", process.stderr, re.MULTILINE)
    assert not (output / "results.json").exists()


def test_a_second_call_finds_everything_done(checkpoint, runs, results, capsys):
    _, hub, output = runs["all"]
    places = ["--data-dir", str(hub), "--output-dir", str(output), "--num-gpus", "0"]
    assert main([str(checkpoint), *places, "--tasks", ",".join(ALL), "--mmlu-fewshot", "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("finished before") == len(ALL) and "running" not in printed
    assert read_results(output).tasks == results.tasks
