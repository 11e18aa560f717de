"""The messages that the code prints, read from its sources: what pages and tests quote must be one of them."""

import ast
import errno
import os
import re
from functools import cache

from paths import ROOT

ANY = "\0"  # in a template, what the program fills in


@cache
def sources() -> str:
    """The text of all modules."""
    return "\n".join(path.read_text() for path in (ROOT / "llava").rglob("*.py"))


@cache
def templates() -> frozenset[str]:
    """Every line of text that the code may print, with `ANY` where it fills something in."""
    texts = set()
    for path in (ROOT / "llava").rglob("*.py"):
        inside = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                inside |= set(map(id, node.values))
                texts.add("".join(v.value if isinstance(v, ast.Constant) else ANY for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                texts.add(re.sub(r"%[-+.\d]*[sdrfg]", ANY, node.value))
            elif isinstance(node, ast.Constant) and isinstance(node.value, bytes):
                texts.add(node.value.decode(errors="replace"))
    for path in (ROOT / "scripts").rglob("*.sh"):
        for text in re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text()):
            texts.add(re.sub(r"\$\{[^}]*\}|\$\([^)]*\)|\$[\w*@]+", ANY, text))
    return frozenset(line.strip() for text in texts for line in text.split("\n"))


SYSTEM = {*map(os.strerror, errno.errorcode), "Name or service not known", "timed out"}
"""What the operating system and its network functions say."""
PROGRAMS = r"(?:setup|error|rank \d+): "
"""What the scripts and the launcher put before a line of another program."""


def pieces(template: str, least: int) -> list[str]:
    """The literal parts of a template, if they have at least `least` characters."""
    return template.split(ANY) if len(template.replace(ANY, "").strip()) >= least else []


def is_printed(message: str, least: int = 20) -> bool:
    """Whether a message is a whole line of the code, and every value in it can be filled in there."""
    message = re.sub(rf"^{PROGRAMS}", "", message).strip()
    lines = (pieces(line, least) for line in templates())
    matches = (re.fullmatch(pattern(fixed, message, "(.*?)"), message) for fixed in lines if fixed)
    return any(match and all(map(is_value, match.groups())) for match in matches)


def is_value(text: str) -> bool:
    """Whether the code can fill this in: names and numbers, the system's words, or a whole line of the code."""
    names = re.findall(r"\b[A-Z]{3,}\b", text)
    if not all(re.search(rf"\b{name}\b", sources()) for name in names):
        return False
    parts = [part for part in re.split("[,;:] ", text) if re.search("[a-z] | [a-z]", part) and part not in SYSTEM]
    return not parts or is_printed(text, 8) or all(is_printed(part, 8) for part in parts)


def pattern(fixed: list[str], text: str, value: str = ".*?") -> str:
    """A pattern of a template; one that matches nothing, at no cost, where `text` lacks any of the fixed pieces."""
    return value.join(map(re.escape, fixed)) if all(piece in text for piece in fixed) else "(?!)"


def is_quoted(quote: str, output: str) -> bool:
    """Whether a line of the output holds the quote, in which `...` matches anything."""
    return re.search(".*?".join(map(re.escape, quote.split("..."))), output) is not None
