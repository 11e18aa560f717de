"""Checks every record and picture once, before the first step.

A fault is something that training cannot use; a warning is something that it uses in a way that may surprise. The
findings are kept in a manifest beside the data, whose name follows from data, image folder and rules, so that later
starts only read it; the size of every picture, which its header gave, is kept with it.
"""

import io
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.conversation import Conversation
from llava.data.cache import made_once
from llava.data.checks import ImagePlace, Problem, Record, other_marker, record_images, unread_keys
from llava.data.images import ImageStore
from llava.data.parallel import in_processes
from llava.data.parquet_files import unread_columns
from llava.data.table import RecordTable
from llava.data.turns import LabelMasking, check_has_image, normalize_image_tokens, training_turns, turn_rules
from llava.utils.digests import bytes_digest, file_stamp
from llava.utils.files import replacing, write_bytes
from llava.utils.progress import progress

PICTURE_FAULTS = ("image_missing", "image_outside", "image_unreadable")
FAULTS = ("json", "schema", "text", "placeholders", "turns", *PICTURE_FAULTS)
"""Their kinds; docs/data.md says what each means, as of the warnings `other_marker`, `turned` and `dark`."""
_FORMAT = 6  # of the manifest; to be raised when the checks find more
_PIECE = 512  # records that a process checks at a time
_WORTH_PROCESSES = 2048  # records
_LISTED_WARNINGS, _LISTED_KEYS = 1000, 20
_SHOWN = 10


@dataclass(frozen=True)
class Rules:
    """What is checked besides the rules for all records: the order of speakers, and how much of a picture."""

    template: Conversation
    label_masking: LabelMasking
    full_decode: bool = False


@dataclass(frozen=True)
class Manifest:
    """The findings of a preflight.

    Args:
        full_decode: whether pictures were decoded in full.
        counts: numbers of records, of those with and without images, of images, and of warnings of each kind.
        faults: by kind, the index and message of every record at fault.
        warnings: by kind, the first ones, alike.
        unread: the fields that nothing reads, with the number of records that have them.
        sizes: SHA-256 and name of the file of the pictures' sizes, see `sizes_file`.
        checked: when the check ended, in seconds since the epoch.
    """

    full_decode: bool
    counts: dict[str, int]
    faults: dict[str, list[tuple[int, str]]]
    warnings: dict[str, list[tuple[int, str]]]
    unread: dict[str, int]
    sizes: str
    checked: float = field(compare=False)

    def bad_records(self) -> list[int]:
        """The indices of all records with faults, ascending."""
        return sorted({index for findings in self.faults.values() for index, _ in findings})


def preflight(
    table: RecordTable, images: ImageStore, rules: Rules, show_progress: bool = True, recheck: bool = False
) -> tuple[Manifest, Path]:
    """The manifest of `table`, and its file; if there is none yet, one process makes it while others wait.

    An existing manifest is used as long as the pictures that were at fault still are.

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

    def is_current(path: Path) -> bool:
        manifest = _read(path)
        if rules.full_decode > manifest.full_decode or recheck and manifest.checked < started:
            return False
        sizes = sizes_file(manifest, path)
        return sizes.is_file() and bytes_digest(sizes) == manifest.sizes and _still_at_fault(manifest, table, images)

    make = partial(_write, table, images, rules, show_progress)
    path = made_once(_manifest_name(table, images, rules), table.folders, make, is_current)
    return _read(path), path


def _still_at_fault(manifest: Manifest, table: RecordTable, images: ImageStore) -> bool:
    bad = {index for kind in PICTURE_FAULTS for index, _ in manifest.faults.get(kind, ())}
    check = partial(images.check, full_decode=manifest.full_decode)
    return all(
        any(problem and problem.kind in FAULTS for _, problem in map(check, record_images(table.record(index))))
        for index in sorted(bad)
    )


def sizes_file(manifest: Manifest, path: Path) -> Path:
    """The file, beside the manifest's, with width and height of each record's only picture [N, 2]; zeros for others."""
    return path.with_name(f"{manifest.sizes}.sizes.npy")


def when(manifest: Manifest) -> str:
    """The time of a check, as messages write it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.checked))


def usable_records(
    table: RecordTable, manifest: Manifest, on_bad_record: str, command: str, path: Path | None = None
) -> RecordTable:
    """The records of an epoch of `table`, without those with faults.

    Args:
        table: the table that the manifest was made of.
        manifest: names the records with faults.
        on_bad_record: `skip`, or `error` to refuse them.
        command: the command that shows all faults, for the message.
        path: the manifest's file, from which the records then have their pictures' sizes.

    Raises:
        ValueError: there are records with faults that are not to be skipped, or no record is left.
    """
    bad = manifest.bad_records()
    if bad and (on_bad_record == "error" or len(bad) == len(table)):
        shown = [text for findings in manifest.faults.values() for _, text in findings[: _SHOWN // 2]][:_SHOWN]
        lines = "\n  ".join(shown)
        raise ValueError(
            f"{len(bad):,} of {len(table):,} records cannot be used ({fault_kinds(manifest)}):\n  {lines}\n"
            f"all of them: {command} --list\n"
            + ("no record is left" if len(bad) == len(table) else "--on_bad_record skip leaves them out")
        )
    records = table.without(bad).epoch()
    records.sizes = path and sizes_file(manifest, path)
    return records


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


def warning_kinds(manifest: Manifest) -> str:
    """The number of warnings of each kind, in words."""
    return ", ".join(f"{manifest.counts[kind]:,} {kind}" for kind in manifest.warnings)


def unread_fields(manifest: Manifest) -> str:
    """The fields that nothing reads, each with the number of records that have it."""
    return ", ".join(f"{key!r:.60} {count:,}" for key, count in manifest.unread.items())


# --- the manifest -----------------------------------------------------------------------------------------------------


def _manifest_name(table: RecordTable, images: ImageStore, rules: Rules) -> str:
    order = turn_rules(rules.template, rules.label_masking)
    settings = [str(_FORMAT), images.identity(), order]
    settings += map(str, (*table.sources, *table.image_folders, images.setting))  # which the findings name
    # The key does not cover the bytes of images in rows.
    shards = [str(file_stamp(source)) for source in table.sources if source.suffix == ".parquet"]
    return f"{table.key[:16]}.{sha256(' '.join(settings + shards).encode()).hexdigest()[:16]}.preflight.json"


def _read(path: Path) -> Manifest:
    return Manifest(**json.loads(path.read_text(encoding="utf-8")))


def _write(table: RecordTable, images: ImageStore, rules: Rules, show_progress: bool, target: Path) -> None:
    manifest, sizes = _checked(table, images, rules, show_progress)
    stored = io.BytesIO()
    np.save(stored, sizes)
    digest = sha256(stored.getvalue()).hexdigest()
    write_bytes(target.with_name(f"{digest}.sizes.npy"), stored.getvalue(), contended=True)
    target.write_text(json.dumps(asdict(replace(manifest, sizes=digest)), indent=1), encoding="utf-8")


def _checked(table: RecordTable, images: ImageStore, rules: Rules, show_progress: bool) -> tuple[Manifest, np.ndarray]:
    """The manifest, without the digest of the sizes, and these."""
    faults: dict[str, list[tuple[int, str]]] = {kind: [] for kind in FAULTS}
    warnings: dict[str, list[tuple[int, str]]] = {}
    counts = Counter(records=len(table), with_images=0, text_only=0, images=0)
    unread: Counter[str] = Counter()
    sizes = np.zeros((table.total, 2), np.int32)
    pieces = [range(start, min(start + _PIECE, len(table))) for start in range(0, len(table), _PIECE)]
    state = (table, images, rules)
    with progress(len(table), "checking records", "records", hidden=not show_progress) as bar:
        for part in in_processes(_check_piece, state, pieces, worth=len(table) >= _WORTH_PROCESSES):
            for index, kind, text in part.findings:
                if kind in faults:
                    faults[kind].append((index, text))
                    continue
                counts[kind] += 1
                if counts[kind] <= _LISTED_WARNINGS:
                    warnings.setdefault(kind, []).append((index, text))
            counts.update(part.counts)
            unread.update(part.unread)
            sizes[part.positions] = part.sizes
            bar.update(len(part.positions))
    for source in table.sources:
        if source.suffix == ".parquet":
            columns, rows = unread_columns(source)
            unread.update(dict.fromkeys(columns, rows))
    manifest = Manifest(
        rules.full_decode,
        dict(counts),
        {kind: findings for kind, findings in faults.items() if findings},
        warnings,
        dict(unread.most_common(_LISTED_KEYS)),
        "",
        time.time(),
    )
    return manifest, sizes


# --- a record ---------------------------------------------------------------------------------------------------------


class _Checked(NamedTuple):
    """The result for a piece: index, kind and text of each finding; counts; and by record the picture's size."""

    findings: list[tuple[int, str, str]]
    counts: Counter[str]
    unread: Counter[str]
    positions: list[int]
    sizes: np.ndarray


def _check_piece(state: tuple[RecordTable, ImageStore, Rules], piece: range) -> _Checked:
    table, images, rules = state
    part = _Checked([], Counter(), Counter(), list(map(table.position, piece)), np.zeros((len(piece), 2), np.int32))
    for place, index in enumerate(part.positions):
        if problem := table.problem(index):
            with suppress(ValueError, RecursionError, AttributeError):  # the text of some cannot be parsed
                part.unread.update(unread_keys(json.loads(table.text(index))))
            part.findings.append((index, problem.kind, f"{table.named(index)}: {problem.message}"))
            continue
        record = table.record(index)
        names = record_images(record)
        part.unread.update(unread_keys(record))
        part.counts.update(with_images=bool(names), text_only=not names, images=len(names))
        for finding in (
            *text_findings(record, names, rules),
            *picture_findings(names, images, rules, part.sizes[place]),
        ):
            part.findings.append((index, finding.kind, f"{table.named(index)}: {finding.message}"))
    return part


def text_findings(record: Record, images: list[ImagePlace], rules: Rules) -> Iterator[Problem]:
    """Faults and warnings of a well-formed record's turns."""
    try:
        check_has_image(rules.template, bool(images))
        turns = training_turns(record["conversations"], rules.template, rules.label_masking, bool(images))
        if images:
            turns = normalize_image_tokens(turns, rules.template, rules.label_masking)
            if (written := sum(text.count(DEFAULT_IMAGE_TOKEN) for _, text in turns)) != len(images):
                yield Problem("placeholders", f"{len(images)} images, but {written} places for them in the prompt")
    except ValueError as error:
        yield Problem("turns", str(error))
    if marker := next(filter(None, (other_marker(turn["value"]) for turn in record["conversations"])), None):
        advice = f"write {DEFAULT_IMAGE_TOKEN} where a picture belongs"
        yield Problem("other_marker", f"{marker!r} is only text here; {advice}")


def picture_findings(places: list[ImagePlace], images: ImageStore, rules: Rules, size: np.ndarray) -> Iterator[Problem]:
    """Faults and warnings of a record's pictures; `size` gets width and height if it is the only one."""
    for place in places:
        shape, problem = images.check(place, rules.full_decode)
        if len(places) == 1:
            size[:] = shape
        if problem:
            is_fault = problem.kind in FAULTS  # whose message names the picture
            yield problem if is_fault else Problem(problem.kind, f"image {images.name(place)}: {problem.message}")
