"""Text in lines that fit the terminal: hanging indents, commands broken by backslashes, and the help of every command.

No word is cut, so a line with a word that is longer than the terminal is wide is as long as that word.
"""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence

_NARROWEST = 20  # columns that are left to a text, however far it is indented
_HEAD = re.compile(r" *\S.*?\S {2,}(?=\S)| *")  # a term with its gap, or else the indent
_COMMAND = re.compile(r"(?:[A-Z_]+=\S* )*(?:python3?|bash|llava-\w+) ")
_JOINED = re.compile(r"\[[^][]*(?:\[[^][]*\][^][]*)*\]|-\S+ [A-Z{]\S*")  # in a usage: what stays on one line


def columns() -> int:
    """The terminal's width, which COLUMNS overrides; 80 where the output goes to a file or a pipe."""
    return shutil.get_terminal_size().columns


def hung(head: str, text: str, width: int) -> str:
    """`head` and `text` in lines of at most `width` columns; further lines start below the first one's `text`.

    A word that has no room there starts further left, on a line of its own.
    """
    room = max(width - len(head), _NARROWEST)
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    first = head + lines[0]
    if len(first) <= width or not head.strip():
        del lines[0]
    else:
        first = head.rstrip()
    return "\n".join([first, *(" " * min(len(head), max(width - len(line), 0)) + line for line in lines)])


def command(lines: Iterable[Sequence[str]], width: int, indent: str = "") -> str:
    """A command that a shell reads back, in lines of at most `width` columns with backslashes at their ends.

    Args:
        lines: the command's words, each quoted for a shell, by the line on which they start.
    """
    broken: list[str] = []
    for words in lines:
        first, further = (f"{indent}  ", f"{indent}    ") if broken else (indent, f"{indent}  ")
        line = first
        for part in _with_values(words, width - len(further) - 2):
            if line != first and len(f"{line} {part} \\") > width:
                broken.append(line)
                line = first = further
            line += part if line == first else f" {part}"
        broken.append(line)
    return " \\\n".join(broken)


def _with_values(words: Sequence[str], room: int) -> list[str]:
    """The words, each flag with its value where both fit into a line."""
    parts: list[str] = []
    for word in words:
        both = f"{parts[-1]} {word}" if parts else ""
        if both.startswith("-") and both.count(" ") == 1 and not word.startswith("-") and len(both) <= room:
            parts[-1] = both
        else:
            parts.append(word)
    return parts


def reflowed(text: str, width: int) -> str:
    """A text of paragraphs, tables and indented commands in lines of at most `width` columns.

    Lines without an indent are one paragraph, up to an empty one. An indented line stays a line; where it has a term
    and two blanks, its text hangs behind them, and takes in the lines that start in the same column.
    """
    items: list[tuple[str, str]] = []
    for line in text.splitlines():
        head = _HEAD.match(line)[0]  # pyrefly: ignore[unsupported-operation]  # an empty text matches too
        before, joined = items[-1] if items else ("", "")
        indent = len(line) - len(line.lstrip())
        if joined and line.strip() and indent == len(before) and (before.strip() or not indent):
            items[-1] = (before, f"{joined} {line.strip()}")
        else:
            items.append((head, line[len(head) :].rstrip()))
    return "\n".join(
        command([line.split()], width, head) if head.isspace() and _COMMAND.match(line) else hung(head, line, width)
        for head, line in items
    )


class Help(argparse.HelpFormatter):
    """Help that fits the terminal, and keeps the paragraphs of a description."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.indent(reflowed(text.strip("\n"), width - len(indent)), indent)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return hung("", text, width).splitlines()

    def _format_usage(self, usage, actions, groups, prefix) -> str:
        text = " ".join(super()._format_usage(usage, actions, groups, prefix).split())
        first, _, rest = text.partition(" ")
        room = self._width - len(f"{first} ")
        rest = _JOINED.sub(lambda part: part[0].replace(" ", "\0") if len(part[0]) <= room else part[0], rest)
        return f"{hung(f'{first} ', rest, self._width)}\n\n".replace("\0", " ")

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        text = f"{', '.join(action.option_strings)} {value}"
        room = self._width - self._current_indent
        if len(text) > room:  # many choices
            text = text.replace(",", ", ").replace(",  ", ", ")
        return hung("", text, room).replace("\n", f"\n{'':<{self._current_indent}}")


class HelpWithDefaults(Help):
    """Adds the default to a flag's help, if there is one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.default in (None, "", argparse.SUPPRESS) or action.default == [] or "%(default)" in text:
            return text
        return f"{text} (default: %(default)s)"
