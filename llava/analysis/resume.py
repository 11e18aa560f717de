"""Keeps what was measured, so that an interrupted command can continue, and a finished measurement is used again.

The state of one measurement of one model is a file below `--output-dir`, saved every half a minute and when anything
stops the command. Its name is made of every setting that decides a result. The file also holds the digests of the
weights, the samples and the code; if one of them differs, everything is measured again.
"""

import argparse
import gzip
import hashlib
import json
import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from llava.analysis.inputs import Samples
from llava.analysis.models import NamedModel
from llava.utils.digests import revision
from llava.utils.files import write_bytes
from llava.utils.progress import progress
from llava.utils.provenance import differences
from llava.utils.versions import ANALYSIS, code_digest

FOLDER = "measurements"
_SAVE_SECONDS = 30
_LOADING_FLAGS = ("model_base", "conv_mode", "chat_template", "dtype", "layers_path", "projector_path", "vision_path")


class State(Protocol):
    """What a measurement has found so far, of its first `done` items."""

    done: int

    def to_dict(self) -> dict[str, Any]:
        """Everything but `done`, in a form that JSON can hold; arrays are allowed too."""

    def restore(self, found: dict[str, Any]) -> None:
        """Takes over what another state's `to_dict` returned."""


AnyState = TypeVar("AnyState", bound=State)
Item = TypeVar("Item")
Kind = TypeVar("Kind", bound=NamedTuple)


class Rows(Generic[Kind]):
    """A state that lists what was found as named tuples of type `kind`, with facts about the model in `about`."""

    def __init__(self, kind: Callable[..., Kind]):
        self.done = 0
        self.kind = kind
        self.rows: list[Kind] = []
        self.about: dict[str, Any] = {}

    def to_dict(self) -> dict[str, Any]:
        return {"rows": [row._asdict() for row in self.rows], "about": self.about}

    def restore(self, found: dict[str, Any]) -> None:
        self.rows, self.about = [self.kind(**row) for row in found["rows"]], found["about"]


class StateFile(NamedTuple):
    """Where a measurement's state is kept, and the digests of what is measured."""

    path: Path
    origin: dict[str, str | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fresh", action="store_true", help="measure again what --output-dir already has")


def state_file(
    command: str, named: NamedModel, samples: Samples, args: argparse.Namespace, flags: Sequence[str] = ()
) -> StateFile:
    """Where the state of `command` for one model is kept; `flags` are those of the command that decide a result."""
    settings = {
        "command": command,
        "model": named.path,
        "data": [samples.key, len(samples), args.seed],
        "flags": {name: str(getattr(args, name)) for name in (*_LOADING_FLAGS, "image_token_id", *flags)},
    }
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    origin = {
        "weights": revision(named.path),
        "--model-base": revision(args.model_base) if args.model_base else None,
        "samples": samples.content(),
        "code": code_digest(ANALYSIS),
    }
    return StateFile(args.output_dir / FOLDER / f"{command}-{digest}.json.gz", origin)


def resumed(
    state: AnyState,
    file: StateFile,
    items: Sequence[Item],
    start: Callable[[], Callable[[AnyState, Sequence[Item]], None]],
    args: argparse.Namespace,
    *,
    name: str,
    size: int = 1,
    unit: str = "sample",
) -> AnyState:
    """The state after all of `items` are added, continuing from what `file` has if it is of the same origin.

    Args:
        state: a new one, which takes over what is saved.
        start: loads the model, only if there is something to measure; returns a function that adds items to a state.
        name: of the model, in messages and the progress bar.
        size: number of items that are added at a time.
        unit: what messages call an item.
    """
    unreadable = vars(args).setdefault("unreadable", {})
    if file.path.is_file() and not args.fresh:
        state = _restored(state, file, unreadable)
    if state.done == len(items):
        print(f"{name}: {state.done} {unit}s are measured already ({file.path}; --fresh measures them again)")
        return state
    if state.done:
        print(f"{name}: continues after {state.done} of {len(items)} {unit}s ({file.path})")
    add, saved_at, saved_done, whole = start(), time.monotonic(), state.done, pickle.dumps(state)
    with progress(len(items), f"{args.command}, {name}", f"{unit}s", done=state.done) as bar:
        try:
            for first in range(state.done, len(items), size):
                some = items[first : first + size]
                if some:
                    add(state, some)
                state.done = min(first + size, len(items))
                bar.update(state.done - first)
                whole = pickle.dumps(state)
                if time.monotonic() - saved_at > _SAVE_SECONDS:
                    _save(state, file, unreadable)
                    saved_at, saved_done = time.monotonic(), state.done
        except BaseException:  # also Ctrl-C; the last addition may be incomplete, `whole` is the state before it
            state = pickle.loads(whole)
            if state.done > saved_done:
                _save(state, file, unreadable)
            raise
    _save(state, file, unreadable)
    return state


def _restored(state: AnyState, file: StateFile, unreadable: dict[str, str]) -> AnyState:
    new = pickle.dumps(state)
    try:
        saved = json.loads(gzip.decompress(file.path.read_bytes()), object_hook=_decode)
        if changed := differences(saved["origin"], file.origin):
            print(f"{file.path}: measured with other {', '.join(changed)}; everything is measured again")
            return state
        state.restore(saved["found"])
        state.done = saved["done"]
        unreadable.update(saved["unreadable"])
        return state
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
        print(f"{file.path} is damaged ({error}); everything is measured again")
        return pickle.loads(new)


def _save(state: State, file: StateFile, unreadable: dict[str, str]) -> None:
    path = file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"origin": file.origin, "done": state.done, "found": state.to_dict(), "unreadable": unreadable}
    write_bytes(path, gzip.compress(json.dumps(content, default=_encode).encode(), 1), contended=True)


def _encode(value: Any) -> dict[str, Any]:
    if isinstance(value, np.ndarray):
        return {"ndarray": value.tolist()}
    raise TypeError(f"{type(value).__name__} cannot be saved")


def _decode(value: dict[str, Any]) -> Any:
    return np.array(value["ndarray"]) if value.keys() == {"ndarray"} else value
