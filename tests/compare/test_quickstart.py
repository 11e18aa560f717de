"""The quickstart: what runs beside what, what a second call leaves out, what is refused, and its page."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import study_stub
from paths import ROOT
from PIL import Image
from run_inputs import inputs_in
from shell import bash, new_lines, only
from study_stub import KINDS

from llava.compare import quickstart, steps
from llava.compare.__main__ import main
from llava.compare.engine import at_work
from llava.compare.runs import Run
from llava.compare.steps import Step, StepError, run_lanes
from llava.launch import devices
from llava.launch.settings import NAMES
from llava.utils.provenance import RUN_FILE

# A stand-in for Python that writes down when what was begun and ended, and leaves the files of study_stub.
PYTHON = r"""#!/usr/bin/env bash
note() { echo "$1 $name threads=${OMP_NUM_THREADS:-}" >>"$CALLS"; }
words=("$@")
case "$*" in
  *train_mem.py*)
    while [ "$1" != --output_dir ]; do shift; done
    out=$2 name="train ${2#$OUT/}"
    note begin
    mkdir -p "$out"
    echo '{"step": 1, "loss": 2.5, "samples_per_second": 4.0}' >"$out/train_log.jsonl"
    echo "said by $name"
    for ((i = 0; i < 600 && $(grep -c '^begin train' "$CALLS") < ${TOGETHER:-0}; i++)); do sleep 0.1; done
    [ "$name" != "train $STUBBORN" ] || { trap '' TERM USR1 INT; sleep 60 & wait; }
    [ "$name" != "train $HANGS" ] || { trap 'note end; exit 85' TERM USR1; sleep 60 & wait; }
    sleep "${TRAINS:-0.3}" ;;
  *"llava.compare answers"*) arm=${5%/finetune} name="answers ${arm##*/}" && note begin ;;
  *llava.analysis*) name="measure $3" && note begin ;;
  *playground*) name="$3" && note begin ;;
  *) exit 1 ;;
esac
CALLS=/dev/null PYTHONPATH=@ROOT @PYTHON @STUB "${words[@]}"
note end
"""
# Stand-ins need no memory, so that two train at once on every machine with two cores.
QUICKSTART = "from llava.compare import __main__, steps; steps.MEMORY_OF_RUN = 0.01; exit(__main__.main())"
PYTHON = PYTHON.replace("@ROOT", str(ROOT)).replace("@PYTHON", sys.executable).replace("@STUB", study_stub.__file__)


@pytest.fixture
def start(tmp_path):
    """A function that runs the quickstart with a stand-in interpreter, or starts it; `.calls()` lists what it began."""
    python, calls, out, root = tmp_path / "python", tmp_path / "calls", tmp_path / "out", tmp_path / "playground/data"
    python.write_text(PYTHON)
    python.chmod(0o755)
    (root / "scenes/images").mkdir(parents=True)
    turns = [{"from": "human", "value": "<image>\nWhich?"}, {"from": "gpt", "value": "a"}]
    records = [{"id": f"{kind}-0", "kind": kind, "image": f"{kind}.png", "conversations": turns} for kind in KINDS]
    (root / "scenes/heldout.json").write_text(json.dumps(records))
    for kind in KINDS:
        Image.new("RGB", (4, 4)).save(root / f"scenes/images/{kind}.png")
    env = {"LLAVA_PYTHON": python, "CALLS": calls, "OUT": out, "NUM_GPUS": 0, "WATCH_SECONDS": "0.1", "BF16": "False"}
    env = only(**env | inputs_in(tmp_path), HOME=tmp_path, LOCK_SECONDS=1, PYTHONPATH=ROOT)

    def run(*flags, wait=True, **extra):
        words = [sys.executable, "-c", QUICKSTART, "quickstart", "--output-dir", str(out), *flags]
        options = {"cwd": tmp_path, "env": {name: str(value) for name, value in (env | extra).items()}, "text": True}
        if wait:
            return subprocess.run(words, capture_output=True, timeout=240, **options)
        listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(words, start_new_session=True, preexec_fn=listens, stderr=subprocess.PIPE, **options)

    run.calls, run.out = new_lines(calls), out
    return run


def begun(lines, what=""):
    return [line.split()[1:-1] for line in lines if line.startswith(f"begin {what}")]


def wait_for(file):
    for _ in range(300):
        if file.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{file} never came")


# --- the flow ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(quickstart.available_cores() < 2, reason="arms train side by side on two cores")
def test_arms_train_side_by_side_and_a_second_call_trains_nothing_or_is_refused(start):
    done = start(TRAINS=1, TOGETHER=2)  # a training goes on when two have begun
    assert done.returncode == 0, done.stdout + done.stderr
    lines = start.calls()
    first = [line for line in lines if "train" in line][:2]
    assert sorted(begun(first)) == [["train", "gwc_layernorm/pretrain"], ["train", "none/pretrain"]]
    assert {line.split("threads=")[1] for line in first} == {str(quickstart.available_cores() // 2)}
    for arm in ("none", "gwc_layernorm"):
        mine = [words[-1].removeprefix(f"{arm}/") for words in begun(lines) if words[-1].startswith(arm)]
        assert mine == ["pretrain", "finetune", arm]  # the last: its answers
    assert begun(lines)[-1] == ["measure", "update-rates"]
    assert "gwc_layernorm minus none" in (start.out / "index.html").read_text()
    before = json.loads((start.out / "record.json").read_text())["times"]
    assert before["none, pretrain"] >= 1
    again = start()
    assert again.returncode == 0 and not begun(start.calls(), "train")
    assert again.stdout.count("is complete, skipped") == 4  # answers and the measurement are no stages
    kept = json.loads((start.out / "record.json").read_text())["times"]
    assert kept["none, pretrain"] == before["none, pretrain"]
    other = start(SEED=7)
    assert other.returncode == 2 and not begun(start.calls(), "train")
    first, second, *_ = other.stderr.splitlines()
    assert f"{start.out}/none/pretrain was trained with different flags" in first
    assert "seed: " in second and "choose another --output-dir" in other.stderr


@pytest.mark.parametrize(("on_gpu", "lanes"), [(True, 1), (False, 2)])
def test_on_gpus_one_arm_trains_after_the_other(on_gpu, lanes, monkeypatch, tmp_path):
    monkeypatch.setattr(quickstart, "resolve_devices", lambda environment: SimpleNamespace(on_gpu=on_gpu))
    monkeypatch.setattr(quickstart, "runs_at_once", lambda runs, cores: runs)
    assert quickstart.Quickstart("demo", ["none", "gwc_layernorm"], [], tmp_path, "scenes").places() == [{}] * lanes


@pytest.mark.parametrize(("free", "width"), [(64, 2), (5, 1), (1, 1)])
def test_arms_train_one_after_the_other_where_memory_is_short(free, width, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free * 2**30))
    monkeypatch.setattr(steps, "memory_quota", lambda: None)
    assert steps.runs_at_once(2, cores=2) == width
    assert steps.runs_at_once(2, cores=1) == 1


def test_a_containers_limit_counts_and_its_page_cache_is_free(tmp_path, monkeypatch):
    files = {"memory.max": str(8 * 2**30), "memory.current": str(6 * 2**30), "memory.stat": f"anon 1\nfile {2**30}"}
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert devices.memory_quota(tmp_path) == 3 * 2**30
    (tmp_path / "memory.max").write_text("max\n")
    assert devices.memory_quota(tmp_path) is None
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * 2**30))
    monkeypatch.setattr(steps, "memory_quota", lambda: 4 * 2**30)
    assert steps.runs_at_once(2, cores=2) == 1


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_interruption_ends_every_arm_and_a_rerun_resumes(start):
    process = start(wait=False, HANGS="none/finetune")
    wait_for(start.out / "none/finetune/train_log.jsonl")
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does with Ctrl-C
    assert process.wait(timeout=30) == 130
    assert "rerun the same command to resume" in process.stderr.read()
    assert not psutil.wait_procs(family, timeout=10)[1]
    start.calls()
    assert start().returncode == 0
    again = begun(start.calls(), "train")
    assert ["train", "none/finetune"] in again and ["train", "none/pretrain"] not in again


@pytest.mark.slow
def test_a_second_interruption_ends_a_training_that_does_not_listen(start):
    process = start(wait=False, STUBBORN="none/pretrain")
    wait_for(start.out / "none/pretrain/train_log.jsonl")
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert not psutil.wait_procs(family, timeout=10)[1]


def test_a_run_that_logged_no_step_blocks_no_later_call(tmp_path):
    run = Run(tmp_path, None, "none")
    run.folder("pretrain").mkdir(parents=True)
    (run.folder("pretrain") / RUN_FILE).write_text("{}")
    assert not run.has_begun("pretrain")
    (run.folder("pretrain") / "train_log.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    assert run.has_begun("pretrain")


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        (["--arms", "none none"], {}, "each once"),
        (["--arms", "none,batchnorm"], {}, "'batchnorm' is not one of"),
        ([], {"PROJECTOR": "linear"}, "PROJECTOR=linear: arms have mlp2x_gelu"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(flags, variables, said, tmp_path, capsys, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["quickstart", "--output-dir", str(tmp_path / "out"), *flags]) == 2
    refused = capsys.readouterr().err
    assert said in refused and len(refused.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_or_is_in_use_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCK_SECONDS", "0")
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own way to end
    (tmp_path / "file").touch()
    refusal = f"{tmp_path}/file cannot be written: File exists; set OUTPUT_ROOT"
    with pytest.raises(ValueError, match=re.escape(refusal)), at_work(tmp_path / "file"):
        pass
    with at_work(tmp_path / "out"), pytest.raises(ValueError, match="is in use by another call"):
        with at_work(tmp_path / "out"):
            pass


# --- lanes ------------------------------------------------------------------------------------------------------------


def test_a_lane_starts_when_another_has_ended_and_no_earlier(tmp_path):
    def step(name, seconds):
        return Step(name, ["bash", "-c", f"echo {name} >>order; sleep {seconds}"], tmp_path / name, {"HOME": "/"})

    steps = {name: [step(name, seconds)] for name, seconds in (("a", 0.6), ("b", 0.1), ("c", 0.1))}
    for lane in steps.values():
        lane[0].command = [*lane[0].command[:2], lane[0].command[2].replace("order", str(tmp_path / "order"))]
    times = run_lanes(steps, [{}] * 2)
    assert (tmp_path / "order").read_text().split()[2] == "c" and times["a"] >= 0.6 > times["b"]


def test_no_two_lanes_at_a_time_have_the_same_place(tmp_path):
    lanes_of = {
        name: [Step(name, ["bash", "-c", f"echo {name}$GPU >>{tmp_path}/order; sleep 0.2"], tmp_path / name)]
        for name in "abc"
    }
    run_lanes(lanes_of, [{"GPU": "0"}, {"GPU": "1"}])
    seen = (tmp_path / "order").read_text().split()
    assert set(seen[:2]) == {"a0", "b1"} and seen[2] in ("c0", "c1")


def test_a_failure_shows_only_the_last_state_of_a_progress_bar(tmp_path):
    step = Step("it", ["bash", "-c", r"printf '10%%\r50%%\r90%%\n'; exit 4"], tmp_path / "log")
    with pytest.raises(StepError, match=re.escape("| 90%\n")) as raised:
        run_lanes({"it": [step]}, [{}])
    assert "10%" not in str(raised.value).split("exit 4'")[1]


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


# --- the script -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "extras"), [({}, "playground"), ({"REPORT_TO": "tensorboard"}, "playground,train")]
)
def test_the_script_hands_its_flags_over_and_installs_what_it_needs(tmp_path, variables, extras):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "EXTRAS=$EXTRAS $@"\n')
    python.chmod(0o755)
    run = bash("scripts/quickstart.sh", "--arms", "none", LLAVA_PYTHON=python, **variables)
    assert f"EXTRAS={extras} " in run.stdout and run.stdout.endswith("-m llava.compare quickstart --arms none\n")


def test_the_command_line_starts_without_loading_models_or_figures():
    code = "import sys; from llava.compare import __main__, answers, quickstart, report, run\n"
    code += "print({'torch', 'transformers', 'matplotlib'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
