"""Runs work over all records on all cores of the node, and gives the results in order."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import parent_process
from typing import Any, TypeVar

from llava.utils.machine import available_cores

State = TypeVar("State")
Piece = TypeVar("Piece")
Result = TypeVar("Result")
_work: tuple[Callable[[Any, Any], Any], Any]  # of a working process: its function and state


def in_processes(
    function: Callable[[State, Piece], Result], state: State, pieces: Sequence[Piece], worth: bool = True
) -> Iterator[Result]:
    """Yields `function(state, piece)` for every piece, in order.

    If the work is `worth` it, as many processes as this one may use cores do it, and each gets `state` once.

    Raises:
        ChildProcessError: a process was killed, or a library ended it; the message names the first missing piece.
        Exception: whatever `function` raises.
    """
    if not worth:
        yield from (function(state, piece) for piece in pieces)
        return
    count = max(1, min(available_cores(), len(pieces)))
    with ProcessPoolExecutor(count, initializer=_set_up, initargs=(function, state)) as pool:
        results = pool.map(_call, pieces)
        for piece in pieces:
            try:
                yield next(results)
            except BrokenProcessPool:
                message = f"a process working on {piece}, or shortly after it, was killed"
                raise ChildProcessError(f"{message}: memory ran out, or damaged data ended it") from None


def _set_up(*work: Any) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its processes
    parent: Any = parent_process()
    threading.Thread(target=lambda: os._exit(parent.join() or 1), daemon=True).start()  # also a parent that is killed


def _call(piece: Any) -> Any:
    function, state = _work
    return function(state, piece)
