"""Starts a stock harness that knows our models: `python -m llava.eval.launch lmms_eval|lm_eval ARGUMENTS`.

scripts/evaluate.sh calls it; `python -m llava.eval.launch lm_eval --help` lists a harness's own arguments.

Our model types are registered with transformers' Auto classes, by which lm-eval loads models. When the harness
raises, the samples that it was working on are read from the traceback's frames and named on stderr, since the harness
itself does not name them.
"""

import runpy
import sys
import traceback
from types import TracebackType

HARNESSES = ("lmms_eval", "lm_eval")


def main() -> None:
    """Runs the harness that the first argument names, with the remaining arguments; status 2 if it names none."""
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print((__doc__ or "").rstrip())
        return
    if not set(sys.argv[1:2]) & set(HARNESSES):
        requested = sys.argv[1] if sys.argv[1:] else "nothing"
        print(
            f"error: llava.eval.launch {requested}: expected one of {', '.join(HARNESSES)}; see --help", file=sys.stderr
        )
        sys.exit(2)
    import llava.model.language_model.families  # noqa: F401  registers the model types; takes seconds
    from llava.eval.collect import FAILED_AT

    harness = sys.argv[1]
    sys.argv = sys.argv[1:]
    try:
        runpy.run_module(harness, run_name="__main__", alter_sys=True)
    except Exception as error:
        for place in failed_at(error.__traceback__):
            print(f"{FAILED_AT}{place}: {type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        raise


def failed_at(trace: TracebackType | None) -> list[str]:
    """`task: doc N` for every sample that the harness's innermost frame with samples was working on."""
    places: list[str] = []
    for frame, _ in traceback.walk_tb(trace):
        values = frame.f_locals
        task = next((values[key] for key in ("task", "task_name") if isinstance(values.get(key), str)), None)
        ids = values.get("doc_id")
        if task is not None and ids is not None:
            places = [f"{task}: doc {number}" for number in (ids if isinstance(ids, list | tuple) else [ids])]
    return places


if __name__ == "__main__":
    main()
