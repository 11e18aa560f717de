"""Which answers count as the expected one, against pairs judged by hand."""

import pytest

from llava.scoring import normalized, same_answer

SAME = """
yes | Yes.
The left-hand one | the  lefthand one!
it's | its
it’s | It's
U.S. | us
"red" | **Red**
3 | 3.
1,000 | 1000
$1,000 | $1000.
1,234,567.5 | 1234567.5
.5 | 0.5
-5 | −5
(b) | B
10:30 | 10:30.
covid-19 | COVID19
"""
DIFFERENT = """
1.5 | 15
-5 | 5
- 5 | 5
-.5 | .5
3/4 | 34
5-3 | 53
10:30 | 1030
1,5 | 15
0,125 | 0125
50% | 50
$5 | 5
$5 | €5
<5 | >5
C++ | C
C# | C
2^3 | 23
3*4 | 34
A&B | AB
1.5.2 | 1.52
left | right
? | !
yes | yes yes
"""


def pairs(text):
    return [tuple(part.strip() for part in line.split("|")) for line in text.strip().splitlines()]


@pytest.mark.parametrize("pair", pairs(SAME), ids=" = ".join)
def test_case_sentence_punctuation_and_white_space_decide_nothing(pair):
    assert same_answer(*pair) and same_answer(*reversed(pair))


@pytest.mark.parametrize("pair", pairs(DIFFERENT), ids=" = ".join)
def test_what_decides_a_value_is_kept(pair):
    assert not same_answer(*pair) and not same_answer(*reversed(pair))


def test_the_compared_form_is_in_small_letters_and_single_spaces():
    assert normalized(" The  Left-hand, one!\n") == "the lefthand one"
    assert normalized("...") == ""
