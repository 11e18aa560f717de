"""Progress: a bar in a terminal, elsewhere a line every half minute and never a carriage return."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from functools import partial
from types import SimpleNamespace

import pytest
from paths import ROOT
from training import build, flags
from transformers import ProgressCallback

from llava.train import training_progress
from llava.utils.progress import EVERY, FIRST, Progress, duration, progress

SOURCES = [
    path
    for folder in ("llava", "playground", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if "playground/data" not in path.as_posix() and path != ROOT / "llava/utils/progress.py"
]


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_else_in_the_tree_draws_bars():
    assert [str(path) for path in SOURCES if re.search(r"\btqdm\s*(\(|\.write)|import tqdm", path.read_text())] == []


def test_lines_come_after_five_seconds_and_then_every_thirty(capsys):
    clock = Clock()
    with Progress(100, "reading", "files", clock=clock) as bar:
        for _ in range(100):
            clock.now += 1
            bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert (FIRST, EVERY) == (5.0, 30.0)
    assert lines == [
        "reading: 5 of 100 files, 1/s, 1:35 left",
        "reading: 35 of 100 files, 1/s, 1:05 left",
        "reading: 65 of 100 files, 1/s, 0:35 left",
        "reading: 95 of 100 files, 1/s, 0:05 left",
        "reading: 100 of 100 files, 1:40 total",
    ]


def test_a_short_job_says_nothing_and_a_hidden_one_neither(capsys):
    assert list(progress(["a", "b"], "reading")) == ["a", "b"]
    clock = Clock()
    with Progress(2, "reading", hidden=True, clock=clock) as bar:
        clock.now += 100
        bar.update()
    assert capsys.readouterr() == ("", "")


def test_what_was_done_before_counts_as_done_and_not_as_pace(capsys):
    clock = Clock()
    bar = Progress(100, "going on", "steps", done=50, clock=clock)
    bar.note("loss 2.5")
    clock.now += 10
    bar.update(10)
    clock.now += 1
    bar.close()
    bar.close()
    assert capsys.readouterr().err.splitlines() == [
        "going on: 60 of 100 steps, loss 2.5, 0:40 left",
        "going on: 60 of 100 steps, loss 2.5, 0:44 left",
    ]


def test_evaluation_time_counts_neither_for_the_rate_nor_the_time_left(capsys, monkeypatch):
    clock, paused = Clock(), [3.0]
    monkeypatch.setattr(training_progress, "Progress", partial(Progress, clock=clock))
    callback = training_progress.TrainingProgress(8, lambda: paused[0])
    state = SimpleNamespace(max_steps=4, global_step=0, is_world_process_zero=True)
    callback.on_train_begin(None, state, None)
    for state.global_step in (1, 2):
        clock.now += 10
        callback.on_step_end(None, state, None)
        clock.now += 40  # an evaluation
        paused[0] += 40
    state.global_step = 4
    clock.now += 20
    callback.on_step_end(None, state, None)
    assert capsys.readouterr().err.splitlines() == [
        "training: 1 of 4 steps, 0.8 samples/s, 0:30 left",
        "training: 2 of 4 steps, 0.8 samples/s, 0:20 left",
        "training: 4 of 4 steps, 0.8 samples/s, 2:00 total",
    ]


def test_an_iterator_that_is_left_early_is_closed(capsys):
    clock = Clock()
    for item in Progress(iter("abc"), "letters", total=3, clock=clock):
        clock.now += 60
        if item == "b":
            break
    assert capsys.readouterr().err.splitlines()[0] == "letters: 1 of 3, 0.0167/s, 2:00 left"


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "0:07"), (750, "12:30"), (11100, "3:05:00")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_in_a_terminal_it_is_a_bar():
    code = "from llava.utils.progress import progress\nfor _ in progress(range(3), 'reading', 'files'): pass"
    shown = in_terminal(code)
    assert "\r" in shown and "3/3 files" in shown


def in_terminal(code: str) -> str:
    """What a program writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))  # one without a size shows nothing
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, stdout=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while piece := _read(ours):
        shown += piece
    assert process.wait() == 0, shown
    return shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 10000)
    except OSError:  # how Linux reports its end
        return b""


def test_in_a_terminal_a_logged_step_is_one_line_above_the_bar():
    code = """
from types import SimpleNamespace
from llava.train.training_progress import TrainingProgress
callback, state = TrainingProgress(8), SimpleNamespace(max_steps=2, global_step=0, is_world_process_zero=True)
callback.on_train_begin(None, state, None)
for state.global_step in (1, 2):
    logs = {"loss": 2.5, "learning_rate": 8e-3, "norm/llm_input": 3.0, "norm/text_embeddings": 1.5, "grad_norm": 7.0}
    callback.on_step_end(None, state, None)
    logs |= {f"norm/x{i}": i for i in range(15)} | {"samples_per_second": 12.0}
    callback.on_log(None, state, None, logs=logs)
callback.on_log(None, state, None, logs={"train_runtime": 3.0})
callback.on_train_end(None, state, None)
"""
    lines = [line.rstrip("\r").rpartition("\r")[2].strip() for line in in_terminal(code).split("\n")]  # as last redrawn
    first, second, bar, *rest = lines
    figures = "loss 2.5, learning rate 0.008, visual over text norm 2, samples/s 12"
    assert (first, second) == (f"step 1: {figures}", f"step 2: {figures}")
    assert bar.startswith("training: 100%") and "2/2 steps" in bar and rest == [""]


def test_no_trainer_keeps_the_librarys_bar_which_prints_every_figure(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    _, trainer = build(flags(tiny, tmp_path, 1, disable_tqdm=False))
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert training_progress.TrainingProgress in kinds and ProgressCallback not in kinds


@pytest.mark.slow
def test_a_runs_log_holds_no_carriage_return_and_says_how_far_it_is(tiny, tmp_path):
    """The first step of a real run, with its clock of progress advanced."""
    code = "import llava.utils.progress; llava.utils.progress.FIRST = 0.0; from llava.train.train import main; main()"
    argv = flags(tiny, tmp_path / "run", 2, disable_tqdm=None, save_strategy="steps", save_steps=1)
    argv += ["--eval_data_path", str(tiny / "data/finetune.json"), "--eval_strategy", "steps", "--eval_steps", "1"]
    with (tmp_path / "log").open("w") as log:
        environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_DISABLE_PROGRESS_BARS"}
        command = [sys.executable, "-c", code, *argv]
        run = subprocess.run(command, stdout=log, stderr=log, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)})
    text = (tmp_path / "log").read_text()
    assert run.returncode == 0, text
    assert "\r" not in text and "%|" not in text
    assert re.search(r"^training: 1 of 2 steps, [\d.]+ samples/s, 0:\d\d left$", text, re.MULTILINE)
    assert re.search(r"^training: 2 of 2 steps, loss [\d.]+, [\d.]+ samples/s, 0:\d\d total$", text, re.MULTILINE)
    assert re.search(r"^step 1: eval/loss [\d.]+, eval/loss_image [\d.]+, ", text, re.MULTILINE)
    assert re.search(r"^evaluating: 1 of \d+ micro-batches", text, re.MULTILINE)
