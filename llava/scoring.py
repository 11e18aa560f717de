"""Whether an answer is the expected one: how two texts are compared."""

import re

_TYPESET = {0x2212: "-", 0x2013: "-", 0x2010: "-", 0x2011: "-", 0x2014: " "}  # minus, en dash, hyphens; em dash
_MARKS = re.escape("!\"'()*,.:;?[]_`{}~…“”‘’„«»¿¡。，！？：；、（）")
_DROPPED = re.compile(rf"(?<!\d)[{_MARKS}]|[{_MARKS}](?!\d)|(?<=[^\W\d_])-|-(?!\s*[$€£¥]?\d)")
_THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)")
_BARE_POINT = re.compile(r"(?<![\w.])\.(?=\d)")


def normalized(text: str) -> str:
    """An answer in the form in which it is compared: lower case, no sentence punctuation, single spaces.

    What decides a value stays: a mark between two digits (`1.5`, `10:30`), a minus before a number, and signs such as
    `/`, `%`, `$` and `+`. Thousands have no commas, and `.5` is `0.5`.
    """
    text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text.lower().translate(_TYPESET))
    return " ".join(_DROPPED.sub("", _BARE_POINT.sub("0.", text)).split())


def same_answer(answer: str, expected: str) -> bool:
    """Whether two answers are equal by `normalized`; texts of punctuation alone are compared as they are."""
    same = normalized(answer) == normalized(expected)
    return same and (bool(normalized(expected)) or answer.split() == expected.split())
