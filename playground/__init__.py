"""Small real inputs for trying the training tree: a language model, pictures with known answers, a vision tower."""

import os
import sys

if sys.stderr is None or not sys.stderr.isatty():  # libraries would redraw their progress bars into a log
    os.environ.setdefault("TQDM_DISABLE", "1")
