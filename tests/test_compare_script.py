"""`scripts/compare.sh`: its steps in order, what a second call leaves out, what is refused."""

import os
import signal
import subprocess
import time
from functools import partial

import psutil
import pytest
from test_scripts import ROOT, bash

from llava.compare.stage import train_stage
from llava.launch.settings import Refusal

# A stand-in for Python that writes down what it is asked and leaves the files of a training.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *train_mem.py*)
    while [ "$1" != --output_dir ]; do
      case "$1" in --mm_projector_norm | --mm_projector_norm_init | --seed) words+="$2 " ;; esac
      shift
    done
    echo "train $words${2#$OUT/}" >>"$CALLS"
    [ "$words" != "$HANGS " ] || exec sleep 60
    mkdir -p "$2" && touch "$2"/{model.safetensors,mm_projector.bin}
    echo '{"model_type": "llava_llama"}' >"$2/config.json" ;;
  *llava.eval.evaluate*) echo "evaluate ${3#$OUT/}" >>"$CALLS" ;;
  *llava.analysis*) echo "analyze $3 $(grep -o 'model' <<<"$*" | wc -l)" >>"$CALLS" ;;
  *"llava.eval.compare present"*) ;;
  *llava.eval.compare*) echo "$3 ${*: -1}" >>"$CALLS"; [ "$3" != "$FAILING" ] || exit 2 ;;
  *playground*) echo "prepare $3" >>"$CALLS" ;;
esac
"""


@pytest.fixture
def compare(tmp_path):
    """A function that runs the script, or with `start` starts it, and one that returns and clears the calls."""
    python, calls, out = tmp_path / "python", tmp_path / "calls", tmp_path / "out"
    python.write_text(PYTHON)
    python.chmod(0o755)
    data = tmp_path / "data.json"
    data.touch()
    env = {
        "LLAVA_PYTHON": python,
        "CALLS": calls,
        "OUT": out,
        "DATA_PATH": data,
        "IMAGE_FOLDER": tmp_path,
        "DATA": data,
    }
    env |= {
        "MODEL_PATH": tmp_path,
        "VISION_TOWER": tmp_path,
        "NUM_GPUS": 1,
        "DEEPSPEED_CONFIG": "",
        "LAUNCHER": "python",
    }
    env |= {"WATCH_SECONDS": "0.1", "ANALYSIS": "theory", "BF16": "False"}

    def run(*flags, start=False, **extra):
        words = ["scripts/compare.sh", "--output-dir", str(out), *flags]
        if not start:
            return bash(*words, **env, **extra)
        variables = {k: str(v) for k, v in (env | extra).items()} | {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        # Where tests run in the background Ctrl-C may be ignored, which children inherit.
        listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        options = {"stdout": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": listens}
        return subprocess.Popen(["bash", *words], cwd=ROOT, env=variables, **options)

    def seen():
        lines = calls.read_text().splitlines() if calls.exists() else []
        calls.write_text("")
        return lines

    return run, seen


def test_every_step_in_order_and_a_second_call_trains_and_measures_nothing_again(compare):
    run, seen = compare
    done = run("--arms", "none,layernorm_default", "--seeds", "7,", "--tasks", "pope")
    assert done.returncode == 0, done.stdout + done.stderr
    assert seen() == [
        "train none 7 seed-7/none/pretrain",
        "check pretrain",
        "train none 7 seed-7/none/finetune",
        "check finetune",
        "evaluate seed-7/none/finetune",
        "train layernorm default 7 seed-7/layernorm_default/pretrain",
        "check pretrain",
        "train layernorm default 7 seed-7/layernorm_default/finetune",
        "check finetune",
        "evaluate seed-7/layernorm_default/finetune",
        "analyze theory 2",
        "report 7",
    ]
    assert run("--arms", "none,layernorm_default", "--seeds", "7,", "--tasks", "pope").returncode == 0
    again = seen()
    assert not [line for line in again if line.startswith(("train", "analyze"))]
    assert again[-1] == "report 7"  # evaluation is asked again: it finds itself what is finished


def test_runs_that_differ_stop_the_comparison_before_more_is_trained(compare):
    run, seen = compare
    assert run("--arms", "none,layernorm", FAILING="check").returncode == 2
    assert seen() == ["train none 42 seed-42/none/pretrain", "check pretrain"]


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_killed_while_training_it_goes_on_where_it_was(compare, sent):
    run, seen = compare
    process = run("--arms", "none,layernorm", start=True, HANGS="layernorm 42")
    lines = []
    for _ in range(200):
        time.sleep(0.1)
        lines += seen()
        if any("layernorm" in line for line in lines):
            break
    assert lines[-1] == "train layernorm 42 seed-42/layernorm/pretrain"
    family = psutil.Process(process.pid).children(recursive=True)
    if sent is signal.SIGINT:
        os.killpg(
            process.pid, sent
        )  # Ctrl-C reaches the group, in which bash lets what runs in the background ignore it
    else:
        process.send_signal(sent)
    process.wait(timeout=20)
    if sent is signal.SIGKILL:  # the training outlived the script and still writes into the folder
        locked = run("--arms", "none,layernorm", LOCK_SECONDS=1)
        assert locked.returncode == 2 and "in use" in locked.stderr and not seen()
        for survivor in psutil.wait_procs(family, timeout=0)[1]:
            survivor.kill()
    done = run("--arms", "none,layernorm", LOCK_SECONDS=5)
    assert done.returncode == 0, done.stdout + done.stderr
    trained = [line for line in seen() if line.startswith("train")]
    assert trained == [f"train layernorm 42 seed-42/layernorm/{stage}" for stage in ("pretrain", "finetune")]


def test_a_stage_shows_its_newest_step_and_a_failed_one_the_end_of_its_log(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("llava.compare.stage.ROOT", tmp_path)
    (tmp_path / "scripts").mkdir()
    folder, log = tmp_path / "out", tmp_path / "log"
    step = '{"step": 7, "loss": 1.25, "samples_per_second": 3.5}'
    script = f"mkdir -p $OUTPUT_DIR; echo '{step}' >>$OUTPUT_DIR/train_log.jsonl; touch $OUTPUT_DIR/model.safetensors\n"
    (tmp_path / "scripts/pretrain.sh").write_text(script + 'echo "$WORD"; exit "$CODE"\n')
    with pytest.raises(Refusal, match=f"pretrain failed, see {log}"):
        train_stage("pretrain", folder, log, {"CODE": "3", "WORD": "why"}, seconds=0.1)
    out, err = capfd.readouterr()
    assert "step    7  loss 1.250   3.5 samples/s" in out and "why" in err and not (folder / "done").exists()
    train_stage("pretrain", folder, log, {"CODE": "0", "WORD": ""}, seconds=0.1)
    assert (folder / "done").exists() and "skipped" not in capfd.readouterr().out
    train_stage("pretrain", folder, log, {"CODE": "1", "WORD": ""})
    assert "complete, skipped" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--preset", "no"], "PRESET=no"),
        (["--seeds", "two"], "--seeds two"),
        (["--seeds", "0"], "--seeds=0"),
        (["--seeds", "1,1"], "seed twice"),
        (["--arms", "none,batchnorm"], "NORM=batchnorm"),
        (["--arms", "layernorm,none"], "baseline"),
        (["--arms", "none,none"], "arm twice"),
        (["--arms", "none,none_default"], "none_default"),
        (["--arms"], "--arms"),
        (["--epochs", "3"], "--epochs"),
    ],
)
def test_wrong_arguments_are_refused_by_name_before_anything_runs(compare, flags, named):
    run, seen = compare
    done = run(*flags)
    assert done.returncode == 2 and named in done.stderr
    assert not seen()
