"""The tests' own order: what several files share is imported from `support`, never from another test."""

import ast

import pytest
from paths import ROOT

TESTS = ROOT / "tests"
ROOMS = ("unit", "invariants", "distributed", "upstream", "scripts", "browser")
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py"))}


def imported(source: str) -> set[str]:
    """The last names of all modules that may be imported, at the top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
    return {name.split(".")[-1] for name in names}


def from_tests(source: str) -> set[str]:
    return {name for name in imported(source) if name == "conftest" or name.startswith("test_")}


def test_nothing_is_imported_from_a_test_file():
    assert not {str(path): names for path, source in SOURCES.items() if (names := from_tests(source))}


@pytest.mark.parametrize(
    "line", ["import test_a", "from test_a import b", "from tests.unit import test_a", "def f():\n    import conftest"]
)
def test_an_import_of_a_test_file_is_seen(line):
    assert from_tests(line)


def test_every_test_file_has_a_room_and_a_name_of_its_own():
    files = [path for path in SOURCES if path.name.startswith("test_")]
    assert {path.parent for path in files} == {TESTS / room for room in ROOMS}
    assert len({path.name for path in files}) == len(files)


def test_support_has_no_tests_and_nothing_that_nobody_imports():
    support = {path.stem: source for path, source in SOURCES.items() if path.parent == TESTS / "support"}
    named = [node for source in support.values() for node in ast.parse(source).body if hasattr(node, "name")]
    assert not [node.name for node in named if node.name.lower().startswith("test")]
    assert support.keys() <= set().union(*map(imported, SOURCES.values()))
