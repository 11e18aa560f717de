"""Keeps what was measured, so that an interrupted command can continue, and a finished measurement is used again.

The state of one measurement of one model is a file below `--output-dir`, saved every half a minute and when anything
stops the command. Its name is made of every setting that decides a result. The file also holds the digests of the
weights, the samples and the code; if one of them differs, everything is measured again.
"""

import argparse
import hashlib
import json
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from llava.analysis.inputs import Samples
from llava.analysis.models import NamedModel
from llava.utils.digests import revision
from llava.utils.files import replacing
from llava.utils.progress import progress
from llava.utils.provenance import differences
from llava.utils.versions import ANALYSIS, code_digest

FOLDER = "measurements"
_SAVE_SECONDS = 30
_LOADING_FLAGS = ("model_base", "conv_mode", "chat_template", "dtype", "layers_path", "projector_path", "vision_path")
_ARRAYS = [np.empty(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype(np.float64))]


class State(Protocol):
    """The results of the first `done` items of a measurement; `kinds` are the classes that they are made of."""

    done: int
    kinds: Sequence[type]


AnyState = TypeVar("AnyState", bound=State)
Item = TypeVar("Item")
Kind = TypeVar("Kind", bound=NamedTuple)


class Rows(Generic[Kind]):
    """A state whose results are named tuples of type `kind`, with facts about the model in `about`."""

    def __init__(self, kind: type[Kind]):
        self.done = 0
        self.kinds = [kind]
        self.rows: list[Kind] = []
        self.about: dict[str, Any] = {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fresh", action="store_true", help="measure again what --output-dir already has")


def resumed(
    state: AnyState,
    what: str,
    named: NamedModel,
    samples: Samples,
    start: Callable[[], Callable[[AnyState, Sequence[Any]], None]],
    args: argparse.Namespace,
    *,
    flags: Sequence[str] = (),
    items: Sequence[Item] | None = None,
    size: int = 1,
    unit: str = "sample",
) -> AnyState:
    """The state after all items are added, continuing from what `--output-dir` has if it is of the same origin.

    Args:
        state: a new one, in whose place a saved one may be taken.
        what: is measured; begins the file's name.
        start: loads the model, only if there is something to measure; returns a function that adds items to a state.
        flags: those of the command that decide a result.
        items: what is added, `size` at a time; the samples where None.
        unit: what messages call an item.
    """
    items = samples if items is None else items
    path, origin = _path(what, named, samples, args, flags), _origin(named, samples, args)
    unreadable = vars(args).setdefault("unreadable", {})
    if path.is_file() and not args.fresh:
        state = _restored(state, path, origin, unreadable)
    if state.done == len(items):
        print(f"{named.name}: {state.done} {unit}s are measured already ({path}; --fresh measures them again)")
        return state
    if state.done:
        print(f"{named.name}: continues after {state.done} of {len(items)} {unit}s ({path})")

    def save() -> None:
        _save({"origin": origin, "state": state, "unreadable": unreadable}, path)

    add, saved_at, saved_done, whole = start(), time.monotonic(), state.done, pickle.dumps(state)
    with progress(len(items), f"{args.command}, {named.name}", f"{unit}s", done=state.done) as bar:
        try:
            for first in range(state.done, len(items), size):
                some = items[first : first + size]
                if some:
                    add(state, some)
                state.done = min(first + size, len(items))
                bar.update(state.done - first)
                whole = pickle.dumps(state)
                if time.monotonic() - saved_at > _SAVE_SECONDS:
                    save()
                    saved_at, saved_done = time.monotonic(), state.done
        except BaseException:  # also Ctrl-C; the last addition may be incomplete, `whole` is the state before it
            state = pickle.loads(whole)
            if state.done > saved_done:
                save()
            raise
    save()
    return state


def _path(what: str, named: NamedModel, samples: Samples, args: argparse.Namespace, flags: Sequence[str]) -> Path:
    settings = {
        "command": what,
        "model": named.path,
        "data": [samples.key, len(samples), args.seed],
        "flags": {name: str(getattr(args, name)) for name in (*_LOADING_FLAGS, "image_token_id", *flags)},
    }
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    return args.output_dir / FOLDER / f"{what}-{digest}.pt"


def _origin(named: NamedModel, samples: Samples, args: argparse.Namespace) -> dict[str, str | None]:
    return {
        "weights": revision(named.path),
        "--model-base": revision(args.model_base) if args.model_base else None,
        "samples": samples.content(),
        "code": code_digest(ANALYSIS),
    }


def _restored(state: AnyState, path: Path, origin: dict[str, str | None], unreadable: dict[str, str]) -> AnyState:
    try:
        saved = load(path, [type(state), *state.kinds])
        if changed := differences(saved["origin"], origin):
            print(f"{path}: measured with other {', '.join(changed)}; everything is measured again")
            return state
        unreadable.update(saved["unreadable"])
        return saved["state"]
    except (OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        print(f"{path} is damaged ({reason}); everything is measured again")
        return state


def load(path: Path, kinds: Sequence[type]) -> dict[str, Any]:
    """What `_save` wrote; only objects of `kinds`, numbers, text, arrays and tensors are ever made."""
    with torch.serialization.safe_globals([*_ARRAYS, *kinds]):
        return torch.load(path, weights_only=True)


def _save(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, contended=True) as unfinished:
        torch.save(content, unfinished)
