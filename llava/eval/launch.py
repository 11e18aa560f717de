"""Starts a stock harness that knows our models: `python -m llava.eval.launch lmms_eval|lm_eval ARGUMENTS`.

scripts/evaluate.sh calls it; `python -m llava.eval.launch lm_eval --help` lists a harness's own arguments. Our model
types are registered with transformers' Auto classes, by which lm-eval loads models.
"""

import runpy
import sys

HARNESSES = ("lmms_eval", "lm_eval")


def main() -> None:
    """Runs the harness that the first argument names, with the remaining arguments; status 2 if it names none."""
    harness = "".join(sys.argv[1:2])
    if harness in ("-h", "--help"):
        print((__doc__ or "").rstrip())
        return
    if harness not in HARNESSES:
        print(f"error: llava.eval.launch {harness}: expected one of {', '.join(HARNESSES)}", file=sys.stderr)
        sys.exit(2)
    import llava.model.language_model.families  # noqa: F401  registers the model types; takes seconds

    sys.argv = sys.argv[1:]
    runpy.run_module(harness, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
