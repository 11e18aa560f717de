"""Runs work over all records on all cores of the node, and gives the results in order."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ProcessPoolExecutor(min(cores, len(pieces)) or 1, initializer=_set_up, initargs=(function, state)) as pool:
        results = pool.map(_call, pieces)
        for piece in pieces:
            try:
                result = next(results)
            except BrokenProcessPool:
                message = f"a process working on {piece}, or shortly after it, was killed"
                raise ChildProcessError(f"{message}: memory ran out, or damaged data ended it") from None
            yield result


def _set_up(*work: Any) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its processes


def _call(piece: Any) -> Any:
    function, state = _work
    return function(state, piece)
