"""What the benchmarks share, and that each of them runs on inputs of a few records."""

import json
import sys

import pytest

from benchmarks import common


def test_a_result_says_machine_versions_and_commit(tmp_path):
    path = common.write_result("speed", [{"arm": "a", "seconds": 1.5}], folder=tmp_path, flags={"quick": True})
    result = json.loads(path.read_text())
    assert result["rows"] == [{"arm": "a", "seconds": 1.5}] and result["flags"] == {"quick": True}
    assert set(result["environment"]) == {"machine", "threads", "versions", "commit"}
    assert result["environment"]["versions"]["torch"] and result["environment"]["machine"]["cores"] >= 1


def test_arms_take_turns_and_the_warmup_is_dropped():
    calls = []
    arms = {name: (lambda name=name: calls.append(name) or len(calls)) for name in "ab"}
    assert common.alternate(arms, repeats=2, warmup=1) == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert calls == list("ababab")


def test_a_ratio_pairs_the_values_of_a_round():
    assert common.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_a_command_that_fails_is_shown_with_what_it_printed():
    assert common.run_json([sys.executable, "-c", "print('noise'); print('{\"a\": 1}')"]) == {"a": 1}
    with pytest.raises(RuntimeError, match="boom"):
        common.run_json([sys.executable, "-c", "raise SystemExit('boom')"])
