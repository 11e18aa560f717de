"""The messages that the code prints, read from its sources: what pages and tests quote must be one of them."""

import ast
import re
from functools import cache

from paths import ROOT

ANY = "\0"  # in a template, what the program fills in


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


def pieces(template: str, least: int) -> list[str]:
    """What stands in a template around what is filled in, if that is at least `least` characters."""
    return template.split(ANY) if len(template.replace(ANY, "").strip()) >= least else []


def is_printed(message: str) -> bool:
    """Whether a line of the code makes up most of the message."""
    for fixed in (pieces(line, 20) for line in templates()):
        if sum(map(len, fixed)) >= len(message) / 3 and re.search(pattern(fixed, message), message):
            return True
    return False


def is_template(quote: str) -> bool:
    """Whether a quote, with `...` for what is filled in, is a whole line of the code."""
    lines = (pieces(line, 8) for line in templates())
    return any(fixed and re.fullmatch(pattern(fixed, quote), quote.strip()) for fixed in lines)


def pattern(fixed: list[str], text: str) -> str:
    """A pattern of a template; one that matches nothing, at no cost, where `text` lacks any of the fixed pieces."""
    return ".*?".join(map(re.escape, fixed)) if all(piece in text for piece in fixed) else "(?!)"


def is_quoted(quote: str, output: str) -> bool:
    """Whether a line of the output holds the quote, in which `...` stands for anything."""
    return re.search(".*?".join(map(re.escape, quote.split("..."))), output) is not None
