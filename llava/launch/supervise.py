"""Runs the launcher: passes signals on to the ranks, and shows the first error at the end.

The launcher gets a process group of its own, so that a signal reaches it only through this process: launchers end all
ranks on SIGTERM and SIGINT and die of SIGUSR1, while the ranks themselves save first.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from llava.utils.failures import (
    ENDED,
    FOLDER,
    HOST,
    RECEIVED,
    REQUEST,
    REQUEUE_EXIT_CODE,
    RUN_DIR,
    UNSAVED,
    is_of_lost_peer,
    sorted_reports,
)
from llava.utils.processes import is_running, kill, send, send_group, wait

INTERRUPTED = 128 + signal.SIGINT
REQUEUE_DIR = "LLAVA_REQUEUE_DIR"  # set by scripts/slurm/job.sh, which looks there for `saved` or `unsaved`
LONGEST_BUILD = 300.0  # seconds; building an op of DeepSpeed's takes one or two minutes


def supervise(
    command: Sequence[str], environment: Mapping[str, str], output_dir: Path, *, first_node: bool, alone: bool
) -> int:
    """Runs the launcher's command to its end; returns the code to exit with. The first node removes older reports."""
    if first_node:
        shutil.rmtree(output_dir / FOLDER, ignore_errors=True)
    release_left()
    with tempfile.TemporaryDirectory(prefix="llava-run-") as folder:  # which nobody else can read
        return Supervisor(output_dir, Path(folder), alone).run(command, environment)


class Supervisor:
    """One launcher with its ranks on this node; `alone`: the launcher is itself the only rank.

    The ranks' reports are below `output_dir`; in `run_dir` they leave their process ids, and ask for another start.
    """

    def __init__(self, output_dir: Path, run_dir: Path, alone: bool):
        self.output_dir, self.run_dir, self.alone = output_dir, run_dir, alone
        self.launcher: subprocess.Popen | None = None
        self.interrupted = self.ended = False
        self.gone: list[Path] = []  # process-id files of ranks that are gone, in the order in which they went

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Starts the launcher and waits for it; returns its exit code, or 85 where a signal ended the run.

        With 85 the run is to be started again later, and then continues.
        """
        handled = [signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # what runs in the background must not hear Ctrl-C
            handled.append(signal.SIGINT)
        before = {number: signal.signal(number, self._stop) for number in handled}
        try:
            env = {**environment, RUN_DIR: str(self.run_dir)}
            (self.run_dir / HOST).write_text(socket.gethostname())
            # The launcher inherits this process's open files: a comparison's lock lives as long as the training.
            self.launcher = subprocess.Popen(command, env=env, preexec_fn=_own_group, close_fds=False)
            code = wait(self.launcher, self._note_gone)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.ended:
            return INTERRUPTED
        if (request := self.run_dir / REQUEST).exists():
            if not (folder := environment.get(REQUEUE_DIR)):
                return REQUEUE_EXIT_CODE
            Path(folder, request.read_text()).touch()  # the job's script asks for another start
            return 0
        if code:
            self._show_first_error(code)
        return code if code >= 0 else 128 - code

    def _note_gone(self) -> None:
        for file in sorted(self.run_dir.glob("*.pid")):
            pid = _process_id(file)
            if pid and file not in self.gone and not is_running(pid):
                self.gone.append(file)

    def _stop(self, number: int, frame: object) -> None:
        """Lets the ranks save and stop; a second Ctrl-C ends everything at once."""
        if self.launcher is None:
            raise KeyboardInterrupt
        ranks = [_process_id(file) for file in self.run_dir.glob("*.pid")]
        if number == signal.SIGINT and self.interrupted:
            self.ended = True
            kill(self.launcher.pid, ranks)
            _say("ended at once: what came after the last checkpoint is lost")
            return
        self.interrupted = self.interrupted or number == signal.SIGINT
        name = signal.Signals(number).name
        (self.run_dir / RECEIVED).write_text(name)
        again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
        if [rank for rank in ranks if send(rank, signal.SIGUSR1)]:
            _say(f"{name} received: the ranks save after the current step and stop{again}")
        elif (self.run_dir / ENDED).exists():
            _say(f"{name}: the run has already ended, only its launcher is still closing{again}")
        else:  # nothing is trained yet
            (self.run_dir / REQUEST).write_text(UNSAVED)
            _say(f"{name}: no rank here trains: stopped before training, nothing is saved; rerun the command{again}")
            send_group(self.launcher.pid, signal.SIGTERM)

    def _show_first_error(self, code: int) -> None:
        reports = sorted_reports(self.output_dir)
        if not reports or is_of_lost_peer(reports[0]):
            self._note_gone()
            reported = {report.stem.rsplit("-", 1)[1] for report in reports}
            silent = [file for file in self.gone if f"rank{file.stem}" not in reported]
            if silent and (not self.alone or code < 0):  # only its launcher knows how a rank of several ended
                killed = not self.alone or code == -signal.SIGKILL
                cause = "it was killed, by hand or because memory ran out"
                if not killed:
                    cause = f"it was ended by {signal.Signals(-code).name}"
                where = f"rank {silent[0].stem} on {socket.gethostname()}, process {_process_id(silent[0])}"
                _say(f"{where}, ended without a message: {cause}")
                return
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


def _process_id(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # it is just being written or removed
        return 0


def _say(text: str) -> None:
    """To standard error, unbuffered: a signal may come while another one's words are being written."""
    os.write(sys.stderr.fileno(), f"{text}\n".encode())
