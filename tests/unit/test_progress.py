"""Progress: a bar in a terminal, elsewhere a line every half minute and never a carriage return."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest
from paths import ROOT
from training import build, flags
from transformers import ProgressCallback

from llava.train import telemetry
from llava.utils.progress import progress


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("tqdm.std.time", clock)
    return clock


def test_a_line_comes_every_thirty_seconds_and_at_the_end(clock, capsys):
    with progress(70, "reading", "files") as bar:
        for _ in range(70):
            clock.now += 1
            bar.update()
    assert capsys.readouterr().err.splitlines() == [
        "reading: 30/70 files [00:30<00:40,  1.00files/s]",
        "reading: 60/70 files [01:00<00:10,  1.00files/s]",
        "reading: 70/70 files [01:10<00:00,  1.00files/s]",
    ]


def test_what_was_done_before_counts_as_done_and_not_as_pace(clock, capsys):
    bar = progress(100, "going on", "steps", done=50)
    bar.set_postfix_str("loss 2.5", refresh=False)
    clock.now += 40
    bar.update(10)
    bar.close()
    bar.close()
    lines = ["going on: 60/100 steps [00:40<02:40,  4.00s/steps, loss 2.5]"] * 2
    assert capsys.readouterr().err.splitlines() == lines


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
from llava.train.telemetry import TrainingProgress
callback, state = TrainingProgress(), SimpleNamespace(max_steps=2, global_step=0, is_world_process_zero=True)
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
    figures = "loss 2.5, learning rate 0.008, samples/s 12, visual norm 3, text norm 1.5"
    assert (first, second) == (f"step 1: {figures}", f"step 2: {figures}")
    assert bar.startswith("training: 100%") and "2/2 steps" in bar and rest == [""]


def test_no_trainer_keeps_the_librarys_bar_which_prints_every_figure(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    _, trainer = build(flags(tiny, tmp_path, 1, disable_tqdm=False))
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert telemetry.TrainingProgress in kinds and ProgressCallback not in kinds
