"""Data that cannot be read: the data rooms name the source, and each front end the flag that gave it."""

from collections.abc import Iterator
from contextlib import contextmanager


class DataError(ValueError):
    """Data that cannot be read: `source` is a file, folder or data set, with the line or entry where that is known.

    `problem` says what was expected, what is there, and what to do; `flag`, which messages begin with, is empty until
    `named_by` sets it.
    """

    def __init__(self, source: object, problem: str):
        super().__init__(source, problem)
        self.source, self.problem, self.flag = source, problem, ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.flag, str(self.source)))) + f": {self.problem}"


@contextmanager
def named_by(flag: str) -> Iterator[None]:
    """Messages of `DataError`s that leave this context begin with `flag`, unless an inner context has named another."""
    try:
        yield
    except DataError as error:
        error.flag = error.flag or flag
        raise
