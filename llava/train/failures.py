"""Which rank failed first: every rank leaves its error, or where it hangs, in `errors/` of the output folder.

Where the user can mend what is wrong, the report is one line, and the traceback lies beside it under `.traceback`.
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
HOST = "host"  # a file there: the node's name; ranks that ssh started on other nodes may see the same path
REQUEST = "requeue"  # a file there: the run is to be started again; it says whether anything was saved
SAVED, UNSAVED = "saved", "unsaved"
# In their order, at the same number of finished steps.
PHASES = ("starting", "evaluating", "saving", "reading data", "computing")
# What a rank says whose peer is gone; at the same progress it comes after the peer's own error.
_PACKAGE = Path(__file__).resolve().parents[1]
_FRAME = re.compile(r'^  File "(?P<file>.+)", line \d+, in .*\n(?P<source>    .*\n)?', re.MULTILINE)
_IN_WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\nOriginal (?P<traceback>.*)", re.DOTALL)
_LOST_PEER = re.compile("connection (closed|reset)|timed out waiting|socket|broken pipe|NCCL|peer", re.IGNORECASE)


class Watchdog:
    """Ends this process when the step has not come on for too long.

    Args:
        output_dir: reports go to `errors/` below it, or, where nothing can be written, to a new temporary folder; None
            writes none.
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

    def report(self, text: str, lost_peer: bool, details: str = "") -> None:
        """Leaves `text` under a name that sorts by progress, and `details` in a file of their own."""
        if self.folder is None:
            return
        try:
            self._write(self.folder, text, lost_peer, details)
        except OSError:  # what is reported may be just that
            self.folder = Path(tempfile.mkdtemp(prefix="llava-errors-"))
            self._write(self.folder, text, lost_peer, details)

    def _write(self, folder: Path, text: str, lost_peer: bool, details: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        where = f"{PHASES[self.phase]} after {self.step} finished steps"
        name = f"{self.step:08d}-{self.phase}-{int(lost_peer)}-{time.time_ns()}-rank{self.rank}.txt"
        header = f"rank {self.rank} on {socket.gethostname()}, process {os.getpid()}, {where}\n"
        file = folder / name
        if details:
            beside = file.with_suffix(".traceback")
            beside.write_text(header + details)
            text += f"\ntraceback: {beside}\n"
        file.write_text(header + text)

    def report_exception(self, error: BaseException) -> None:
        """Leaves the traceback of an error that ends this rank, and before it what the user can mend."""
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


# --- what the user can mend -------------------------------------------------------------------------------------------


def refusal(error: BaseException) -> str | None:
    """What to tell the user where an error is about a flag, file, record or package; None for a bug.

    Foreseen is what a `raise` of this package says, in this process or in one that works for it; besides, whatever
    reading files and importing packages says. All else needs its traceback.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__, chain=False))
    message = str(error)
    if in_worker := _IN_WORKER.search(message):
        text = in_worker["traceback"]
        message = _last_message(text)
    elif pool_traceback := getattr(error.__cause__, "tb", None):  # of a process pool
        text = pool_traceback
    if _is_raised_here(text):
        return message
    return " ".join(message.split()) if isinstance(error, (OSError, ImportError)) else None


def _is_raised_here(text: str) -> bool:
    """Whether a traceback's innermost line is a `raise` of this package."""
    *_, frame = (None, *_FRAME.finditer(text))
    if frame is None or not (frame["source"] or "").startswith("    raise "):
        return False
    return Path(frame["file"]).resolve().is_relative_to(_PACKAGE)


def _last_message(text: str) -> str:
    """The message at the end of a traceback, without its class."""
    *_, frame = _FRAME.finditer(text)
    lines = text[frame.end() :].splitlines()
    while lines and lines[0].startswith(" "):  # marks below the source
        lines.pop(0)
    return "\n".join(lines).partition(": ")[2]


def of_flag(error: Exception, argv: list[str]) -> str:
    """An error from reading the flags in one line; begins with the flag whose value a library quotes without it."""
    text = " ".join(str(error).split())
    quoted = [(f, v) for f, v in zip(argv, argv[1:], strict=False) if f"'{v}'" in text or text.startswith(f"{v} ")]
    return f"{' '.join(quoted[0])}: {text}" if quoted and "--" not in text else text
