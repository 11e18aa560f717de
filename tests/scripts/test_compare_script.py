"""`python -m llava.compare run`: its steps in order, what a second call leaves out, what is refused."""

import argparse
import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
from paths import ROOT
from shell import kill, new_lines, only
from warm_python import warm_python

from llava.compare.__main__ import main
from llava.compare.arms import Arm, parse_arm
from llava.compare.run import add_arguments

# A stand-in for Python that writes down what it is asked and leaves the files of a training.
PYTHON = r"""#!/usr/bin/env bash
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
  *llava.analysis*)
    words=$(grep -oP -- '--commands \K\S+' <<<"$*")
    echo "analyze $words $(grep -o '=/' <<<"$*" | wc -l)" >>"$CALLS"
    [ "analyze $words" != "$HANGS" ] || {
      trap 'echo saved >>"$CALLS"; exit 143' TERM
      while :; do sleep 0.1; done
    } ;;
  *"llava.compare present"*) ;;
  *llava.compare*) echo "$3 ${*: -1}" >>"$CALLS"; [ "$3" != "$FAILING" ] || exit 2 ;;
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
        python = sys.executable if start else warm_python()  # what is killed is a process of its own
        words = [python, "-m", "llava.compare", "run", "--output-dir", str(out), *flags]
        variables = only(**env | {"HOME": tmp_path} | extra)
        if not start:
            return subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
        # Where tests run in the background Ctrl-C may be ignored, which children inherit.
        listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        options = {"stdout": subprocess.DEVNULL, "start_new_session": True, "preexec_fn": listens}
        return subprocess.Popen(words, cwd=ROOT, env=variables, **options)

    return run, new_lines(calls)


@pytest.mark.slow
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
    assert again[-1] == "report 7"  # evaluation is called again: it finds out by itself what is finished


@pytest.mark.slow
def test_runs_that_differ_stop_the_comparison_before_more_is_trained(compare):
    run, seen = compare
    assert run("--arms", "none,layernorm", FAILING="check").returncode == 2
    assert seen() == ["train none 42 seed-42/none/pretrain", "check pretrain"]


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_killed_while_training_it_goes_on_where_it_was(compare, sent):
    run, seen = compare
    process = run("--arms", "none,layernorm", start=True, HANGS="layernorm text_norm 42")
    lines = []
    for _ in range(900):
        time.sleep(0.1)
        lines += seen()
        if any("layernorm" in line for line in lines):
            break
    assert lines[-1] == "train layernorm text_norm 42 seed-42/layernorm/pretrain"
    family = psutil.Process(process.pid).children(recursive=True)
    if sent is signal.SIGINT:
        os.killpg(process.pid, sent)  # Ctrl-C reaches the terminal's group
    else:
        process.send_signal(sent)
    process.wait(timeout=60)
    if sent is signal.SIGKILL:  # the training outlived the script and still writes into the folder
        locked = run("--arms", "none,layernorm", LOCK_SECONDS=1)
        assert locked.returncode == 2 and "waiting up to 1 s for its end" in locked.stderr and not seen()
        assert locked.stderr.endswith("in use by another call or by a training that it left; wait for its end\n")
        kill(family)
    done = run("--arms", "none,layernorm", LOCK_SECONDS=5)
    assert done.returncode == 0, done.stdout + done.stderr
    trained = [line for line in seen() if line.startswith("train")]
    assert trained == [f"train layernorm text_norm 42 seed-42/layernorm/{stage}" for stage in ("pretrain", "finetune")]


def test_terminated_while_measuring_it_lets_the_measurement_save(compare):
    run, seen = compare
    process = run("--arms", "none,layernorm", start=True, HANGS="analyze theory")
    lines = []
    for _ in range(900):
        time.sleep(0.1)
        lines += seen()
        if "analyze theory 2" in lines:
            break
    process.terminate()
    assert process.wait(timeout=60) == 143 and seen() == ["saved"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--preset", "no"], "--preset: invalid choice: 'no'"),
        (["--seeds", "two"], "--seeds two"),
        (["--seeds", "0"], "--seeds 0"),
        (["--seeds", "1,1"], "seed twice"),
        (["--arms", "none,batchnorm"], "'batchnorm' is not one of: none, layernorm"),
        (["--arms", "none,layernorm@0x"], "--mm_projector_norm_init"),
        (["--arms", "none,layernorm_default,layernorm@default"], "arm twice"),
        (["--arms", "layernorm,none"], "baseline"),
        (["--arms", "none,none"], "arm twice"),
        (["--arms", "none,none@default"], "none@default"),
        (["--arms", "none,none-fixed"], "none-fixed"),
        (["--arms"], "--arms: expected one argument"),
        (["--epochs", "3"], "--epochs"),
    ],
)
def test_wrong_arguments_are_refused_by_name_before_anything_runs(tmp_path, capsys, flags, named):
    try:
        status = main(["run", "--output-dir", str(tmp_path / "out"), *flags])
    except SystemExit as error:
        status = error.code
    assert status == 2 and named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_arm_is_a_norm_and_its_initial_norm():
    assert parse_arm("none") == Arm("none", "")
    assert parse_arm("gwc_layernorm") == Arm("gwc_layernorm", "text_norm")
    assert parse_arm("rmsnorm@0.25x") == Arm("rmsnorm", "0.25x")
    assert parse_arm("layernorm_default") == parse_arm("layernorm@default") == Arm("layernorm", "default")
    assert parse_arm("scale-fixed") == Arm("scale", "text_norm", learnable=False)
    assert parse_arm("scale@4x-fixed") == Arm("scale", "4x", learnable=False)


def test_the_script_takes_every_option_of_the_command():
    """It refuses what its head does not list, before an environment is made."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    head = (ROOT / "scripts/compare.sh").read_text()
    for action in parser._actions:
        assert f"\n#   {action.option_strings[0]} " in head
