"""Progress outside a terminal: a line every half minute and never a carriage return."""

from llava.utils.progress import progress


def test_a_line_comes_every_thirty_seconds_and_what_was_done_before_is_not_pace(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with progress(120, "reading", "files", done=50) as bar:
        for _ in range(70):
            now[0] += 1
            bar.update()
    assert capsys.readouterr().err.splitlines() == [
        "reading: 80/120 files [00:30<00:40]",
        "reading: 110/120 files [01:00<00:10]",
        "reading: 120/120 files [01:10<00:00]",
    ]
