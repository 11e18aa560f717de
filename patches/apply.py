#!/usr/bin/env python3
"""Puts the norm after the projector of an upstream LLaVA tree, or takes it out.

  python patches/apply.py TREE             apply the patch that fits TREE;
                                           again: says that it is applied
  python patches/apply.py TREE --check     say whether the patch is applied
  python patches/apply.py TREE --reverse   take it out, to the byte

TREE, of LLaVA or LLaVA-NeXT, is the folder that holds `llava/`: an unpacked
sdist, a site-packages folder or a checkout. It is recognised by the SHA-256 of
the files that a patch touches (NAME.sha256 beside NAME.patch); any other tree
is refused, and each file that differs is named. All files are written or none.
Nothing but Python 3.10's standard library is needed.

exit status: 0 done, or applied (--check); 1 not applied (--check only);
             2 refused, nothing was changed
"""

import argparse
import hashlib
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The layer and what it needs, the same files as in this repository.
COPIED = (
    "llava/model/zero3.py",
    "llava/model/multimodal_projector/norm.py",
    "llava/model/multimodal_projector/adapter.py",
)
ORIGINAL, PATCHED, DIFFERENT, MISSING = "original", "patched", "different", "missing"
_TEMPORARY = ".norm-patch-tmp"

Insertions = list[tuple[int, list[bytes]]]  # (number of the original line to insert after, the lines)


class Refused(Exception):
    """The tree cannot be handled; the message says why and what to do."""


@dataclass(frozen=True)
class Patch:
    """One upstream tree's patch: the lines inserted into each file, and the SHA-256 that the original may have."""

    name: str
    insertions: dict[str, Insertions]
    hashes: dict[str, set[str]]


def read_patches(folder: Path) -> list[Patch]:
    """Every NAME.patch of `folder` with its NAME.sha256 (lines of digest and path; # begins a comment).

    Raises:
        ValueError: a patch does more than insert lines, or touches other files than its table lists.
    """
    patches = []
    for file in sorted(folder.glob("*.patch")):
        insertions = parse_insertions(file.read_bytes(), file.name)
        hashes: dict[str, set[str]] = {}
        for row in file.with_suffix(".sha256").read_text().splitlines():
            if not row.startswith("#"):
                digest, path = row.split()
                hashes.setdefault(path, set()).add(digest)
        if hashes.keys() != insertions.keys():
            raise ValueError(f"{file.name} touches {sorted(insertions)}, but its table lists {sorted(hashes)}")
        patches.append(Patch(file.stem, insertions, hashes))
    return patches


def parse_insertions(diff: bytes, name: str) -> dict[str, Insertions]:
    """The insertions that a unified diff without context lines makes, by file.

    Raises:
        ValueError: a line is neither a file's header, a hunk's header nor an inserted line.
    """
    files: dict[str, Insertions] = {}
    hunks: Insertions = []
    for number, line in enumerate(diff.splitlines(keepends=True), 1):
        if line.startswith(b"--- "):
            continue
        if line.startswith(b"+++ b/"):
            hunks = files.setdefault(line[6:].decode().strip(), [])
        elif match := re.fullmatch(rb"@@ -(\d+),0 \+\d+(,\d+)? @@\n", line):
            hunks.append((int(match[1]), []))
        elif line.startswith(b"+") and hunks:
            hunks[-1][1].append(line[1:])
        else:
            raise ValueError(f"{name}, line {number}: only inserted lines are expected, found {line!r}")
    return files


def insert(content: bytes, insertions: Insertions) -> bytes:
    """`content` with the lines inserted."""
    lines, result, position = content.splitlines(keepends=True), [], 0
    for after, added in insertions:
        result += lines[position:after] + added
        position = after
    return b"".join(result + lines[position:])


def take_out(content: bytes, insertions: Insertions) -> bytes | None:
    """The inverse of `insert`, or None where `content` does not hold the inserted lines at their places."""
    lines = content.splitlines(keepends=True)
    for after, added in insertions:
        here = slice(after, after + len(added))  # what is before has been taken out already
        if lines[here] != added:
            return None
        del lines[here]
    return b"".join(lines)


def file_states(patch: Patch, tree: Path) -> dict[str, str]:
    """For each file of the patch, those copied included: ORIGINAL, PATCHED, DIFFERENT or MISSING."""
    states = {}
    for path, digests in patch.hashes.items():
        file = tree / path
        if not file.is_file():
            states[path] = MISSING
            continue
        content = file.read_bytes()
        restored = take_out(content, patch.insertions[path])
        if sha256(content) in digests:
            states[path] = ORIGINAL
        else:
            states[path] = PATCHED if restored is not None and sha256(restored) in digests else DIFFERENT
    for path in COPIED:
        file = tree / path
        if not file.exists():
            states[path] = ORIGINAL
        else:
            states[path] = PATCHED if file.read_bytes() == (HERE.parent / path).read_bytes() else DIFFERENT
    return states


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def recognise(tree: Path, patches: list[Patch]) -> tuple[Patch, str]:
    """The patch that fits `tree`, and whether the tree is ORIGINAL or PATCHED.

    Raises:
        Refused: no patch fits; the message names the files that differ or are missing.
    """
    if not (tree / "llava").is_dir():
        hint = f"; did you mean {tree.parent}?" if tree.resolve().name == "llava" else ""
        raise Refused(f"{tree} has no folder llava/. Give the folder that holds it{hint}")
    states_of = {patch.name: file_states(patch, tree) for patch in patches}
    for patch in patches:
        states = set(states_of[patch.name].values())
        if states in ({ORIGINAL}, {PATCHED}):
            return patch, states.pop()
    lines = [f"{tree} is none of the trees that there is a patch for; nothing was changed."]
    for name, states in states_of.items():
        lines += [f"  {name}:"] + [f"    {path}: {explain(path, state)}" for path, state in states.items()]
    raise Refused("\n".join(lines))


def explain(path: str, state: str) -> str:
    """A file's state in words."""
    if path in COPIED:
        texts = {
            ORIGINAL: "not there",
            PATCHED: "there already, as in this repository",
            DIFFERENT: "DIFFERS from this repository's: copy that over it, or in an unpatched tree delete it",
        }
    else:
        texts = {
            ORIGINAL: "as upstream's",
            PATCHED: "patched",
            DIFFERENT: "DIFFERS from upstream's",
            MISSING: "MISSING",
        }
    return texts[state]


def planned_changes(patch: Patch, tree: Path, reverse: bool) -> dict[str, bytes | None]:
    """New content of every file that the patch touches; None where the file goes."""
    change = take_out if reverse else insert
    changes: dict[str, bytes | None] = {
        path: change((tree / path).read_bytes(), insertions) for path, insertions in patch.insertions.items()
    }
    for path in COPIED:
        changes[path] = None if reverse else (HERE.parent / path).read_bytes()
    return changes


def write_all(tree: Path, changes: dict[str, bytes | None]) -> None:
    """Makes all changes or none: whatever fails on the way, the old files are put back before it is raised."""
    before = {path: (tree / path).read_bytes() if (tree / path).exists() else None for path in changes}
    done: list[str] = []
    try:
        for path, content in changes.items():
            if content is not None:
                temporary(tree / path).write_bytes(content)
                if before[path] is not None:
                    shutil.copymode(tree / path, temporary(tree / path))
        for path, content in changes.items():
            done.append(path)
            if content is None:
                (tree / path).unlink()
            else:
                os.replace(temporary(tree / path), tree / path)
    except BaseException:
        for path in done:
            put_back(tree / path, before[path])
        raise
    finally:
        for path in changes:
            temporary(tree / path).unlink(missing_ok=True)


def temporary(file: Path) -> Path:
    return file.with_name(file.name + _TEMPORARY)


def put_back(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink(missing_ok=True)
    elif not file.exists() or file.read_bytes() != content:
        file.write_bytes(content)


def run(tree: Path, check: bool = False, reverse: bool = False) -> int:
    """Applies, checks or reverses; prints what was found or done and returns the exit status.

    Raises:
        Refused: see `recognise`; or a file could not be written, and the tree is as it was.
    """
    patch, state = recognise(tree, read_patches(HERE))
    if check:
        print(f"{tree}: {patch.name}, the patch is {'applied' if state == PATCHED else 'not applied'}")
        return 0 if state == PATCHED else 1
    if state == (ORIGINAL if reverse else PATCHED):
        print(f"{tree}: {patch.name}, the patch is {'not applied' if reverse else 'applied already'}; nothing to do")
        return 0
    changes = planned_changes(patch, tree, reverse)
    try:
        write_all(tree, changes)
    except OSError as error:
        raise Refused(f"{tree} could not be written and is as it was: {error}") from error
    print(f"{tree}: {patch.name}, patch {'reversed' if reverse else 'applied'}:")
    for path in changes:
        print(f"  {('removed' if reverse else 'added') if path in COPIED else 'changed':8} {path}")
    return 0


def main(argv: list[str] | None = None) -> int:
    usage, _, epilog = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=usage, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path, metavar="TREE", help="the folder that holds llava/")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="only say whether the patch is applied")
    action.add_argument("--reverse", action="store_true", help="take the patch out")
    arguments = parser.parse_args(argv)
    try:
        return run(arguments.tree, arguments.check, arguments.reverse)
    except Refused as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
