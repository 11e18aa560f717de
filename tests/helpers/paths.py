"""Where the tree and the recorded numbers lie."""

from llava.utils.paths import ROOT

GOLDEN = ROOT / "tests/golden"
