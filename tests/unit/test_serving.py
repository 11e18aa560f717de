"""`bash tests/serving/run.sh` without a server: when it passes, and that it leaves no process behind."""

import importlib.util
import subprocess
import time

import psutil
import pytest
from paths import ROOT

spec = importlib.util.spec_from_file_location("serving_compare", ROOT / "tests/serving/compare.py")
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)

TIE = {"id": "a", "question": "q", "served": "x", "ours": "y", "nats": 0.0, "nats_in_float32": -0.2}
REPORT = {"arm": "none", "dtype": "bfloat16", "questions": 40, "prompts_differ": [], "different": []}


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ({}, True),
        ({"different": [TIE]}, True),
        ({"different": [TIE] * 3}, False),
        ({"different": [TIE | {"nats_in_float32": 0.3}]}, False),
        ({"different": [TIE], "dtype": "float32"}, False),
        ({"prompts_differ": ["a"]}, False),
    ],
)
def test_serving_passes_only_if_differences_are_few_ties(change, passes):
    assert compare.is_as_expected(REPORT | change) is passes


def test_summary_shows_every_difference():
    assert compare.summary(REPORT | {"different": [TIE]}).splitlines() == [
        "none: a 'q': served 'x', ours 'y', preferred by 0.0000 nats, in float32 by -0.2000",
        "none: 39 of 40 answers equal",
    ]


def is_alive(process: int) -> bool:
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE


def test_stopping_ends_the_server_and_what_it_started():
    deaf = '(trap "" TERM; exec sleep 60) & echo $!; exec sleep 60'
    process = subprocess.Popen(["bash", "-c", deaf], start_new_session=True, stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    compare.stop(process)
    assert process.poll() is not None
    for _ in range(100):  # a killed process goes when it next runs
        if not is_alive(child):
            return
        time.sleep(0.05)
    raise AssertionError("the server's child lives on")
