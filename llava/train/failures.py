"""Which rank failed first: every rank leaves its error, or where it hangs, in `errors/` of the output folder.

One failing rank makes the others fail too, later and with messages about lost connections. The reports' names sort by
how far a rank had come, then by time, so that the first one is the cause; `llava.launch` shows it last.
"""

import faulthandler
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

FOLDER = "errors"
HANG_EXIT_CODE = 86
REQUEUE_EXIT_CODE = 85  # start the run again; neither a shell's own code nor one that a signal gives
RUN_DIR = "LLAVA_RUN_DIR"  # set by llava.launch: where this node's ranks leave their process ids and the request
PHASES = ("starting", "saving", "reading data", "computing")  # in their order, at the same number of finished steps
# What a rank says whose peer is gone; at the same progress it comes behind the peer's own error.
_LOST_PEER = re.compile("connection (closed|reset)|timed out waiting|socket|broken pipe|NCCL|peer", re.IGNORECASE)


class Watchdog:
    """Ends this process when the step has not come on for too long.

    Args:
        output_dir: reports go to `errors/` below it; None writes none.
        rank: of this process.
        timeout: seconds without progress, `--hang_timeout`; 0 never ends anything.
    """

    def __init__(self, output_dir: str | None, rank: int, timeout: float = 0.0):
        self.folder = Path(output_dir, FOLDER) if output_dir else None
        self.rank, self.timeout = rank, timeout
        self.step, self.phase, self.since = 0, 0, time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> "Watchdog":
        """Begins to watch; only training is watched, not what loads before it."""
        if self.timeout > 0:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
            self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def enter(self, phase: str, step: int) -> None:
        """Says that the rank has come to `phase` after `step` finished steps."""
        self.step, self.phase, self.since = step, PHASES.index(phase), time.monotonic()

    def report(self, text: str, lost_peer: bool) -> None:
        """Leaves `text` under a name that sorts by progress."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        where = f"{PHASES[self.phase]} after {self.step} finished steps"
        name = f"{self.step:08d}-{self.phase}-{int(lost_peer)}-{time.time_ns()}-rank{self.rank}.txt"
        header = f"rank {self.rank} on {socket.gethostname()}, process {os.getpid()}, {where}\n"
        (self.folder / name).write_text(header + text)

    def report_exception(self, error: BaseException) -> None:
        """Leaves the traceback of an error that ends this rank."""
        text = "".join(traceback.format_exception(error))
        self.report(text, lost_peer=bool(_LOST_PEER.search(str(error))))

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.timeout / 4)):
            waited = time.monotonic() - self.since
            if waited > self.timeout:
                self._end(waited)

    def _end(self, waited: float) -> None:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        text = f"no progress for {waited:.0f} s (--hang_timeout {self.timeout:g}); this is where it stands:\n{stacks}"
        self.report(text, lost_peer=False)
        print(f"rank {self.rank}: {text}", file=sys.stderr, flush=True)
        os._exit(HANG_EXIT_CODE)  # the main thread may be inside a call that never returns


def sorted_reports(output_dir: str | Path) -> list[Path]:
    """The ranks' reports, the cause first."""
    return sorted(Path(output_dir, FOLDER).glob("*.txt"))


def is_of_lost_peer(report: Path) -> bool:
    """Whether the rank says no more than that another one is gone."""
    return report.name.split("-")[2] == "1"


def clear_reports(output_dir: str) -> None:
    """Removes the reports of an earlier start."""
    shutil.rmtree(Path(output_dir, FOLDER), ignore_errors=True)
