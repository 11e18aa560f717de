"""Checks every record and picture once, before the first step.

A fault is something that training cannot use; a warning is something that it uses in a way that may surprise. The
findings are kept in a manifest beside the data, whose name follows from data, images and rules, so that later starts
only read it. The manifest also keeps the stamps of the pictures' folders: if one changes, everything is checked again.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.conversation import Conversation, answer_end
from llava.data.cache import cached_file, made_once
from llava.data.checks import Record, other_marker, record_images, unread_keys, unread_pictures
from llava.data.images import ImageStore
from llava.data.parallel import in_processes
from llava.data.parquet_files import unread_columns
from llava.data.table import RecordTable
from llava.data.turns import LabelMasking, check_has_image, normalize_image_tokens, training_turns, turn_rules
from llava.utils.digests import file_stamp, is_settled
from llava.utils.files import replacing
from llava.utils.progress import progress

logger = logging.getLogger(__name__)

FAULTS = {
    "json": "not JSON, or a key occurs twice",
    "schema": "fields are missing or of another type",
    "text": "text is not UTF-8, or too long",
    "placeholders": "number of <image> and of images differ",
    "turns": "speakers that the template cannot write, or nothing to learn",
    "image_missing": "the picture does not exist",
    "image_outside": "the picture is outside the image folder",
    "image_unreadable": "the picture cannot be decoded",
}
WARNINGS = {
    "empty_answer": "an answer without text: only its end is learnt",
    "duplicate_id": "the id of an earlier record",
    "several_frames": "only the first frame is used",
    "turned": "the picture is rotated or mirrored, as LLaVA uses it; --image_orientation exif turns it upright",
    "dark": "16-bit levels that use less than a sixteenth of their range: the picture comes out nearly black",
    "image_in_answer": "the picture is shown within the answer, and is not learnt",
    "end_marker": "a text contains the template's end of an answer: answers may stop there",
    "other_marker": "another program's marker of a picture, which is only text here",
    "unread_picture": "text only, though a field that is not read looks like a picture",
}
_PICTURE_FAULTS = ("image_missing", "image_outside", "image_unreadable")
_FORMAT = 4  # of the manifest; to be raised when the checks find more
_PIECE = 512  # records that a process checks at a time
_WORTH_PROCESSES = 2048  # records
_LISTED_WARNINGS = 1000
_LISTED_KEYS = 100
_SHOWN_KEYS = 20
MOST_FOLDERS = 10_000
"""The most folders of pictures whose stamps are kept; if there are more, none are kept."""
_SHOWN = 10


@dataclass(frozen=True)
class Rules:
    """What is checked besides the rules for all records: the order of speakers, and how much of a picture."""

    template: Conversation
    label_masking: LabelMasking
    full_decode: bool = False

    @cached_property
    def end(self) -> str:
        """What ends an answer, without white space; empty where only that does."""
        return answer_end(self.template).strip()


class Finding(NamedTuple):
    """A fault or a warning, and the picture that it is about."""

    kind: str
    message: str
    picture: str = ""


class Warned(TypedDict):
    """The warnings of one kind: how many there are, and index and message of the first ones; equal ones once."""

    count: int
    first: list[tuple[int, str]]


@dataclass(frozen=True)
class Manifest:
    """The findings of a preflight.

    Args:
        data: the key of the table of records.
        images: `ImageStore.identity`.
        full_decode: whether pictures were decoded in full.
        counts: numbers of records, of those with and without images, and of images.
        faults: by kind, the index and message of every record at fault.
        warnings: by kind, how many there are, and the first ones.
        unread: the most frequent of the fields that nothing reads, with the number of records that have them.
        folders: `ImageStore.folder_stamps` of the pictures' folders; None where there are too many to watch.
        checked: time of the check, in seconds since the epoch.
    """

    data: str
    images: str
    full_decode: bool
    counts: dict[str, int]
    faults: dict[str, list[tuple[int, str]]]
    warnings: dict[str, Warned]
    unread: dict[str, int]
    folders: dict[str, list[int] | None] | None
    checked: float = field(compare=False)

    def bad_records(self) -> list[int]:
        """The indices of all records with faults, ascending."""
        return sorted({index for findings in self.faults.values() for index, _ in findings})


def preflight(
    table: RecordTable, images: ImageStore, rules: Rules, show_progress: bool = True, recheck: bool = False
) -> tuple[Manifest, Path]:
    """The manifest of `table`, and its file; if there is none yet, one process makes it while others wait.

    An existing manifest is used as long as the stamps of the pictures' folders are unchanged and the pictures that were
    at fault still are.

    Args:
        table: as loaded with `check=False`, each record once.
        images: where the records' images are.
        rules: what to check for. A manifest made with `full_decode` also serves without it.
        show_progress: whether the process that checks shows a bar.
        recheck: check again, ignoring an earlier result.

    Raises:
        OSError: no cache folder can be written.
        ChildProcessError: see `in_processes`.
    """
    started = time.time()
    names = {full: _manifest_name(table, images, rules, full) for full in (True, False)}
    paths = [path for name in names.values() if (path := cached_file(name, table.folders, _is_whole))]
    since = started if recheck else 0.0
    if paths and not recheck:
        manifest, path = max(((_read(path), path) for path in paths), key=lambda pair: pair[0].checked)
        since = manifest.checked  # an older manifest is out of date
        if manifest.full_decode >= rules.full_decode:
            if _still_holds(manifest, table, images, rules):
                return manifest, path
            logger.info("pictures have changed since the check of %s: checking again", when(manifest))
            since = started
    make = partial(_write, table, images, rules, show_progress)
    path = made_once(names[rules.full_decode], table.folders, make, _is_whole, since)
    return _read(path), path


def when(manifest: Manifest) -> str:
    """The time of a check, as messages write it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.checked))


def _read(path: Path) -> Manifest:
    return Manifest(**json.loads(path.read_text(encoding="utf-8")))


def _still_holds(manifest: Manifest, table: RecordTable, images: ImageStore, rules: Rules) -> bool:
    """Whether the pictures' folders are unchanged and pictures at fault still are, which may be fixed in place."""
    kinds = _PICTURE_FAULTS
    if manifest.folders is not None:
        if images.folder_stamps(manifest.folders) != manifest.folders:
            return False
        kinds = ("image_unreadable",)  # a change to the others shows in the folders
    bad = {index for kind in kinds for index, _ in manifest.faults.get(kind, ())}
    return images.is_archive or all(
        any(problem.kind in _PICTURE_FAULTS for problem in record_findings(table.record(index), images, rules))
        for index in sorted(bad)
    )


def usable_records(table: RecordTable, manifest: Manifest, on_bad_record: str, command: str) -> RecordTable:
    """The records of an epoch of `table`, without those with faults.

    Args:
        table: the table that the manifest was made of.
        manifest: names the records with faults.
        on_bad_record: `skip`, or `error` to refuse them.
        command: the command that shows all faults, for the message.

    Raises:
        ValueError: there are records with faults that are not to be skipped, or no record is left.
    """
    records = _without_faults(table, manifest, on_bad_record, command).epoch()
    records.checked_at = manifest.checked
    return records


def _without_faults(table: RecordTable, manifest: Manifest, on_bad_record: str, command: str) -> RecordTable:
    bad = manifest.bad_records()
    if not bad:
        return table
    shown = [text for findings in manifest.faults.values() for _, text in findings[: _SHOWN // 2]][:_SHOWN]
    lines = "\n  ".join(shown)
    if on_bad_record == "error" or len(bad) == len(table):
        raise ValueError(
            f"{len(bad):,} of {len(table):,} records cannot be used ({fault_kinds(manifest)}):\n  {lines}\n"
            f"all of them: {command} --list\n"
            + ("no record is left" if len(bad) == len(table) else "--on_bad_record skip leaves them out")
        )
    return table.without(bad)


def write_quarantine(table: RecordTable, manifest: Manifest, path: Path) -> None:
    """Writes every fault with its record's text, one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        for kind, findings in manifest.faults.items():
            for index, message in findings:
                line = {"record": index, "kind": kind, "fault": message, "text": table.text(index)}
                file.write(json.dumps(line) + "\n")


def fault_kinds(manifest: Manifest) -> str:
    """The number of faults of each kind, in words."""
    return ", ".join(f"{len(findings):,} {kind}" for kind, findings in manifest.faults.items())


def unread_fields(manifest: Manifest) -> str:
    """The fields that nothing reads, each with the number of records that have it."""
    named = [f"{key!r:.60} {count:,}" for key, count in list(manifest.unread.items())[:_SHOWN_KEYS]]
    more = len(manifest.unread) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


# --- the manifest -----------------------------------------------------------------------------------------------------


def _manifest_name(table: RecordTable, images: ImageStore, rules: Rules, full_decode: bool) -> str:
    order = turn_rules(rules.template, rules.label_masking)
    settings = [str(_FORMAT), images.identity(), order, rules.end, str(full_decode)]
    settings += map(str, (*table.sources, *table.image_folders, images.setting))  # which the findings name
    # The key does not cover the bytes of images in rows.
    shards = [str(file_stamp(source)) for source in table.sources if source.suffix == ".parquet"]
    return f"{table.key[:16]}.{sha256(' '.join(settings + shards).encode()).hexdigest()[:16]}.preflight.json"


def _is_whole(path: Path) -> bool:
    try:
        return isinstance(_read(path).counts["records"], int)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _write(table: RecordTable, images: ImageStore, rules: Rules, show_progress: bool, target: Path) -> None:
    manifest = _checked(table, images, rules, show_progress)
    target.write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")


def _checked(table: RecordTable, images: ImageStore, rules: Rules, show_progress: bool) -> Manifest:
    faults: dict[str, list[tuple[int, str]]] = {kind: [] for kind in FAULTS}
    warnings: dict[str, dict[str, list]] = {kind: {} for kind in WARNINGS}  # by message: index, text, how many
    counts: Counter[str] = Counter()
    ids = np.zeros(len(table), np.uint64)
    with_images = text_only = num_images = 0
    unread: Counter[str] = Counter()
    folders: set[str] = set()
    started = time.time()

    def add(index: int, kind: str, text: str, message: str) -> None:
        if kind in faults:
            faults[kind].append((index, text))
            return
        counts[kind] += 1
        if message in warnings[kind] or len(warnings[kind]) < _LISTED_WARNINGS:
            warnings[kind].setdefault(message, [index, text, 0])[2] += 1

    pieces = [range(start, min(start + _PIECE, len(table))) for start in range(0, len(table), _PIECE)]
    state = (table, images, rules)
    with progress(len(table), "checking records", "records", hidden=not show_progress) as bar:
        for part in in_processes(_check_piece, state, pieces, worth=len(table) >= _WORTH_PROCESSES):
            for finding in part.findings:
                add(*finding)
            ids[part.piece.start : part.piece.stop] = part.ids
            with_images += part.with_images
            text_only += part.text_only
            num_images += part.images
            unread += part.unread
            folders |= part.folders
            bar.update(len(part.piece))
    for index, first in (map(table.position, pair) for pair in _repeated(ids)):
        source, place = table.source(first)
        where = "" if source == table.source(index)[0] else f" of {source}"
        text = f"{table.named(index)}: the id of record {place}{where}"
        add(index, "duplicate_id", text, text)
    for source in table.sources:
        if source.suffix == ".parquet":
            columns, rows = unread_columns(source)
            unread += dict.fromkeys(columns, rows)
    stamps = None
    if len(folders) <= MOST_FOLDERS:
        # A change during the check may not show in a stamp; without a stamp the next start checks again.
        current = images.folder_stamps(folders).items()
        stamps = {name: [] if stamp and not is_settled(stamp, started) else stamp for name, stamp in current}
    totals = {"records": len(table), "with_images": with_images, "text_only": text_only, "images": num_images}
    return Manifest(
        table.key,
        images.identity(),
        rules.full_decode,
        totals,
        {kind: findings for kind, findings in faults.items() if findings},
        {kind: _warned(texts.values(), counts[kind]) for kind, texts in warnings.items() if texts},
        dict(unread.most_common(_LISTED_KEYS)),
        stamps,
        time.time(),
    )


def _warned(findings: Iterable[list], count: int) -> Warned:
    alike = ((index, text, f" (and {more - 1:,} like it)" if more > 1 else "") for index, text, more in findings)
    return {"count": count, "first": [(index, text + more) for index, text, more in alike]}


def _repeated(ids: np.ndarray) -> Iterator[tuple[int, int]]:
    """The positions whose id an earlier position has, each with the first position that has it; 0 means no id."""
    order = ids.argsort(kind="stable")
    same = (ids[order][1:] == ids[order][:-1]) & (ids[order][1:] != 0)
    first = np.maximum.accumulate(np.where(np.concatenate(([True], ~same)), np.arange(len(ids)), 0))
    pairs = np.stack([order[1:][same], order[first[1:][same]]], 1)
    yield from map(tuple, pairs[pairs[:, 0].argsort()].tolist())


# --- a record ---------------------------------------------------------------------------------------------------------


class _Checked(NamedTuple):
    """The result for a piece: index, kind, text and message of each finding; hashes of the ids; counts; folders."""

    piece: range
    findings: list[tuple[int, str, str, str]]
    ids: np.ndarray
    with_images: int
    text_only: int
    images: int
    unread: Counter[str]
    folders: set[str]


def _check_piece(state: tuple[RecordTable, ImageStore, Rules], piece: range) -> _Checked:
    table, images, rules = state
    findings: list[tuple[int, str, str, str]] = []
    ids = np.zeros(len(piece), np.uint64)
    with_images = text_only = num_images = 0
    unread: Counter[str] = Counter()
    folders: set[str] = set()
    for place, index in enumerate(map(table.position, piece)):
        if problem := table.problem(index):
            with suppress(ValueError, RecursionError, AttributeError):  # the text of some cannot be parsed
                unread.update(unread_keys(json.loads(table.text(index))).keys())
            findings.append((index, problem.kind, f"{table.named(index)}: {problem.message}", problem.message))
            continue
        record = table.record(index)
        ids[place] = _id_hash(record.get("id"))
        unread.update(unread_keys(record).keys())
        names = record_images(record)
        folders |= images.folders(names)
        with_images += bool(names)
        text_only += not names
        num_images += len(names)
        for finding in record_findings(record, images, rules):
            named = table.named(index) + (f", image {finding.picture}" if finding.picture else "")
            findings.append((index, finding.kind, f"{named}: {finding.message}", finding.message))
    return _Checked(piece, findings, ids, with_images, text_only, num_images, unread, folders)


def record_findings(record: Record, images: ImageStore, rules: Rules) -> Iterator[Finding]:
    """Faults and warnings of a well-formed record."""
    names = record_images(record)
    try:
        check_has_image(rules.template, bool(names))
        turns = training_turns(record["conversations"], rules.template, rules.label_masking, bool(names))
        if names:
            turns = normalize_image_tokens(turns, rules.template, rules.label_masking)
            if (written := sum(text.count(DEFAULT_IMAGE_TOKEN) for _, text in turns)) != len(names):
                yield Finding("placeholders", f"{len(names)} images, but {written} places for them in the prompt")
        elif unread := unread_pictures(record):
            yield Finding("unread_picture", f"no picture under 'image'; {', '.join(map(repr, unread))} is not read")
    except ValueError as error:
        yield Finding("turns", str(error))
    yield from _text_warnings(record, rules)
    for name in names:
        if problem := images.check(name, rules.full_decode):
            is_fault = problem.kind in FAULTS  # whose message names the picture
            yield Finding(*problem, "" if is_fault else images.name(name))


def _text_warnings(record: Record, rules: Rules) -> Iterator[Finding]:
    """What is odd about the texts: at most one finding of each kind."""
    messages: dict[str, str] = {}
    for number, turn in enumerate(record["conversations"]):
        text, is_answer = turn["value"], turn["from"] == "gpt"
        if is_answer and not text.strip():
            messages.setdefault("empty_answer", f"turn {number}: the answer is empty")
        if is_answer and DEFAULT_IMAGE_TOKEN in text:
            messages.setdefault("image_in_answer", f"turn {number}: {DEFAULT_IMAGE_TOKEN} in an answer")
        if rules.end and rules.end in text:
            messages.setdefault("end_marker", f"turn {number}: {rules.end!r} in the text, which ends answers here")
        if marker := other_marker(text):
            advice = f"{marker!r} is only text here; write {DEFAULT_IMAGE_TOKEN} where a picture belongs"
            messages.setdefault("other_marker", f"turn {number}: {advice}")
    yield from map(Finding, messages.keys(), messages.values())


def _id_hash(identifier: object) -> int:
    if identifier is None:
        return 0
    return int.from_bytes(blake2b(repr(identifier).encode("utf-8", "replace"), digest_size=8).digest(), "little")
