"""Which rank failed first: every rank leaves its error, or where it hangs, in `errors/` of the output folder.

If the user can fix the fault, the report is one line, and a file `.traceback` beside it holds the traceback. One
failing rank makes the others fail too, later and with messages about lost connections. The reports' names sort by how
far a rank had come, then by time, so that the first one is the cause; `llava.launch` shows it at the end.
"""

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

from llava.utils.paths import CODE

FOLDER = "errors"
HANG_EXIT_CODE = 86
REQUEUE_EXIT_CODE = 85  # start the run again; neither a shell's own code nor one that a signal gives
RUN_DIR = "LLAVA_RUN_DIR"  # set by llava.launch: where this node's ranks leave their process ids and the request
HOST = "host"  # a file there with the node's name; ranks that ssh started on other nodes may see the same path
RECEIVED = "signal"  # a file there with the name of the signal that the launcher got and passes on as SIGUSR1
REQUEST = "requeue"  # a file there that asks for another start of the run, and says whether anything was saved
SAVED, UNSAVED = "saved", "unsaved"
ENDED = "ended"  # a file there once a rank has ended its work, whether well or not
# In the order in which ranks pass them, at the same number of finished steps.
PHASES = ("starting", "evaluating", "saving", "reading data", "computing")
PACKAGE = CODE / "llava"
# A frame of a printed traceback with the first line of its source, and the marks and further lines below it.
_FRAME = re.compile(r'^  File "(?P<file>.+)", line \d+, in .*\n(?: {4}(?P<source>.*)\n)?(?: {4}.*\n)*', re.MULTILINE)
# Messages of a rank whose peer is gone; at the same progress its report sorts after the peer's own error.
_LOST_PEER = re.compile("connection (closed|reset)|timed out waiting|socket|broken pipe|NCCL|peer", re.IGNORECASE)


class Watchdog:
    """Ends this process when a step makes no progress for too long.

    Args:
        output_dir: reports go to `errors/` below it, or, if nothing can be written there, to a new temporary folder;
            None writes no reports.
        rank: this process's rank.
        timeout: seconds without progress, `--hang_timeout`; 0 never ends anything.
    """

    def __init__(self, output_dir: str | None, rank: int, timeout: float = 0.0):
        self.folder = Path(output_dir, FOLDER) if output_dir else None
        self.rank, self.timeout = rank, timeout
        self.step, self.phase, self.since = 0, 0, time.monotonic()
        self.reported = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> "Watchdog":
        """Begins to watch; only training is watched, not the loading before it."""
        if self.timeout > 0:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
            self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def enter(self, phase: str, step: int) -> None:
        """Notes that the rank has reached `phase` after `step` finished steps."""
        self.step, self.phase, self.since = step, PHASES.index(phase), time.monotonic()

    def report(self, text: str, lost_peer: bool, details: str = "") -> None:
        """Writes `text` to a file whose name sorts by progress, and `details` to a file of their own."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(self.folder, text, lost_peer, details)
        except OSError:  # the error to be reported may be that this folder cannot be written
            self.folder = Path(tempfile.mkdtemp(prefix="llava-errors-"))
            self._write(self.folder, text, lost_peer, details)
        self.reported = True

    def _write(self, folder: Path, text: str, lost_peer: bool, details: str) -> None:
        where = f"{PHASES[self.phase]} after {self.step} finished steps"
        header = f"rank {self.rank} on {socket.gethostname()}, process {os.getpid()}, {where}\n"
        file = folder / f"{self.step:08d}-{self.phase}-{int(lost_peer)}-{time.time_ns()}-rank{self.rank}.txt"
        if details:
            beside = file.with_suffix(".traceback")
            beside.write_text(header + details)
            text += f"\ntraceback: {beside}\n"
        file.write_text(header + text)

    def report_exception(self, error: BaseException) -> None:
        """Reports an error that ends this rank: one line if the user can fix it, and the traceback."""
        text, message = "".join(traceback.format_exception(error)), refusal(error)
        lost_peer = bool(_LOST_PEER.search(str(error)))
        if message is None:
            self.report(text, lost_peer)
        else:
            self.report(f"error: {message}", lost_peer, details=text)

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.timeout / 4)):
            waited = time.monotonic() - self.since
            if waited > self.timeout:
                self._end(waited)

    def _end(self, waited: float) -> None:
        stacks = ["".join(traceback.format_stack(frame)) for frame in sys._current_frames().values()]
        text = f"no progress for {waited:.0f} s (--hang_timeout {self.timeout:g}); its stack traces:\n"
        text += "\n".join(stacks)
        self.report(text, lost_peer=False)
        print(f"rank {self.rank}: {text}", file=sys.stderr, flush=True)
        os._exit(HANG_EXIT_CODE)  # the main thread may be inside a call that never returns


def sorted_reports(output_dir: str | Path) -> list[Path]:
    """The ranks' reports, the cause first."""
    return sorted(Path(output_dir, FOLDER).glob("*.txt"))


def is_of_lost_peer(report: Path) -> bool:
    """Whether the rank reports only that another rank is gone."""
    return report.name.split("-")[2] == "1"


def clear_reports(output_dir: str) -> None:
    """Removes the reports of an earlier start."""
    shutil.rmtree(Path(output_dir, FOLDER), ignore_errors=True)


# --- what the user can fix --------------------------------------------------------------------------------------------


def refusal(error: BaseException) -> str | None:
    """The message for the user if an error is about a flag, file, record or package; None for a bug.

    An error counts as foreseen if a `raise` of this package raised it, in this process or in one that works for it, or
    if it comes from reading files or importing packages. Any other error needs its traceback.
    """
    # A process pool's traceback is the cause's, a data loader's worker's is the end of the message.
    text = getattr(error.__cause__, "tb", "").removesuffix('"""')
    text = text or "".join(traceback.format_exception(error, chain=False))
    *_, frame = (None, *_FRAME.finditer(text))
    if frame and (frame["source"] or "").startswith("raise ") and Path(frame["file"]).resolve().is_relative_to(PACKAGE):
        return text[frame.end() :].strip().partition(": ")[2]
    return " ".join(str(error).split()) if isinstance(error, (OSError, ImportError)) else None


def of_flag(error: Exception, argv: list[str]) -> str:
    """An error from reading the flags, in one line; if a library quotes only a flag's value, the flag comes first."""
    text = " ".join(str(error).split())
    quoted = [(f, v) for f, v in zip(argv, argv[1:], strict=False) if f"'{v}'" in text or text.startswith(f"{v} ")]
    return f"{' '.join(quoted[0])}: {text}" if quoted and "--" not in text else text
