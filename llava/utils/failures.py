"""Which rank failed first: every rank leaves its error, or where it hangs, in `errors/` of the output folder.

A report holds one line on the rank, the message and the traceback. One failing rank makes the others fail too, later
and with messages about lost connections. The reports' names sort by how far a rank had come, then by time, so that the
first one is the cause; `llava.launch` shows its beginning at the end.
"""

import os
import re
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from llava.utils.commands import REFUSALS

FOLDER = "errors"
HANG_EXIT_CODE = 86
REQUEUE_EXIT_CODE = 85  # start the run again; neither a shell's own code nor one that a signal gives
# In the order in which ranks pass them, at the same number of finished steps.
PHASES = ("starting", "evaluating", "saving", "reading data", "computing")
# Messages of a rank whose peer is gone; at the same progress its report sorts after the peer's own error.
_LOST_PEER = re.compile("connection (closed|reset)|timed out waiting|socket|broken pipe|NCCL|peer", re.IGNORECASE)


class Watchdog:
    """Ends this process when a step makes no progress for too long; the time for which it is stopped does not count.

    Args:
        output_dir: reports go to `errors/` below it; None writes no reports.
        rank: this process's rank.
        timeout: seconds without progress, `--hang_timeout`; 0 never ends anything.
    """

    def __init__(self, output_dir: str | None, rank: int, timeout: float = 0.0):
        self.folder = Path(output_dir, FOLDER) if output_dir else None
        self.rank, self.timeout = rank, timeout
        self.step, self.phase, self.entered = 0, 0, 0
        self.reported = False
        self._stop = threading.Event()

    def start(self) -> None:
        """Begins to watch; only training is watched, not the loading before it."""
        if self.timeout > 0:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def stop(self) -> None:
        self._stop.set()

    def enter(self, phase: str, step: int) -> None:
        """Notes that the rank has reached `phase` after `step` finished steps."""
        self.step, self.phase, self.entered = step, PHASES.index(phase), self.entered + 1

    def report(self, message: str, details: str = "", lost_peer: bool = False) -> None:
        """Writes a file whose name sorts by progress, where the folder can be written."""
        if self.folder is None:
            return
        where = f"{PHASES[self.phase]} after {self.step} finished steps"
        header = f"rank {self.rank} on {socket.gethostname()}, process {os.getpid()}, {where}"
        name = f"{self.step:08d}-{self.phase}-{int(lost_peer)}-{time.time_ns()}-rank{self.rank}.txt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(f"{header}\n{message}\n\n{details}")
            self.reported = True
        except OSError as error:  # the error to be reported may be that this folder cannot be written
            print(f"rank {self.rank}: its error is not in {self.folder}: {error}", file=sys.stderr, flush=True)

    def report_exception(self, error: BaseException) -> None:
        """Reports an error that ends this rank."""
        message = refusal(error) or traceback.format_exception_only(error)[-1].strip()
        details = "".join(traceback.format_exception(error))
        self.report(f"error: {message}", details, lost_peer=bool(_LOST_PEER.search(str(error))))

    def _watch(self) -> None:
        tick, seen, waited = min(1.0, self.timeout / 4), self.entered, 0.0
        while not self._stop.wait(tick):
            # Ticks are counted, since a clock runs on while the process is stopped (SIGSTOP, scontrol suspend).
            entered = self.entered
            waited, seen = waited + tick if entered == seen else 0.0, entered
            if waited > self.timeout:
                self._end(waited)

    def _end(self, waited: float) -> None:
        stacks = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()]
        message = f"no progress for {waited:.0f} s (--hang_timeout {self.timeout:g}); its stack traces:\n"
        message += "--\n".join(stacks)
        self.report(message)
        print(f"rank {self.rank}: {message}", file=sys.stderr, flush=True)
        os._exit(HANG_EXIT_CODE)  # the main thread may be inside a call that never returns


def sorted_reports(output_dir: str | Path) -> list[Path]:
    """The ranks' reports, the cause first."""
    return sorted(Path(output_dir, FOLDER).glob("*.txt"))


def is_of_lost_peer(report: Path) -> bool:
    """Whether the rank reports only that another rank is gone."""
    return report.name.split("-")[2] == "1"


def refusal(error: BaseException) -> str | None:
    """The message of an error by which a command refuses (`REFUSALS`); None for a bug, which needs its traceback."""
    name = traceback.format_exception_only(error)[0].partition(":")[0]
    message = str(error).rpartition(f"\n{name}: ")[2].strip()  # a data loader quotes its worker first
    return message if isinstance(error, REFUSALS) else None
