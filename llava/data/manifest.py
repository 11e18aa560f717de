"""Checks every record and picture once, before the first step.

A fault is what training could not use; a warning is what it uses otherwise than one may think. What is found is kept in
a manifest beside the data, under a name that says data, images and rules, so that later starts only read it.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from llava.conversation import Conversation
from llava.data.cache import cached_file, file_stamp, made_once
from llava.data.checks import Problem, Record, record_images
from llava.data.images import ImageStore
from llava.data.parallel import in_processes
from llava.data.records import RecordTable
from llava.data.turns import LabelMasking, check_has_image, training_turns, turn_rules

FAULTS = {
    "json": "not JSON, or a key occurs twice",
    "schema": "fields are missing or of another type",
    "text": "text is not UTF-8, or too long",
    "placeholders": "number of <image> and of images differ",
    "turns": "speakers that the template cannot write, or nothing to learn",
    "image_missing": "the picture does not exist",
    "image_outside": "the picture lies outside the image folder",
    "image_unreadable": "the picture cannot be decoded",
}
WARNINGS = {
    "empty_answer": "an answer without text: its end is learnt",
    "duplicate_id": "the id of an earlier record",
    "several_frames": "only the first frame is used",
}
_FORMAT = 1  # of the manifest; to be raised when the checks find more
_PIECE = 512  # records that a process checks at a time
_WORTH_PROCESSES = 2048  # records
_LISTED_WARNINGS = 1000
_SHOWN = 10


@dataclass(frozen=True)
class Rules:
    """What is checked beside what holds for all records: the order of speakers, and how much of a picture."""

    template: Conversation
    label_masking: LabelMasking
    full_decode: bool = False


@dataclass(frozen=True)
class Manifest:
    """What a preflight found.

    Args:
        data: the key of the table of records.
        images: `ImageStore.identity`.
        counts: records, those with images and without, images.
        faults: by kind, every record's index and message.
        warnings: by kind, how many, and the first ones.
    """

    data: str
    images: str
    full_decode: bool
    counts: dict[str, int]
    faults: dict[str, list[tuple[int, str]]]
    warnings: dict[str, dict[str, Any]]

    def bad_records(self) -> list[int]:
        """The indices of all records with faults, rising."""
        return sorted({index for found in self.faults.values() for index, _ in found})


def preflight(
    table: RecordTable, images: ImageStore, rules: Rules, show_progress: bool = True
) -> tuple[Manifest, Path]:
    """The manifest of `table`, and where it is kept; made by one process where there is none, while others wait.

    Args:
        table: as loaded with `check=False`, whole.
        images: where its images are.
        rules: what to check for. A manifest that was made with `full_decode` serves without it too.
        show_progress: whether the process that checks shows a bar.

    Raises:
        OSError: no cache folder can be written.
        ChildProcessError: as `in_processes`.
    """
    names = {full: _manifest_name(table, images, rules, full) for full in (True, rules.full_decode)}
    found = (cached_file(name, table.folders, _is_whole) for name in names.values())
    path = next((path for path in found if path), None) or made_once(
        names[rules.full_decode], table.folders, partial(_write, table, images, rules, show_progress), _is_whole
    )
    return Manifest(**json.loads(path.read_text(encoding="utf-8"))), path


def usable_records(table: RecordTable, manifest: Manifest, on_bad_record: str, command: str) -> RecordTable:
    """`table` without the records with faults.

    Args:
        on_bad_record: `skip`, or `error` to refuse them.
        command: shows all faults.

    Raises:
        ValueError: there are some and they are not to be skipped, or no record is left.
    """
    bad = manifest.bad_records()
    if not bad:
        return table
    shown = [text for found in manifest.faults.values() for _, text in found[: _SHOWN // 2]][:_SHOWN]
    lines = "\n  ".join(shown)
    if on_bad_record == "error" or len(bad) == table.total:
        raise ValueError(
            f"{len(bad):,} of {table.total:,} records cannot be used ({fault_kinds(manifest)}):\n  {lines}\n"
            f"all of them: {command} --list\n"
            + ("no record is left" if len(bad) == table.total else "--on_bad_record skip leaves them out")
        )
    return table.without(bad)


def write_quarantine(table: RecordTable, manifest: Manifest, path: Path) -> None:
    """Writes every fault with its record's text, a JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for kind, found in manifest.faults.items():
            for index, message in found:
                line = {"record": index, "kind": kind, "fault": message, "text": table.text(index)}
                file.write(json.dumps(line) + "\n")
    os.replace(temporary, path)


def fault_kinds(manifest: Manifest) -> str:
    """How many faults there are of each kind."""
    return ", ".join(f"{len(found):,} {kind}" for kind, found in manifest.faults.items())


# --- the manifest -----------------------------------------------------------------------------------------------------


def _manifest_name(table: RecordTable, images: ImageStore, rules: Rules, full_decode: bool) -> str:
    settings = [str(_FORMAT), images.identity(), turn_rules(rules.template, rules.label_masking), str(full_decode)]
    # The key does not say the bytes of images in rows.
    shards = [str(file_stamp(source)) for source in table.sources if source.suffix == ".parquet"]
    return f"{table.key[:16]}.{sha256(' '.join(settings + shards).encode()).hexdigest()[:16]}.preflight.json"


def _is_whole(path: Path) -> bool:
    try:
        return isinstance(Manifest(**json.loads(path.read_text(encoding="utf-8"))).counts["records"], int)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _write(table: RecordTable, images: ImageStore, rules: Rules, show_progress: bool, target: Path) -> None:
    manifest = _checked(table, images, rules, show_progress)
    target.write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")


def _checked(table: RecordTable, images: ImageStore, rules: Rules, show_progress: bool) -> Manifest:
    faults: dict[str, list[tuple[int, str]]] = {kind: [] for kind in FAULTS}
    warnings: dict[str, dict[str, Any]] = {kind: {"count": 0, "first": []} for kind in WARNINGS}
    ids = np.zeros(table.total, np.uint64)
    with_images = num_images = 0

    def add(index: int, kind: str, text: str) -> None:
        if kind in faults:
            faults[kind].append((index, text))
        else:
            warnings[kind]["count"] += 1
            if len(warnings[kind]["first"]) < _LISTED_WARNINGS:
                warnings[kind]["first"].append((index, text))

    pieces = [range(start, min(start + _PIECE, table.total)) for start in range(0, table.total, _PIECE)]
    state = (table, images, rules)
    with tqdm(total=table.total, desc="checking records", disable=not show_progress, mininterval=2) as bar:
        for found in in_processes(_check_piece, state, pieces, worth=table.total >= _WORTH_PROCESSES):
            for finding in found.findings:
                add(*finding)
            ids[found.piece.start : found.piece.stop] = found.ids
            with_images += found.with_images
            num_images += found.images
            bar.update(len(found.piece))
    for index, first in _repeated(ids):
        add(index, "duplicate_id", f"{table.named(index)}: the id of record {first}")
    counts = {"records": table.total, "with_images": with_images, "text_only": table.total - with_images}
    return Manifest(
        table.key,
        images.identity(),
        rules.full_decode,
        counts | {"images": num_images},
        {kind: found for kind, found in faults.items() if found},
        {kind: found for kind, found in warnings.items() if found["count"]},
    )


def _repeated(ids: np.ndarray) -> Iterator[tuple[int, int]]:
    """The records whose id an earlier one has, and the first that has it; 0 is no id."""
    order = ids.argsort(kind="stable")
    same = (ids[order][1:] == ids[order][:-1]) & (ids[order][1:] != 0)
    first = np.maximum.accumulate(np.where(np.concatenate(([True], ~same)), np.arange(len(ids)), 0))
    pairs = np.stack([order[1:][same], order[first[1:][same]]], 1)
    yield from map(tuple, pairs[pairs[:, 0].argsort()].tolist())


# --- a record ---------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """What was found in a piece: (index, kind, message) of each finding; hashes of the ids; counts."""

    piece: range
    findings: list[tuple[int, str, str]]
    ids: np.ndarray
    with_images: int
    images: int


def _check_piece(state: tuple[RecordTable, ImageStore, Rules], piece: range) -> _Found:
    table, images, rules = state
    findings: list[tuple[int, str, str]] = []
    ids = np.zeros(len(piece), np.uint64)
    with_images = num_images = 0
    for place, index in enumerate(piece):
        if problem := table.problem(index):
            findings.append((index, problem.kind, f"{table.named(index)}: {problem.message}"))
            continue
        record = table[index]
        ids[place] = _id_hash(record.get("id"))
        names = record_images(record)
        with_images += bool(names)
        num_images += len(names)
        for problem in record_findings(record, images, rules):
            findings.append((index, problem.kind, f"{table.named(index)}: {problem.message}"))
    return _Found(piece, findings, ids, with_images, num_images)


def record_findings(record: Record, images: ImageStore, rules: Rules) -> Iterator[Problem]:
    """Faults and warnings of a well-formed record."""
    names = record_images(record)
    try:
        check_has_image(rules.template, bool(names))
        training_turns(record["conversations"], rules.template, rules.label_masking, bool(names))
    except ValueError as error:
        yield Problem("turns", str(error))
    for number, turn in enumerate(record["conversations"]):
        if turn["from"] == "gpt" and not turn["value"].strip():
            yield Problem("empty_answer", f"turn {number}: the answer is empty")
            break
    for name in names:
        if problem := images.check(name, rules.full_decode):
            yield problem


def _id_hash(identifier: Any) -> int:
    if identifier is None:
        return 0
    return int.from_bytes(blake2b(repr(identifier).encode("utf-8", "replace"), digest_size=8).digest(), "little")
