"""The house stands: no import runs back up, and docs/architecture.md draws it as it is."""

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

from paths import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
DRAWING = PAGE.split("```")[1]
FLOORS = {
    room.rstrip("/"): int(number)
    for number, floor in re.findall(r"^(\d) (.*?)(?=^\d |\Z)", DRAWING, re.MULTILINE | re.DOTALL)
    for room in re.findall(r"(?:llava/\w+(?:\.py|/)|\b(?:scripts|benchmarks|patches|playground)/)", floor)
}


def room_of(path: str) -> str:
    """The room of a file: the folder below llava/, a module on the ground, or the folder beside the house."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "llava" else parts[0]


@cache
def imported_files(file: Path) -> set[str]:
    """The files of this tree that a file imports, wherever in it: in functions and under TYPE_CHECKING too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    paths = {
        name.replace(".", "/") + ".py" for name in names if name.split(".")[0] in ("llava", "benchmarks", "playground")
    }
    return {path for path in paths if (ROOT / path).is_file()}


MODULE = re.compile(r"((?:llava|benchmarks|playground)(?:\.\w+)+)\.?")


def named_rooms(file: Path) -> set[str]:
    """The rooms of modules that a file names in texts, as for `importlib.import_module`; words after `-m` are not."""
    tree = ast.parse(file.read_text())
    lists = [node.elts for node in ast.walk(tree) if isinstance(node, ast.List | ast.Tuple)]
    processes = {
        id(b) for words in lists for a, b in pairwise(words) if isinstance(a, ast.Constant) and a.value == "-m"
    }
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in processes]
    named = [
        match[1].replace(".", "/") for text in texts if isinstance(text, str) and (match := MODULE.fullmatch(text))
    ]
    return {room_of(path if (ROOT / path).is_dir() else f"{path}.py") for path in named} & FLOORS.keys()


SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("llava", "benchmarks", "playground")
    for path in (ROOT / folder).rglob("*.py")
    if "playground/data" not in path.as_posix() and path.name != "__init__.py"
)


def test_every_room_is_drawn():
    assert {room_of(path) for path in SOURCES} <= FLOORS.keys()


def test_no_import_runs_back_up():
    wrong = []
    for source in SOURCES:
        for target in imported_files(ROOT / source):
            here, there = room_of(source), room_of(target)
            if here != there and FLOORS[there] >= FLOORS[here]:
                wrong.append(f"{source} -> {target}")
        here = room_of(source)
        wrong += [f"{source} names {there}" for there in named_rooms(ROOT / source) if FLOORS[there] > FLOORS[here]]
    assert wrong == []


def in_circles(imports: dict[str, set[str]]) -> set[str]:
    """The files on circles of imports, and between two circles: those left when both ends are taken off repeatedly."""
    left = set(imports)
    while True:
        imported = {target for file in left for target in imports[file] & left}
        inner = {file for file in left & imported if imports[file] & left}
        if inner == left:
            return left
        left = inner


def test_no_files_import_each_other_in_a_circle():
    assert in_circles({source: imported_files(ROOT / source) - {source} for source in SOURCES}) == set()


def test_the_launcher_needs_python_alone():
    needed, seen = {path for path in SOURCES if path.startswith("llava/launch/")}, set()
    while needed:
        path = needed.pop()
        seen.add(path)
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            strange = {name.split(".")[0] for name in names} & {"torch", "transformers", "numpy", "deepspeed", "psutil"}
            assert not strange, f"{path} imports {strange}"
        needed |= imported_files(ROOT / path) - seen


def test_what_the_page_names_is_there():
    named = set(re.findall(r"`([\w/]+\.py):([\w.]+)`", PAGE))
    assert len(named) > 20
    for path, name in named:
        text = (ROOT / path).read_text()
        assert all(re.search(rf"^ *(?:class|def) {part}\b", text, re.MULTILINE) for part in name.split(".")), (
            path,
            name,
        )
