"""Whether an answer is as expected: how two texts are compared, and what is read from an answer.

A question's kind says how its answer is scored. Answers of the kinds in `READERS` are scored by what is read from them,
a word, a letter or a number; where nothing can be read, or two things that differ, the answer is wrong.
"""

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from typing import Any

_TYPESET = {0x2212: "-", 0x2013: "-", 0x2010: "-", 0x2011: "-", 0x2014: " "}  # minus, en dash, hyphens; em dash
_TYPESET |= {0xFEE0 + code: code for code in range(0x21, 0x7F)} | {0x3001: ",", 0x3002: "."}  # full width; 、 and 。
_VALUES = set(map(chr, range(0x2030, 0x2038)))  # per mille, minutes, seconds: Unicode counts them as punctuation too
_OTHER_MARKS = [c for c in map(chr, range(0x80, 0x10000)) if unicodedata.category(c)[0] == "P"]
_MARKS = re.escape("!\"'()*,.:;?[]_`{}~" + "".join(c for c in _OTHER_MARKS if c not in _VALUES))
_UNSPACED = re.compile("([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff])")
"""Thai, Lao, Burmese, Khmer, kana and Han have no spaces between words: each of their characters is a word here."""
_DROPPED = re.compile(rf"(?<!\d)[{_MARKS}]|[{_MARKS}](?!\d)|(?<=[^\W\d_])-|-(?!\s*[$€£¥]?\d)")
_THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)")
_SPACED_PERCENT = re.compile(r"(?<=\d)\s+%")
_BARE_POINT = re.compile(r"(?<![\w.])\.(?=\d)")


def normalized(text: str) -> str:
    """An answer in the form in which it is compared: lower case, no sentence punctuation, single spaces.

    What decides a value stays: a mark between two digits (`1.5`, `10:30`), a minus before a number, and signs such as
    `/`, `%`, `$` and `+`. Thousands have no commas, and `.5` is `0.5`.
    """
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), _SPACED_PERCENT.sub("%", _plain(text)).lower())
    return " ".join(_DROPPED.sub("", _BARE_POINT.sub("0.", text)).split())


def _plain(text: str) -> str:
    """Accents composed, and dashes and full-width characters as ASCII writes them."""
    return unicodedata.normalize("NFC", text).translate(_TYPESET)


def _words(text: str) -> str:
    return " ".join(_UNSPACED.sub(r" \1 ", text).split())


def same_answer(answer: str, expected: str) -> bool:
    """Whether two answers are equal by `normalized`; texts of punctuation alone are compared as they are."""
    same = normalized(answer) == normalized(expected)
    return same and (bool(normalized(expected)) or answer.split() == expected.split())


def contains(answer: str, expected: str) -> bool:
    """Whether the expected words stand in the answer, in their order and next to each other."""
    return f" {_words(normalized(expected))} " in f" {_words(normalized(answer))} "


def yes_or_no(text: str) -> str | None:
    """The text's first word if that is yes or no, else the only one of them anywhere in it."""
    words = normalized(text).split()
    return _only({"yes", "no"}.intersection(words[:1])) or _only({"yes", "no"}.intersection(words))


def letter(text: str) -> str | None:
    """The letter of a choice: at the beginning, as in `B` or `(b) a cat`, after "answer is", or alone in brackets.

    Where further lines begin so with other letters, as in a list of all options, there is none.
    In a text of another script it is the only Latin letter, as in `答案是B`.
    """
    text = _plain(text)
    if first := _FIRST_LETTER.match(text.strip()):
        others = filter(None, map(_FIRST_LETTER.match, text.split("\n")))  # options that are repeated, or explained
        return _only({match[1].upper() for match in (first, *others)})
    if not text.isascii() and not _LATIN_WORD.search(text):
        return _only(set(_LATIN_LETTER.findall(text)))
    return _only(set(_NAMED_LETTER.findall(text)) or set(_BRACKETED_LETTER.findall(text)))


def number(text: str) -> Decimal | None:
    """The only number in the text; percent are hundredths. None where a token with digits is not plainly a number.

    So `1.2 million` is none.
    """
    return _only({_value(match) for match in _NUMBER.finditer(_COUNTED.sub(r"\1 ", _words(_plain(text))))})


def _only(found: set) -> Any:
    return found.pop() if len(found) == 1 else None


def _value(match: re.Match[str]) -> Decimal | None:
    sign, digits, percent, thousands = match[1], match[2].rstrip(".,:"), match[3], match[4]
    if thousands or not _DECIMAL.fullmatch(digits):
        return None
    return Decimal(sign + digits.replace(",", "")) / (100 if percent else 1)


_UNIT = r"(?i:(\s*%|\s*per ?cent\b)|(\s*(?:[a-z]+illion|thousand|hundred)s?)\b)"
_NUMBER = re.compile(rf"(?<![\w.])([-+]?)[$€£¥]?(\.?\d[\w.,:/]*){_UNIT}?")
_DECIMAL = re.compile(r"(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE]\d{1,3})?")
_FIRST_LETTER = re.compile(r"[^\w-]*([A-Za-z])(?:[^\w']*$|[).:,*]|\s*\n)")
_NAMED_LETTER = re.compile(r"(?i:answer|option|choice)(?i:\s+is)?\s*:?\s*[^\w\s]*([A-Z])(?=[).:,*]|\W*$)")
_BRACKETED_LETTER = re.compile(r"\(([A-Z])\)")
_LATIN_LETTER = re.compile("[A-Z]")
_LATIN_WORD = re.compile("[A-Za-z\u00c0-\u024f]{2}|[a-z]")
_COUNTED = re.compile("(\\d)(?=[\uac00-\ud7af])")  # Korean counts `3개`
READERS: dict[str, Callable[[str], object | None]] = {"yes_no": yes_or_no, "choice": letter, "numeric": number}
COMPARED = {"exact": same_answer, "contains": contains}
KINDS = (*COMPARED, *READERS)
DEFAULT_KIND = "exact"


def is_right(kind: str, answer: str, expected: str) -> bool:
    """Whether an answer is right by the rule of its kind, one of `KINDS`; `can_expect` says what may be expected."""
    if kind in COMPARED:
        return COMPARED[kind](answer, expected)
    return READERS[kind](answer) == READERS[kind](expected)


def can_expect(kind: str, expected: str) -> bool:
    """Whether a question of this kind can have this expected answer."""
    return bool(expected.strip()) and (kind in COMPARED or READERS[kind](expected) is not None)


def kind_of(name: str, expected: Any, kind: Any) -> str:
    """How a question, called `name`, is scored; raises ValueError unless its expected answer can be scored so."""
    kind = kind or DEFAULT_KIND
    if kind not in KINDS:
        raise ValueError(f"{name}: kind {kind!r} is not one of {', '.join(KINDS)}")
    if not isinstance(expected, str | None):
        raise ValueError(f"{name}: expected answer {expected!r}: write it as text, in quotes")
    if expected is None:
        raise ValueError(f"{name}: no expected answer; use records that end with one, or add a field 'expected'")
    if not can_expect(kind, expected):
        raise ValueError(f"{name}: {expected!r} cannot be the expected answer of a question of kind {kind}")
    return kind
