"""The trainer's flags as the scripts and the caller give them: each name once, the last one given wins."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llava.launch.settings import Refusal, script_flags
from llava.utils.paths import CODE

REPEATED = ("plugin",)
"""Flags of which every value counts."""


@dataclass(frozen=True)
class Flags:
    """Flags in their order, each as the words that give it: `("--seed", "42")` or `("--seed=42",)`."""

    given: tuple[tuple[str, ...], ...] = ()

    def value(self, name: str) -> str:
        """The flag's value; `True` for a flag without a value, and empty for one that is not given."""
        return self.values().get(name, "")

    def before(self, **values: str) -> "Flags":
        """These flags with `values` in front, each of which counts only where no flag of its name is given."""
        words = [word for name, value in values.items() for word in (f"--{name}", value)]
        return parse_flags([*words, *self.words()])

    def with_value(self, name: str, value: str) -> "Flags":
        """The same flags with another value for one of them, in its place."""
        if not self.value(name):
            return self.before(**{name: value})
        return Flags(tuple((f"--{name}", value) if name_of(f[0]) == name else f for f in self.given))

    def words(self) -> list[str]:
        """The flags as the words of a command line."""
        return [word for words in self.given for word in words]

    def values(self) -> dict[str, str]:
        """The value of each flag by name; `True` for a flag without a value, as the trainer's parser takes a switch."""
        return {name_of(flag): flag.partition("=")[2] or " ".join(rest) or "True" for flag, *rest in self.given}


def name_of(word: str) -> str:
    """The flag's name as the trainer knows it, with underscores for hyphens."""
    return word.removeprefix("--").split("=", 1)[0].replace("-", "_")


def parse_flags(words: Sequence[str]) -> Flags:
    """The flags in `words`; an empty value leaves the flag out, whatever was given before it.

    Raises:
        Refusal: a word belongs to no flag.
    """
    given: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and name_of(word):
            name = name_of(word)
            if name in REPEATED:  # its values add up
                given.setdefault(name, [f"--{name}"]).extend(filter(None, [word.partition("=")[2]]))
                continue
            given.pop(name, None)  # so that it stands where it was given last
            given[name] = [word]
        elif name:
            given[name].append(word)
        else:
            raise Refusal(f"{word}: expected a flag of the trainer, as in --seed 1")
    for name in given.keys() & set(REPEATED):
        given[name] = [*filter(None, given[name])]
        if len(given[name]) == 1:
            del given[name]
    return Flags(tuple(tuple(f) for f in given.values() if not _is_empty(f)))


def _is_empty(words: list[str]) -> bool:
    return words[1:] == [""] or (len(words) == 1 and words[0].endswith("=") and words[0].count("=") == 1)


def check_by_trainer(flags: Flags, python: str, environment: Mapping[str, str]) -> bool:
    """Lets the trainer's own parser read the flags; False if its environment is not installed.

    Raises:
        Refusal: the parser rejects them; the message is the parser's, after the variable that gave the value.
    """
    if not Path(python).exists():
        return False
    quiet = {**environment, "PYTHONPATH": f"{CODE}:{environment.get('PYTHONPATH', '')}", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, "-m", "llava.train.check_flags", *flags.words()]
    done = subprocess.run(command, capture_output=True, text=True, env=quiet)
    if done.returncode == 2:
        message = done.stderr.strip().splitlines()[-1].removeprefix("error: ")
        variables = {flag: name for name, flag in script_flags(environment.get("STAGE", "")).items()}
        first = re.search(r"--(\w+)", message)
        name = variables.get(first[1], "") if first else ""
        raise Refusal(f"{name}={flags.value(first[1])}: {message}" if first and name else message)
    return done.returncode == 0
