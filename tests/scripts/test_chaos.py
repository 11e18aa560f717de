"""What `tests/chaos/run.sh` expects to read is what the code prints, and its quick faults end as promised."""

import os
import subprocess

import pytest
from messages import is_template
from paths import ROOT

from tests.chaos.faults import FAULTS, IN_STRIKE, INJECTED, QUICK

QUOTES = {
    line
    for fault in FAULTS
    for quote in (*fault.promise, *fault.said, *(fault.refused or ((), ()))[1])
    for line in quote.splitlines()
}


@pytest.mark.parametrize("quote", sorted(QUOTES - {INJECTED, IN_STRIKE}))
def test_every_expected_message_is_a_whole_message_of_the_code(quote):
    assert is_template(quote), "no text in llava/ or scripts/ is this, with `...` for what it fills in"


def test_a_reworded_message_is_seen():
    assert is_template("... is incomplete or damaged and is skipped: ...")
    assert not is_template("... is damaged and is skipped: ...")
    assert not is_template("... is incomplete or damaged and is skipped")


@pytest.mark.slow
def test_the_quick_faults_end_as_promised():
    assert {fault.name for fault in FAULTS}.issuperset(QUICK)
    command = ["bash", "tests/chaos/run.sh", *QUICK]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
