"""A LLaVA training tree whose projector may end in a norm layer aligned with the text embeddings."""

import os
import sys

if sys.stderr is None or not sys.stderr.isatty():  # before a library is imported: its bars would be redrawn into a log
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
