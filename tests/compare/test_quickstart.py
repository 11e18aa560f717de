"""The quickstart and its answers: what runs beside what, what a second call leaves out, what is refused, its page."""

import html
import json
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from comparison_runs import Caller
from paths import ROOT
from PIL import Image
from study_stub import KINDS

from llava import asking
from llava.compare import answers, quickstart, steps
from llava.compare.__main__ import main
from llava.compare.quickstart import Quickstart
from llava.compare.steps import Step, StepError, run_lanes
from llava.eval.results import TaskResult, read_results, write_results
from llava.launch import devices
from llava.launch.settings import NAMES

ARMS = ("none", "gwc_layernorm")


# --- the flow ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(quickstart.available_cores() < 2, reason="arms train in parallel on two cores")
def test_an_interruption_ends_every_arm_a_rerun_resumes_and_another_trains_nothing_or_is_refused(tmp_path):
    root = tmp_path / "playground/data/scenes"
    (root / "images").mkdir(parents=True)
    turns = [{"from": "human", "value": "<image>\nWhich?"}, {"from": "gpt", "value": "a"}]
    records = [{"id": f"{kind}-0", "kind": kind, "image": f"{kind}.png", "conversations": turns} for kind in KINDS]
    (root / "heldout.json").write_text(json.dumps(records))
    for kind in KINDS:
        Image.new("RGB", (4, 4)).save(root / f"images/{kind}.png")
    call = Caller(tmp_path, "quickstart", cwd=tmp_path)

    hangs, other = "train 42 none pretrain", "train 42 gwc_layernorm finetune"  # which trains beside it
    calls, status, printed, family = call.signalled(other, signal.SIGINT, HANGS=hangs)
    assert hangs in calls and status == 130 and "rerun the same command to resume" in printed
    assert not psutil.wait_procs(family, timeout=10)[1]
    call.seen()
    done = call()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = call.seen()
    assert hangs in lines and "train 42 gwc_layernorm pretrain" not in lines
    assert lines.index(hangs) < lines.index("train 42 none finetune") < lines.index("answer none")
    assert lines[-1].startswith("measure update-rates")
    page = (call.out / "report.html").read_text()
    assert "gwc_layernorm minus none" in page and "the arms cannot be ranked" in page
    assert not re.findall(r"""src=["'](?!data:)""", page) and f"none: {html.escape('<b>a</b>')}" in page

    again = call()
    assert again.returncode == 0 and not [line for line in call.seen() if line.startswith("train")]
    assert again.stdout.count("is complete, skipped") == 4  # answers and the measurement are no stages
    refused = call(SEED=7)
    assert refused.returncode == 2 and not [line for line in call.seen() if line.startswith("train")]
    assert f"{call.out}/none/pretrain was trained with different flags" in refused.stderr.splitlines()[0]
    assert "choose another --output-dir" in refused.stderr


def test_answers_are_asked_of_the_callers_folders_whatever_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    trial = quickstart.Quickstart("demo", ["none"], [], Path("out"), "scenes")
    command = trial.held_out(trial.runs[0], trial.root / "scenes", Path("here")).command
    given = {flag: (ROOT / word).resolve() for flag, word in zip(command, command[1:], strict=False)}
    assert given["--checkpoint"] == tmp_path / "out/none/finetune" and given["--output-dir"] == tmp_path / "here"
    assert given["--data"] == ROOT / "playground/data/scenes"


def test_arms_train_one_after_the_other_on_gpus_and_where_cores_or_memory_are_short(monkeypatch, tmp_path):
    files = {"memory.max": str(8 * 2**30), "memory.current": str(6 * 2**30), "memory.stat": f"anon 1\nfile {2**30}"}
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert devices.memory_quota(tmp_path) == 3 * 2**30  # a container's page cache is free
    (tmp_path / "memory.max").write_text("max\n")
    assert devices.memory_quota(tmp_path) is None
    for free, quota, width in ((64, None, 2), (5, None, 1), (1, None, 1), (64, 4, 1)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free * 2**30))
        monkeypatch.setattr(steps, "memory_quota", lambda quota=quota: quota and quota * 2**30)
        assert steps.runs_at_once(2, cores=2) == width and steps.runs_at_once(2, cores=1) == 1
    monkeypatch.setattr(quickstart, "resolve_devices", lambda environment: SimpleNamespace(on_gpu=True))
    assert Quickstart("demo", list(ARMS), [], tmp_path, "scenes").places() == [{}]


def test_wrong_settings_are_refused_before_anything_runs(tmp_path, capsys, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PROJECTOR", "linear")
    for flags, said in ((["--arms", "none none"], "each once"), ([], "PROJECTOR=linear: --arms sets it")):
        assert main(["quickstart", "--output-dir", str(tmp_path / "out"), *flags]) == 2
        refused = capsys.readouterr().err
        assert said in refused and len(refused.splitlines()) == 1 and not (tmp_path / "out").exists()


# --- lanes ------------------------------------------------------------------------------------------------------------


def test_a_lane_starts_in_a_place_that_another_has_left(tmp_path):
    lanes_of = {
        name: [Step(name, ["bash", "-c", f"echo {name}$GPU >>{tmp_path}/order; sleep 0.2"], tmp_path / name)]
        for name in "abc"
    }
    run_lanes(lanes_of, [{"GPU": "0"}, {"GPU": "1"}])
    seen = (tmp_path / "order").read_text().split()
    assert set(seen[:2]) == {"a0", "b1"} and seen[2] in ("c0", "c1")


def test_a_failed_step_names_its_log_and_ends_the_other_lane(tmp_path):
    hangs = f"trap 'touch {tmp_path}/told; exit 85' TERM; touch {tmp_path}/ready; while true; do sleep 0.1; done"
    fails = f"until [ -e {tmp_path}/ready ]; do sleep 0.1; done; echo no such flag; exit 3"
    lanes = {"a": [Step("other", ["bash", "-c", hangs], tmp_path / "a.log")]}
    lanes["b"] = [Step("it", ["bash", "-c", fails], tmp_path / "b.log"), Step("next", ["false"], tmp_path / "c.log")]
    with pytest.raises(StepError) as raised:
        run_lanes(lanes, [{}] * 2)
    first, *rest = str(raised.value).splitlines()
    assert first.startswith("it failed with status 3: ")
    assert rest == ["  | no such flag", f"its log: {tmp_path}/b.log", "rerun the same command to resume"]
    assert (tmp_path / "told").exists() and not (tmp_path / "c.log").exists()


# --- recorded answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["weights", "questions", "pictures", "precision", "code"])
def test_recorded_answers_count_only_while_all_that_decides_them_is_the_same(tmp_path, monkeypatch, change):
    data, checkpoint = tmp_path / "data", tmp_path / "checkpoint"
    for file in (data / "heldout.json", data / "images/a.png", checkpoint / "config.json"):
        file.parent.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.json").write_text("{}")
    (data / "heldout.json").write_text(json.dumps([{"image": "a.png"}]))
    Image.new("RGB", (4, 4), "red").save(data / "images/a.png")
    before, content = answers.described(checkpoint, 1), answers.content_of(data)
    before.tasks = {"color": TaskResult("accuracy", 100.0, [], None, 0.0, content)}
    write_results(before, tmp_path)
    assert answers.is_answered(tmp_path, answers.described(checkpoint, 1), answers.content_of(data))
    if change == "weights":
        (checkpoint / "model.safetensors").write_bytes(b"")
    if change == "questions":
        (data / "heldout.json").write_text(json.dumps([{"image": "a.png", "kind": "color"}]))
    if change == "pictures":
        Image.new("RGB", (4, 4), "grey").save(data / "images/a.png")
    if change == "precision":
        monkeypatch.setattr(answers, "fastest_dtype", lambda: "float16")
    if change == "code":
        monkeypatch.setattr(answers, "made_by", lambda sources: {"llava (code)": "another"})
    assert not answers.is_answered(tmp_path, answers.described(checkpoint, 1), answers.content_of(data))


def test_an_answer_may_be_one_token_longer_than_the_longest_expected(tokenizer):
    """Cut at the expected length, "a great blue heron on a lake" would be taken for "a great blue heron"."""
    records = [{"conversations": [{}, {"value": text}]} for text in ("red", "a great blue heron")]
    assert answers.longest_answer(records, tokenizer) == len("a great blue heron") + 1  # a token per byte
    assert answers.longest_answer(records[:1], tokenizer) == answers.SHORTEST


@pytest.fixture
def data(tiny, trained, tmp_path):
    """A prepared folder that asks each question about each colour, every question a kind."""
    trained("none")
    (tmp_path / "data").mkdir()
    records = json.loads((tiny / "data/colours.json").read_text())
    records = [r | {"kind": r["id"].split(" ", 1)[1], "choices": ["Yes", "No"]} for r in records]
    (tmp_path / "data/heldout.json").write_text(json.dumps(records))
    shutil.copytree(tiny / "data/images", tmp_path / "data/images")
    return tmp_path / "data"


@pytest.mark.slow
def test_answers_are_scored_by_kind_and_asked_once(data, trained, tmp_path, monkeypatch):
    places = ("--checkpoint", trained("none"), "--data", data, "--output-dir", tmp_path / "out")
    words = ["answers", *map(str, places)]
    assert main([*words, "--batch-size", "5"]) == 0
    found = read_results(tmp_path / "out").tasks
    assert all(task.score > 90 and task.chance == 50 for task in found.values())
    values = [sample.log_probability for task in found.values() for sample in task.samples]
    assert min(values) < max(values) <= 0
    monkeypatch.setattr(asking, "load_assistant", lambda *_, **__: pytest.fail("asked again"))
    assert main(words) == 0  # all are recorded
