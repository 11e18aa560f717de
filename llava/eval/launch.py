"""Starts a stock harness that knows our models: `python -m llava.eval.launch lmms_eval|lm_eval ARGUMENTS`.

scripts/evaluate.sh calls it; `python -m llava.eval.launch lm_eval --help` lists a harness's own arguments. Our model
types are registered with transformers' Auto classes, by which lm-eval loads models.
"""

import runpy
import sys


def main() -> None:
    """Runs the harness that the first argument names, with the remaining arguments."""
    if sys.argv[1:2] not in (["lmms_eval"], ["lm_eval"]):
        sys.exit("usage: python -m llava.eval.launch lmms_eval|lm_eval ARGUMENTS")
    import llava.model.language_model.families  # noqa: F401  registers the model types; takes seconds

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
