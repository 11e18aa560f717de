"""Where the tree and the recorded numbers lie."""

from llava.provenance import ROOT

GOLDEN = ROOT / "tests/golden"
