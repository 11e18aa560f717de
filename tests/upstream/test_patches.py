"""patches/apply.py on made-up trees: recognised by hash, else refused; applied and reversed whole or not at all."""

import ast
import difflib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

TRAIN, BUILDER = "llava/train/train.py", "llava/model/multimodal_projector/builder.py"
ORIGINALS = {TRAIN: "import os\n\n\ndef train():\n    pass\n", BUILDER: "x = 1\n"}
PATCHED = {TRAIN: "import os\nimport ours\n\n\ndef train():\n    ours.go()\n    pass\n", BUILDER: "x = 1\nx += 1\n"}


def load(file: Path):
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses looks its module up there
    spec.loader.exec_module(module)
    return module


REAL = load(ROOT / "patches/apply.py")


def unified(old: str, new: str, path: str) -> str:
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{path}", f"b/{path}", n=0)
    return "".join(lines)


@pytest.fixture
def repository(tmp_path):
    """A repository with apply.py, one made-up patch, and stand-ins for the files that it copies."""
    folder = tmp_path / "repository/patches"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "patches/apply.py", folder)
    (folder / "made-up.patch").write_text("".join(unified(ORIGINALS[p], PATCHED[p], p) for p in ORIGINALS))
    rows = [f"{hashlib.sha256(text.encode()).hexdigest()}  {path}\n" for path, text in ORIGINALS.items()]
    (folder / "made-up.sha256").write_text("".join(rows))
    for path in REAL.COPIED:
        (folder.parent / path).parent.mkdir(parents=True, exist_ok=True)
        (folder.parent / path).write_text(f"# {path}\n")
    return folder.parent


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "tree"
    for path, text in ORIGINALS.items():
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text)
    (folder / TRAIN).chmod(0o755)
    (folder / "README.md").write_text("not touched\n")
    return folder


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mode) for p in files}


def call(repository: Path, *words) -> subprocess.CompletedProcess:
    command = [sys.executable, str(repository / "patches/apply.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_apply_check_and_reverse_restore_every_byte_and_mode(repository, tree):
    before = snapshot(tree)
    assert call(repository, tree, "--check").returncode == 1
    assert snapshot(tree) == before
    done = call(repository, tree)
    assert done.returncode == 0 and TRAIN in done.stdout
    assert {path: (tree / path).read_text() for path in PATCHED} == PATCHED
    assert all((tree / path).read_bytes() == (repository / path).read_bytes() for path in REAL.COPIED)
    assert os.access(tree / TRAIN, os.X_OK)
    assert call(repository, tree, "--check").returncode == 0
    assert call(repository, tree, "--reverse").returncode == 0
    assert snapshot(tree) == before


@pytest.mark.parametrize(("option", "message"), [([], "applied already"), (["--reverse"], "not applied")])
def test_what_is_done_already_changes_nothing(repository, tree, option, message):
    call(repository, tree, *option)
    before = snapshot(tree)
    done = call(repository, tree, *option)
    assert done.returncode == 0 and message in done.stdout
    assert snapshot(tree) == before


def test_a_second_original_in_the_table_is_patched_and_restored_too(repository, tree):
    text = ORIGINALS[TRAIN] + "# a later release\n"
    (tree / TRAIN).write_text(text)
    row = f"# later\n{hashlib.sha256(text.encode()).hexdigest()}  {TRAIN}\n"
    with (repository / "patches/made-up.sha256").open("a") as table:
        table.write(row)
    assert call(repository, tree).returncode == 0
    assert (tree / TRAIN).read_text() == PATCHED[TRAIN] + "# a later release\n"
    assert call(repository, tree, "--reverse").returncode == 0
    assert (tree / TRAIN).read_text() == text


def change_a_byte(tree, repository):
    (tree / BUILDER).write_text("x = 2\n")
    return rf"{BUILDER}: DIFFERS"


def remove_a_file(tree, repository):
    (tree / TRAIN).unlink()
    return rf"{TRAIN}: MISSING"


def patch_half(tree, repository):
    (tree / TRAIN).write_text(PATCHED[TRAIN])
    return rf"{TRAIN}: patched"


def occupy_a_copied_file(tree, repository):
    (tree / REAL.COPIED[0]).parent.mkdir(parents=True, exist_ok=True)
    (tree / REAL.COPIED[0]).write_text("something else\n")
    return rf"{REAL.COPIED[0]}: DIFFERS"


def edit_after_applying(tree, repository):
    call(repository, tree)
    (tree / TRAIN).write_text(PATCHED[TRAIN] + "# edited\n")
    return rf"{TRAIN}: DIFFERS"


def change_the_inserted_lines(tree, repository):
    call(repository, tree)
    (tree / TRAIN).write_text(PATCHED[TRAIN].replace("ours.go()", "ours.no()"))
    return rf"{TRAIN}: DIFFERS"


def leave_out_llava(tree, repository):
    shutil.rmtree(tree / "llava")
    return "no folder llava/"


FAULTS = [change_a_byte, remove_a_file, patch_half, occupy_a_copied_file, edit_after_applying]
FAULTS += [change_the_inserted_lines, leave_out_llava]


@pytest.mark.slow
@pytest.mark.parametrize("option", [[], ["--check"], ["--reverse"]], ids=["apply", "check", "reverse"])
@pytest.mark.parametrize("fault", FAULTS)
def test_any_other_tree_is_refused_with_what_differs(repository, tree, fault, option):
    expected = fault(tree, repository)
    before = snapshot(tree)
    done = call(repository, tree, *option)
    assert done.returncode == 2 and re.search(expected, done.stderr)
    assert snapshot(tree) == before


def test_the_package_folder_itself_is_refused_with_a_hint(repository, tree):
    done = call(repository, tree / "llava")
    assert done.returncode == 2 and f"did you mean {tree}?" in done.stderr


WRITES = [(False, Path, "write_bytes", n) for n in range(5)] + [(False, os, "replace", n) for n in range(5)]
WRITES += [(True, Path, "write_bytes", n) for n in range(2)] + [(True, os, "replace", n) for n in range(2)]
WRITES += [(True, Path, "unlink", n) for n in range(3)]


@pytest.mark.parametrize(("reverse", "owner", "name", "failing_call"), WRITES)
def test_a_write_that_fails_leaves_the_tree_as_it_was(
    repository, tree, monkeypatch, reverse, owner, name, failing_call
):
    apply = load(repository / "patches/apply.py")
    if reverse:
        apply.run(tree)
    before, calls, function = snapshot(tree), iter(range(100)), getattr(owner, name)

    def failing(path, *args, **kwargs):
        is_cleaning_up = name == "unlink" and str(path).endswith(apply._TEMPORARY)
        if not is_cleaning_up and next(calls) == failing_call:
            raise OSError("disk full")
        return function(path, *args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(apply.Refused, match="disk full"):
        apply.run(tree, reverse=reverse)
    assert snapshot(tree) == before


LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n"]), min_size=1, max_size=4)


@given(original=LINES, added=st.dictionaries(st.integers(0, 4), LINES))
def test_insertions_are_read_made_and_taken_out_as_a_diff_describes_them(original, added):
    places = sorted(place for place in added if place <= len(original))
    diff, new, shift = "--- a/f\n+++ b/f\n", "", 0
    for place in places:
        diff += f"@@ -{place},0 +{place + shift + 1},{len(added[place])} @@\n"
        diff += "".join("+" + line for line in added[place])
        shift += len(added[place])
    for place in range(len(original) + 1):
        new += "".join(added.get(place, []) + original[place : place + 1])
    insertions = REAL.parse_insertions(diff.encode(), "f")["f"]
    assert REAL.insert("".join(original).encode(), insertions) == new.encode()
    assert REAL.take_out(new.encode(), insertions) == "".join(original).encode()


@pytest.mark.parametrize("line", ["-import os\n", " import os\n", "@@ -1,2 +1,2 @@\n"])
def test_a_patch_that_does_more_than_insert_is_refused(line):
    diff = f"--- a/f\n+++ b/f\n@@ -1,0 +2 @@\n+x\n{line}"
    with pytest.raises(ValueError, match="line 5: only inserted lines"):
        REAL.parse_insertions(diff.encode(), "f.patch")


@pytest.mark.parametrize("patch", sorted((ROOT / "patches").glob("*.patch")), ids=lambda path: path.stem)
def test_patches_hold_inserted_lines_only(patch):
    headers = re.compile(r"--- a/\S+|\+\+\+ b/\S+|@@ -\d+,0 \+\d+(,\d+)? @@")
    for line in patch.read_text().splitlines():
        assert line.startswith("+") or headers.fullmatch(line), line


def test_both_patches_insert_the_same_lines():
    """The anchors differ between the trees; what is inserted must not drift apart."""
    first, second = (
        [[lines for _, lines in p.insertions[path]] for path in sorted(p.insertions)]
        for p in REAL.read_patches(ROOT / "patches")
    )
    assert first == second


@pytest.mark.parametrize("path", REAL.COPIED)
def test_copied_files_need_nothing_that_upstream_lacks(path):
    copied = {name.removesuffix(".py").replace("/", ".") for name in REAL.COPIED}
    allowed = set(sys.stdlib_module_names) | copied | {"torch", "transformers", "deepspeed"}
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert all(name in allowed or name.split(".")[0] in allowed for name in names), names
        if isinstance(node, ast.ImportFrom) and node.module == "transformers":
            assert [alias.name for alias in node.names] == ["PretrainedConfig"]


@pytest.mark.parametrize(("last", "status"), [(2.0, 0), (float("nan"), 1)])
def test_a_nan_loss_fails_the_comparison_at_any_tolerance(tmp_path, monkeypatch, last, status):
    def record(args, tree, python, path, runs):
        for run in runs.values():
            folder = Path(run["record"])
            folder.mkdir(parents=True, exist_ok=True)
            losses = [3.0, last] if tree == "ours" else [3.5, 2.0]
            (folder / "record.json").write_text(json.dumps({"losses": losses, "order": [0, 1]}))
            (folder / "config.json").write_text("{}")
            torch.save({}, folder / "mm_projector.bin")

    compare = load(ROOT / "patches/baseline/compare.py")
    monkeypatch.setattr(compare, "record", record)
    (tmp_path / "data.json").write_text("[{}, {}]")
    values = dict.fromkeys(("upstream-python", "original", "patched", "model", "vision-tower"), "x")
    values |= dict.fromkeys(("pretrain-images", "finetune-images"), "x")
    values |= dict.fromkeys(("pretrain-data", "finetune-data"), tmp_path / "data.json")
    values |= dict.fromkeys(("bf16", "gradient-checkpointing"), "True") | dict.fromkeys(("seed", "max-length"), 1)
    values |= {"steps": 2, "batch": 1, "arms": "layernorm", "tolerance": "inf", "output": tmp_path / "out"}
    monkeypatch.setattr(sys, "argv", ["compare.py", *compare.flags(values)])
    assert compare.main() == status
    stages = json.loads((tmp_path / "out/comparison.json").read_text())["arms"]["layernorm"]
    assert [stage["largest_loss_difference"] for stage in stages.values()] == [float("inf") if status else 0.5] * 2
