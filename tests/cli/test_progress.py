"""Progress: a bar in a terminal, elsewhere a line every half minute and never a carriage return."""

import pytest

from llava.utils.progress import progress


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("tqdm.std.time", clock)
    return clock


def test_a_line_comes_every_thirty_seconds_and_at_the_end(clock, capsys):
    with progress(70, "reading", "files") as bar:
        for _ in range(70):
            clock.now += 1
            bar.update()
    assert capsys.readouterr().err.splitlines() == [
        "reading: 30/70 files [00:30<00:40,  1.00files/s]",
        "reading: 60/70 files [01:00<00:10,  1.00files/s]",
        "reading: 70/70 files [01:10<00:00,  1.00files/s]",
    ]


def test_what_was_done_before_counts_as_done_and_not_as_pace(clock, capsys):
    bar = progress(100, "going on", "steps", done=50)
    bar.set_postfix_str("loss 2.5", refresh=False)
    clock.now += 40
    bar.update(10)
    bar.close()
    bar.close()
    lines = ["going on: 60/100 steps [00:40<02:40,  4.00s/steps, loss 2.5]"] * 2
    assert capsys.readouterr().err.splitlines() == lines
