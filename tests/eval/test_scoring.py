"""Which answers count as the expected one, against pairs judged by hand; the scores of files of answers, counted."""

import json
from decimal import Decimal

import pytest

from llava.eval.score import main, read_scored, score_rows
from llava.utils.intervals import share_interval
from llava.utils.scoring import KINDS, can_expect, is_right, letter, number, same_answer, yes_or_no

SAME = """
yes | Yes.
U.S. | us
"red" | **Red**
1,000 | 1000
.5 | 0.5
10 % | 10%
-5 | −5
(b) | B
"""
DIFFERENT = """
1.5 | 15
-5 | 5
3/4 | 34
10:30 | 1030
1,5 | 15
50% | 50
C++ | C
left | right
? | !
"""


def pairs(text):
    return [tuple(part.strip() for part in line.split("|")) for line in text.strip().splitlines()]


@pytest.mark.parametrize("pair", pairs(SAME), ids=" = ".join)
def test_case_sentence_punctuation_and_white_space_decide_nothing(pair):
    assert same_answer(*pair) and same_answer(*reversed(pair))


@pytest.mark.parametrize("pair", pairs(DIFFERENT), ids=" = ".join)
def test_what_decides_a_value_is_kept(pair):
    assert not same_answer(*pair) and not same_answer(*reversed(pair))


# --- what is read from an answer --------------------------------------------------------------------------------------

READ = [
    (number, "The answer is 42.", 42),
    (number, "1,234.5", Decimal("1234.5")),
    (number, "\N{MINUS SIGN}5 degrees", -5),
    (number, "12.3 %", Decimal("0.123")),
    (number, "10 percent", Decimal("0.1")),
    (number, "1.2 million", None),
    (number, "2 millions", None),
    (number, "3 hundred", None),
    (number, "3 cats and 3 dogs", 3),
    (number, "3 or 4", None),
    (number, "1,5", None),
    (number, "1e99999999999999999999", None),
    (number, "1e999999999%", None),
    (letter, "B", "B"),
    (letter, "(b) a cat", "B"),
    (letter, "The answer is (C).", "C"),
    (letter, "The answer is A cat", None),
    (letter, "(A) or (B)", "A"),
    (letter, "B. dog\nIt has a tail.", "B"),
    (letter, "A. cat\nB. dog\nC. bird", None),
    (letter, "either (A) or (B)", None),
    (yes_or_no, "No, it is not.", "no"),
    (yes_or_no, "I'd say yes.", "yes"),
    (yes_or_no, "It is yes or no", None),
]


@pytest.mark.parametrize(("read", "text", "expected"), READ, ids=[f"{r.__name__}: {t!r}" for r, t, _ in READ])
def test_what_is_read_from_an_answer_is_plain_or_nothing(read, text, expected):
    assert read(text) == expected


@pytest.mark.parametrize(
    ("kind", "answer", "expected", "right"),
    [
        ("exact", "Red.", "red", True),
        ("contains", "The Red one.", "red", True),
        ("contains", "10.5", "10", False),
        ("yes_no", "Yes, there is.", "yes", True),
        ("choice", "B) a cat", "B", True),
        ("choice", "A cat", "A", False),
        ("numeric", "There are 3.", "3", True),
        ("numeric", "有3只", "3", True),
        ("numeric", "3個と5個", "3", False),
        ("numeric", "３．５", "3.5", True),
        ("contains", "图片里有一只狗。", "狗", True),
        ("choice", "答案是A。", "A", True),
        ("exact", "caf\u00e9", "cafe\u0301", True),
    ],
)
def test_each_kind_of_question_has_its_rule(kind, answer, expected, right):
    assert can_expect(kind, expected) and is_right(kind, answer, expected) is right


def test_an_expected_answer_that_its_kind_cannot_read_is_none():
    assert [kind for kind in KINDS if can_expect(kind, "perhaps")] == ["exact", "contains"]
    assert not any(can_expect(kind, " ") for kind in KINDS)


# --- files of answers -------------------------------------------------------------------------------------------------


def line(identifier, text, expected, kind=None, **fields):
    metadata = {"expected": expected} | ({"kind": kind} if kind else {})
    return json.dumps({"question_id": identifier, "prompt": "?", "text": text, "metadata": metadata} | fields)


ANSWERS = [
    line(1, "Red.", "red"),
    line(2, "blue", "red"),
    line("a", "yes!", "Yes", "yes_no"),
    line("b", "maybe", "no", "yes_no"),
    line("c", "it is 103", "103", "contains"),
]


def written(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def test_scores_of_a_file_are_those_counted_by_hand(tmp_path, capsys):
    rows = {row["kind"]: row for row in score_rows(read_scored(written(tmp_path / "answers.jsonl", ANSWERS)))}
    counted = {"exact": (1, 2, 0), "yes_no": (1, 2, 1), "contains": (1, 1, 0), "all": (3, 5, 1)}
    assert {kind: (row["right"], row["questions"], row["unread"]) for kind, row in rows.items()} == counted
    low, high = share_interval(3, 5)
    assert rows["all"]["percent"] == "60.0" and rows["all"]["95 % interval"] == f"{100 * low:.1f} to {100 * high:.1f}"
    assert main([str(tmp_path / "answers.jsonl")]) == 0 and "unread: answers that" in capsys.readouterr().out


def test_an_answer_may_hold_what_ends_lines_of_text(tmp_path):
    text = json.dumps({"question_id": 0, "text": "red\u2028", "expected": "red"}, ensure_ascii=False)
    (tmp_path / "answers.jsonl").write_text(f"{text}\n", encoding="utf-8")
    assert [answer.score for answer in read_scored(tmp_path / "answers.jsonl")] == [1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*ANSWERS, ANSWERS[0]], "a.jsonl, line 6: question 1 is answered twice"),
        ([line(1, "red", None)], "a.jsonl, line 1: question 1: no expected answer"),
        ([line(1, "3", 3, "numeric")], "line 1: question 1: expected answer 3: write it as text"),
        ([line("x", "3", "three", "numeric")], "line 1: question \"x\": 'three' cannot be the expected answer"),
        ([line(1, "red", "red", "color")], "line 1: question 1: kind 'color' is not one of exact, contains"),
        ([json.dumps({"question_id": 1, "metadata": {"expected": "a"}})], "line 1: no field 'text'"),
        ([""], "a.jsonl, line 1: "),
    ],
)
def test_a_record_that_cannot_be_scored_is_named(tmp_path, capsys, lines, message):
    assert main([str(written(tmp_path / "a.jsonl", lines))]) == 2
    assert message in capsys.readouterr().err


def test_answers_that_were_cut_off_are_not_scored(tmp_path, capsys):
    file = written(tmp_path / "a.jsonl", ANSWERS)
    (tmp_path / "a.jsonl.run.json").write_text(json.dumps({"asked": {}, "count": 9}))
    assert main([str(file)]) == 2
    assert "5 of 9 answers; rerun python -m llava.eval.answer" in capsys.readouterr().err
