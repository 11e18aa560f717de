"""What evaluate.sh accepts, refuses and resumes, on files as the harnesses leave them."""

import json
from types import SimpleNamespace

import pytest
from filelock import FileLock
from PIL import Image

from llava.eval import evaluate as evaluate_module
from llava.eval import harness as harness_module
from llava.eval.evaluate import main, parser
from llava.eval.harness import EvaluationError, collect
from llava.eval.results import Answered, Results, TaskResult, read_results, write_results
from llava.eval.tasks import PAPER_COLUMNS, TASKS, choose

POPE = TASKS["pope"]
ANSWERS = ["yes", "no", "yes", ""]


def leave(folder, score=None, doc_ids=None, expected=None):
    """Writes the files of lmms-eval's `pope` with `ANSWERS`; the right answer to every question is yes."""
    folder = folder / "org__model"
    folder.mkdir(parents=True)
    hits = [float(answer == "yes") for answer in ANSWERS]
    records = [
        {"doc_id": i, "target": "yes", "filtered_resps": answer, "pope_accuracy": {"score": hit}}
        for i, answer, hit in zip(doc_ids or range(len(ANSWERS)), ANSWERS, hits, strict=True)
    ]
    (folder / "now_samples_pope.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    value = sum(hits) / len(hits) if score is None else score
    counts = {"pope": {"original": 9000, "effective": float(expected or len(ANSWERS))}}  # as with --limit
    scores = {"results": {"pope": {"pope_accuracy,none": value}}, "n-samples": counts}
    (folder / "now_results.json").write_text(json.dumps(scores))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (None, "without writing results"),
        ({"doc_ids": [0, 1, 3, 4], "expected": 5}, "doc 2: 0 samples instead of one"),
        ({"doc_ids": [0, 1, 1, 2]}, "doc 1: 2 samples instead of one"),
        ({"score": 0.75}, "0.75, which is not the samples' score of 50"),
        ({"score": "nan?"}, "expected a number pope_accuracy,none"),
    ],
)
def test_what_went_wrong_is_found_and_the_samples_are_named(tmp_path, fault, message):
    if fault:
        leave(tmp_path, **fault)
    with pytest.raises(EvaluationError, match=f"(?s)pope.*{message}"):
        collect(POPE, tmp_path, seconds=1)


def leave_mmlu(folder, likelihoods):
    """Writes lm-eval's files of two subjects with a question each, whose right answers are the second choice."""
    arguments = {f"gen_args_{i}": {"arg_0": "Which?", "arg_1": f" {letter}"} for i, letter in enumerate("ABCD")}
    responses = [[str(value), "False"] for value in likelihoods]
    for subject, right in (("art", 1.0), ("law", 0.0)):
        record = {"doc_id": 0, "target": "1" if right else "0", "acc": right}
        record |= {"arguments": arguments, "filtered_resps": responses}
        (folder / f"samples_mmlu_{subject}_2026-01-01.jsonl").write_text(json.dumps(record) + "\n")
    counts = {f"mmlu_{subject}": {"original": 9, "effective": 1} for subject in ("art", "law")}
    scores = {"results": {}, "groups": {"mmlu": {"acc,none": 0.5}}, "n-samples": counts}
    (folder / "results_2026.json").write_text(json.dumps(scores))


def test_a_groups_subjects_are_one_task_with_the_likeliest_choices_as_answers(tmp_path):
    leave_mmlu(tmp_path, (-3, -1, -2, -4))
    result = collect(TASKS["mmlu"], tmp_path, seconds=1)
    assert result.score == 50
    assert result.samples == [Answered("art/0", 1, "B", "B", "art"), Answered("law/0", 0, "B", "A", "law")]
    leave_mmlu(tmp_path, (-3, "nan", -2, -4))
    with pytest.raises(EvaluationError, match="doc art/0: its likelihoods are not numbers"):
        collect(TASKS["mmlu"], tmp_path, seconds=1)


def test_a_group_stands_for_its_tasks_each_once_and_other_names_are_refused():
    names = [task.name for task in choose("pope,llava-1.5")]
    assert names[0] == "pope" and names.count("pope") == 1
    assert {"gqa", "textvqa_val", "vizwiz_vqa_val", "mme", "scienceqa_img", "seedbench"} < set(names)
    assert [task.name for task in choose(None)] == list(PAPER_COLUMNS.values())
    with pytest.raises(ValueError, match="pop: not known here; known: mmbench_en_dev_static, mmstar"):
        choose("pop")


def test_results_read_as_they_were_written_and_damage_is_named(tmp_path):
    samples = [Answered("a/0", 1.0, "A", "A", "a"), Answered("b/0", 0.0, "A", "B", "b")]
    task = TaskResult("acc,none", 50.0, samples, 25, 1.5)
    results = Results("ckpt", "f", "bash", {"torch": "2"}, {"limit": None}, "2026-01-01T00:00:00+00:00", {"mmlu": task})
    assert read_results(write_results(results, tmp_path)) == results == read_results(tmp_path)
    for text, message in (("{", "not a result file"), ('{"format": 2}', "format 2, expected 1")):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_results(tmp_path)


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """A checkpoint, data of `pope` and `mmstar`, and a harness that fails on `mmstar`; `.ran` lists its starts."""
    checkpoint = tmp_path / "arm/finetune"
    checkpoint.mkdir(parents=True)
    config = {"model_type": "llava_qwen", "mm_conv_version": "qwen_1_5"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    for name in ("lmms-lab-encoder/POPE", "Lin-Chen/MMStar"):
        (tmp_path / "hub" / name).mkdir(parents=True)
        (tmp_path / "hub" / name / "README.md").write_text("---\n---\n")
    ran = []

    def run(command, log, cwd, env):
        ran.append(log.parent.name)
        log.write_text("")
        if ran[-1] == "pope":
            leave(log.parent)
        return 0 if ran[-1] == "pope" else 3

    monkeypatch.setattr(harness_module, "run_logged", run)
    monkeypatch.setattr(harness_module, "OWN_DATA", tmp_path / "no playground")
    return SimpleNamespace(checkpoint=checkpoint, hub=tmp_path / "hub", output=tmp_path / "out", ran=ran)


def call(harness, *arguments) -> int:
    argv = [str(harness.checkpoint), "--data-dir", str(harness.hub), "--output-dir", str(harness.output)]
    return main([*argv, "--num-gpus", "0", *arguments])


def test_a_finished_task_is_kept_and_a_failed_one_runs_again(harness, capsys):
    for _ in range(2):
        assert call(harness, "--tasks", "mmstar,pope") == 1
        error = capsys.readouterr().err
        assert "exit status 3" in error and "1 of 2 tasks failed: mmstar" in error
    assert harness.ran == ["mmstar", "pope", "mmstar"]
    assert list(read_results(harness.output).tasks) == ["pope"]


@pytest.mark.parametrize("change", ["checkpoint", "data", "pictures", "code", "limit"])
def test_a_finished_task_runs_again_when_anything_it_depends_on_changed(harness, change, capsys, monkeypatch):
    picture = harness.hub / "lmms-lab-encoder/POPE/images/a.ppm"
    picture.parent.mkdir()
    Image.new("RGB", (8, 8), "red").save(picture)
    assert call(harness, "--tasks", "pope") == call(harness, "--tasks", "pope") == 0
    assert harness.ran == ["pope"] and "finished before" in capsys.readouterr().out
    if change == "pictures":
        Image.new("RGB", (8, 8), "grey").save(picture)
    if change == "code":
        monkeypatch.setattr(evaluate_module, "made_by", lambda *sources: {"llava (code)": "another"})
    if change == "checkpoint":
        (harness.checkpoint / "config.json").write_text((harness.checkpoint / "config.json").read_text() + " ")
    if change == "data":
        (harness.hub / "lmms-lab-encoder/POPE/README.md").write_text("---\nmore: 1\n---\n")
    extra = ["--limit", "4"] if change == "limit" else []
    assert call(harness, "--tasks", "pope", *extra, "--batch-size", "2") == 0
    assert harness.ran == ["pope", "pope"]
    renamed = list(harness.output.glob("results.2*.json"))
    assert bool(renamed) == (change in ("checkpoint", "code", "limit"))
    output = capsys.readouterr().out
    assert ("made with other" in output) == bool(renamed) and (not renamed or change in output)
    assert ("made from other data or pictures" in output) == (change in ("data", "pictures"))


def test_data_that_change_during_an_evaluation_give_no_score(harness, monkeypatch, capsys):
    run, readme = harness_module.run_logged, harness.hub / "lmms-lab-encoder/POPE/README.md"

    def exchanged(*args, **options):
        readme.write_text("---\nmore: 1\n---\n")
        return run(*args, **options)

    monkeypatch.setattr(harness_module, "run_logged", exchanged)
    assert call(harness, "--tasks", "pope") == 1
    assert "its data changed while it was evaluated" in capsys.readouterr().err


def test_missing_data_captioners_and_a_used_folder_are_refused_at_once(harness, capsys):
    def refusal(tasks):
        assert call(harness, "--tasks", tasks) == 2
        return capsys.readouterr().err

    assert "lmms-lab-encoder/ai2d/README.md is missing" in refusal("ai2d")
    harness.output.mkdir()
    with FileLock(harness.output / ".lock"):
        assert "another evaluate.sh writes there" in refusal("pope")
    (harness.output / "pope").mkdir()
    (harness.output / "pope/mine.txt").touch()
    assert "no log.txt of an earlier evaluation" in refusal("pope")
    assert (harness.output / "pope/mine.txt").exists()
    config = {"model_type": "llava_qwen", "mm_conv_version": "plain"}
    (harness.checkpoint / "config.json").write_text(json.dumps(config))
    assert "stage-2 checkpoint" in refusal("pope")
    assert not harness.ran


def test_several_gpus_are_one_process_each_and_a_cpu_is_asked_for_by_name(tmp_path):
    settings = {"conv_template": "qwen_1_5", "context": 8192}
    on_eight = parser().parse_args(["org/model", "--num-gpus", "8", "--batch-size", "4", "--limit", "3"])
    text = " ".join(harness_module.harness_command([POPE, TASKS["scenes"]], tmp_path, on_eight, settings))
    assert "-m accelerate.commands.launch --num_processes 8 " in text and " -m llava.eval.harness lmms_eval " in text
    assert "playground/tasks --tasks pope,scenes --batch_size 4 --device cuda " in text and text.endswith("--limit 3")
    text = " ".join(harness_module.harness_command([POPE, TASKS["scienceqa"]], tmp_path, on_eight, settings))
    assert "--batch_size 1 " in text  # its questions without a picture would be asked differently beside others
    on_cpu = parser().parse_args(["org/model", "--num-gpus", "0"])
    text = " ".join(harness_module.harness_command([TASKS["mmlu"]], tmp_path, on_cpu, settings))
    assert "accelerate" not in text and "dtype=float32,max_length=8192" in text and "--num_fewshot 5 " in text
    assert "--device cpu" in text
