"""Runs the launcher: passes signals on to the ranks, and shows the first error at the end.

The launcher gets a process group of its own, so that a signal reaches it only through this process. Launchers pass
SIGTERM and SIGINT on, but kill what still saves 30 seconds later (`torchrun`, `deepspeed`). The ranks themselves get
SIGUSR1 instead, which the launcher ignores: they are the processes that it has started and that handle this signal.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from llava.utils.failures import FOLDER, REQUEUE_EXIT_CODE, is_of_lost_peer, sorted_reports
from llava.utils.processes import descendants, handles, kill, send, send_group, wait
from llava.utils.provenance import COMPLETE

INTERRUPTED = 128 + signal.SIGINT
REQUEUE_DIR = "LLAVA_REQUEUE_DIR"  # set by scripts/slurm/job.sh, which looks there for `saved` or `unsaved`
SAME_SIGNAL = 0.5  # seconds within which a signal to all processes of a job has reached this one too
LONGEST_BUILD = 300.0  # seconds; building an op of DeepSpeed's takes one or two minutes


def supervise(
    command: Sequence[str], environment: Mapping[str, str], output_dir: Path, *, first_node: bool, alone: bool
) -> int:
    """Runs the launcher's command to its end; returns the code to exit with. The first node removes older reports."""
    if first_node:
        shutil.rmtree(output_dir / FOLDER, ignore_errors=True)
    release_left()
    return Supervisor(output_dir, alone).run(command, environment)


class Supervisor:
    """One launcher with its ranks on this node, whose reports and checkpoints are below `output_dir`.

    `alone`: the launcher is itself the only rank.
    """

    def __init__(self, output_dir: Path, alone: bool):
        self.output_dir, self.alone = output_dir, alone
        self.launcher: subprocess.Popen | None = None
        self.interrupted = self.ended = False
        self.early = False  # a signal ended the launcher before its ranks could handle one
        self.began = time.time()

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Starts the launcher and waits for it; returns its exit code, or 85 where a signal ended the run.

        With 85 the run is to be started again later, and then continues.
        """
        handled = [signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # what runs in the background must not hear Ctrl-C
            handled.append(signal.SIGINT)
        before = {number: signal.signal(number, self._stop) for number in handled}
        try:
            # The launcher inherits this process's open files: a comparison's lock lives as long as the training.
            self.launcher = subprocess.Popen(command, env=dict(environment), preexec_fn=_own_group, close_fds=False)
            code = wait(self.launcher)
            if code not in (0, REQUEUE_EXIT_CODE) and not (self.early or self.ended):
                time.sleep(SAME_SIGNAL)  # a queue's SIGTERM may have ended the launcher first
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.ended:
            return INTERRUPTED
        if code not in (0, REQUEUE_EXIT_CODE) and not self.early:
            self._show_first_error(code)
            return code if code >= 0 else 128 - code
        saved = self._has_written(f"checkpoint-*/{COMPLETE}")
        if self._has_written(COMPLETE) or not (saved or code or self.early):
            return 0
        if not (folder := environment.get(REQUEUE_DIR)):
            return REQUEUE_EXIT_CODE
        Path(folder, "saved" if saved else "unsaved").touch()  # the job's script asks for another start
        return 0

    def _has_written(self, pattern: str) -> bool:
        return any(file.stat().st_mtime >= self.began for file in self.output_dir.glob(pattern))

    def _stop(self, number: int, frame: object) -> None:
        """Lets the ranks save and stop; a second Ctrl-C ends everything at once."""
        if self.launcher is None:
            raise KeyboardInterrupt
        started = {self.launcher.pid, *descendants(self.launcher.pid)}
        ranks = [pid for pid in started if handles(pid, signal.SIGUSR1)]
        if number == signal.SIGINT and self.interrupted:
            self.ended = True
            kill(self.launcher.pid)
            _say("ended at once: what came after the last checkpoint is lost")
            return
        self.interrupted = self.interrupted or number == signal.SIGINT
        name = signal.Signals(number).name
        again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
        if [rank for rank in ranks if send(rank, signal.SIGUSR1)]:
            _say(f"{name} received: the ranks save after the current step and stop{again}")
        else:  # nothing is trained yet, or the run has ended and only its launcher is still closing
            self.early = True
            _say(f"{name}: no rank here trains: stopped before training, or after it; rerun the command{again}")
            if self.launcher.returncode is None:
                send_group(self.launcher.pid, signal.SIGTERM)

    def _show_first_error(self, code: int) -> None:
        reports = sorted_reports(self.output_dir)
        if not reports or is_of_lost_peer(reports[0]):
            if not self.alone or code == -signal.SIGKILL:
                cause = "if no line above names an error, it was killed, by hand or because memory ran out"
                _say(f"a rank ended without a message: {cause}")
            elif code < 0:
                _say(f"a rank ended without a message: it was ended by {signal.Signals(-code).name}")
        if len(reports) > self.alone:  # what the only rank says is the last that is printed anyway
            message = reports[0].read_text().partition("\n\n")[0]
            _say(f"the first of {len(reports)} errors in {self.output_dir / FOLDER}:\n{message}\nmore in {reports[0]}")


def release_left() -> None:
    """Removes the locks that killed builds of C++ ops have left, and names those that may be somebody's.

    PyTorch (2.13, `torch.utils.file_baton`) makes a file `lock` in an op's folder and removes it after the build. A
    build that was killed leaves it, and every later run would wait for it without end or message.
    """
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions").expanduser()
    for lock in sorted(folder.glob("**/lock")):
        with contextlib.suppress(FileNotFoundError):  # the build has just ended
            if time.time() - lock.stat().st_mtime > LONGEST_BUILD:
                lock.unlink()
                print(f"note: removed {lock}, which a build that was killed had left", flush=True)
            else:
                remedy = "if no other run is building it, remove the file, or this run will wait for it"
                print(f"note: {lock} says that an op is being built; {remedy}", flush=True)


def _own_group() -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _say(text: str) -> None:
    """To standard error, unbuffered: a signal may come while another one's words are being written."""
    os.write(sys.stderr.fileno(), f"{text}\n".encode())
