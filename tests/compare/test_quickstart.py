"""The quickstart: what runs beside what, what a second call leaves out, and what is refused."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from comparison_runs import Caller
from paths import ROOT
from PIL import Image
from study_stub import KINDS

from llava.compare import quickstart, steps
from llava.compare.__main__ import main
from llava.compare.steps import Step, StepError, run_lanes
from llava.launch import devices
from llava.launch.settings import NAMES

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
    assert "gwc_layernorm minus none" in (call.out / "index.html").read_text()
    before = json.loads((call.out / "record.json").read_text())["times"]

    again = call()
    assert again.returncode == 0 and not [line for line in call.seen() if line.startswith("train")]
    assert again.stdout.count("is complete, skipped") == 4  # answers and the measurement are no stages
    assert json.loads((call.out / "record.json").read_text())["times"]["none, pretrain"] == before["none, pretrain"]
    refused = call(SEED=7)
    assert refused.returncode == 2 and not [line for line in call.seen() if line.startswith("train")]
    assert f"{call.out}/none/pretrain was trained with different flags" in refused.stderr.splitlines()[0]
    assert "choose another --output-dir" in refused.stderr


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


def test_the_command_line_starts_without_loading_models_or_figures():
    code = "import sys; from llava.compare import __main__, answers, quickstart, report, run\n"
    code += "print({'torch', 'transformers', 'matplotlib'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
