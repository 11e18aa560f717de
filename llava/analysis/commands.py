"""The commands of `python -m llava.analysis`, and what each of them is run on.

A command is the module of its name, with `add_arguments(parser)`, `run(args)` and, for `all`, `NEEDS`.
"""

from typing import NamedTuple

PACKAGE = "llava.analysis"
ANY, OURS, NORMED = "any", "is one of this tree's", "has a norm"

COMMANDS = {
    "interface-norms": "norms of vision features, visual tokens and text embeddings (Tables 1, 2, 3)",
    "embedding-norms": "norms of text embeddings, read from the weight files alone (Tables 6, 7, 8)",
    "layer-norms": "norms of visual and text tokens per layer (Figure 4)",
    "update-rates": "how fast visual and text tokens turn per layer (Figures 2, 3, 4, 5)",
    "norm-params": "gain and bias of the projector's norm over checkpoints, from the files alone (Table 5)",
    "gradients": "gradients above and below the projector's norm (section 5.1)",
    "attention": "where a query looks in the picture, and how much attention visual tokens get (Appendix G)",
    "interventions": "what visual tokens' norms do to a trained model at inference",
    "freezing": "what a trained model loses if visual tokens are not updated from some layer on",
    "theory": "how far the theory's assumptions and predictions hold in a model (sections 3 and B)",
}
"""In the order of `all`."""
ALL = "all"
SUMMARIES = COMMANDS | {ALL: "all of these for the given checkpoints"}


class Needs(NamedTuple):
    """What `all` runs a command on.

    Attributes:
        models: `ANY` model, `OURS` (checkpoints of this tree), or `NORMED` (its projector ends in a norm).
        flags: which of `--data` and `--samples` are passed on to it.
    """

    models: str = ANY
    flags: tuple[str, ...] = ("data", "samples")
