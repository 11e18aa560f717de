"""Checks every record and picture once, before the first step.

    python -m llava.data.preflight --data_path DATA --image_folder IMAGES --version qwen_1_5 --label_masking upstream

A fault is something that training cannot use; a warning is something that it uses in a way that may surprise. The
findings are kept in a manifest beside the data, whose name follows from data, image folder and rules, so that later
starts only read it; the size of every picture, which its header gave, is kept with it. Training does the same before
its first step. Exit status 1 if there are faults.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from llava.constants import DEFAULT_IMAGE_TOKEN
from llava.conversation import Conversation, get_template
from llava.data.cache import made_once
from llava.data.checks import ImagePlace, Problem, Record, other_marker, record_images
from llava.data.errors import named_by
from llava.data.images import ImageStore
from llava.data.parallel import in_processes
from llava.data.records import DEFAULT_SEED, RecordTable, load_records, source_lines
from llava.data.turns import LABEL_MASKINGS, LabelMasking, check_label_masking, normalize_image_tokens, training_turns
from llava.utils.commands import Parser, exit_status
from llava.utils.digests import file_stamp
from llava.utils.files import replacing
from llava.utils.progress import progress

PICTURE_FAULTS = ("image_missing", "image_outside", "image_unreadable")
FAULTS = ("json", "schema", "text", "placeholders", "turns", *PICTURE_FAULTS)
"""Their kinds; docs/data.md says what each means, as of the warnings `other_marker` and `turned`."""
_FORMAT = 9  # of the manifest; to be raised when the checks find more
_PIECE = 512  # records that a process checks at a time
_WORTH_PROCESSES = 2048  # records
_LISTED_WARNINGS = 1000
_SHOWN = 10


@dataclass(frozen=True)
class Rules:
    """What is checked besides the rules for all records: the order of speakers, and how much of a picture."""

    template: Conversation
    label_masking: LabelMasking
    full_decode: bool = False


@dataclass(frozen=True)
class Manifest:
    """The findings of a preflight: by kind, index and message of every record at fault, and of the first warnings."""

    full_decode: bool  # whether pictures were decoded in full
    counts: dict[str, int]  # of records, of those with and without images, of images, and of findings of each kind
    faults: dict[str, list[tuple[int, str]]]
    warnings: dict[str, list[tuple[int, str]]]
    checked: float = field(compare=False)  # when the check ended, in seconds since the epoch

    def bad_records(self) -> list[int]:
        """The indices of all records with faults, ascending."""
        return sorted({index for findings in self.faults.values() for index, _ in findings})

    def kinds(self, findings: Iterable[str]) -> str:
        """The number of faults or warnings of each kind, in words."""
        return ", ".join(f"{self.counts[kind]:,} {kind}" for kind in findings)


def preflight(
    table: RecordTable, images: ImageStore, rules: Rules, show_progress: bool = True
) -> tuple[Manifest, Path]:
    """The manifest of `table`, and its file; if there is none yet, one process makes it while others wait.

    `table` has each record once, as loaded with `check=False`. An existing manifest is used as long as the pictures
    that were at fault still are; one made with `full_decode` also serves without it.

    Raises:
        OSError: no cache folder can be written.
        ChildProcessError: see `in_processes`.
    """

    def is_current(path: Path) -> bool:
        manifest = _read(path)
        return rules.full_decode <= manifest.full_decode and _still_at_fault(manifest, table, images)

    settings = [str(_FORMAT), images.identity(), repr(rules.template), rules.label_masking]
    settings += map(str, (*table.sources, *table.image_folders, images.setting))  # which the findings name
    settings += [str(file_stamp(source)) for source in table.sources if source.suffix == ".parquet"]  # for images
    name = f"{table.key[:16]}.{sha256(' '.join(settings).encode()).hexdigest()[:16]}.preflight.npz"
    path = made_once(name, table.folders, partial(_write, table, images, rules, show_progress), is_current)
    return _read(path), path


def _read(path: Path) -> Manifest:
    with np.load(path) as stored:
        return Manifest(**json.loads(stored["manifest"].tobytes()))


def _still_at_fault(manifest: Manifest, table: RecordTable, images: ImageStore) -> bool:
    bad = {index for kind in PICTURE_FAULTS for index, _ in manifest.faults.get(kind, ())}
    check = partial(images.check, full_decode=manifest.full_decode)
    return all(
        any(problem and problem.kind in FAULTS for _, problem in map(check, record_images(table[index])))
        for index in sorted(bad)
    )


def usable_records(
    table: RecordTable, manifest: Manifest, on_bad_record: str, command: str, path: Path | None = None
) -> RecordTable:
    """The records of an epoch of `table`, without those with faults, which `on_bad_record` skips or refuses (`error`).

    `manifest` and its `path`, from which the records have their pictures' sizes, are those of `table`; `command` shows
    all faults.

    Raises:
        ValueError: there are records with faults that are not to be skipped, or no record is left.
    """
    bad = manifest.bad_records()
    if bad and (on_bad_record == "error" or len(bad) == len(table)):
        shown = [text for findings in manifest.faults.values() for _, text in findings[: _SHOWN // 2]][:_SHOWN]
        advice = "no record is left" if len(bad) == len(table) else "--on_bad_record skip leaves them out"
        what = f"{len(bad):,} of {len(table):,} records cannot be used ({manifest.kinds(manifest.faults)}):"
        raise ValueError("\n  ".join([what, *shown]) + f"\nall of them: {command} --list\n{advice}")
    records = table.without(bad).epoch()
    records.sizes = path
    return records


def write_quarantine(table: RecordTable, manifest: Manifest, path: Path) -> None:
    """Writes every fault with its record's text, one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        for kind, findings in manifest.faults.items():
            for index, message in findings:
                line = {"record": index, "kind": kind, "fault": message, "text": table.text(index)}
                file.write(json.dumps(line) + "\n")


# --- the check --------------------------------------------------------------------------------------------------------

Part = tuple[list[tuple[int, Problem]], Counter[str], np.ndarray]
"""Of a piece of the table: index and problem of each finding, counts, and [N, 2] sizes of records' only pictures."""


def _write(table: RecordTable, images: ImageStore, rules: Rules, show_progress: bool, target: Path) -> None:
    manifest, sizes = _checked(table, images, rules, show_progress)
    with target.open("wb") as file:
        np.savez(file, manifest=np.frombuffer(json.dumps(asdict(manifest)).encode(), np.uint8), sizes=sizes)


def _checked(table: RecordTable, images: ImageStore, rules: Rules, show_progress: bool) -> tuple[Manifest, np.ndarray]:
    """The manifest, and by position width and height of a record's only picture [N, 2]; zeros for other records."""
    found: dict[str, list[tuple[int, str]]] = {}
    counts = Counter(records=len(table), with_images=0, text_only=0, images=0)
    used = table.used
    sizes = np.zeros((used.max() + 1, 2), np.int32)
    pieces = [range(start, min(start + _PIECE, len(table))) for start in range(0, len(table), _PIECE)]
    parts = in_processes(_check_piece, (table, images, rules), pieces, worth=len(table) >= _WORTH_PROCESSES)
    with progress(len(table), "checking records", "records", hidden=not show_progress) as bar:
        for piece, (findings, part_counts, part_sizes) in zip(pieces, parts, strict=True):
            counts.update(part_counts)
            sizes[used[piece.start : piece.stop]] = part_sizes
            for index, (kind, message) in findings:
                counts[kind] += 1
                if kind in FAULTS or counts[kind] <= _LISTED_WARNINGS:
                    found.setdefault(kind, []).append((index, message))
            bar.update(len(piece))
    faults = {kind: found.pop(kind) for kind in FAULTS if kind in found}
    return Manifest(rules.full_decode, dict(counts), faults, found, time.time()), sizes


def _check_piece(state: tuple[RecordTable, ImageStore, Rules], piece: range) -> Part:
    table, images, rules = state
    findings, counts, sizes = [], Counter[str](), np.zeros((len(piece), 2), np.int32)
    for index in piece:
        if problem := table.problem(index):
            problems = [problem]
        else:
            record = table[index]
            pictures = record_images(record)
            counts.update(with_images=bool(pictures), text_only=not pictures, images=len(pictures))
            checks = [images.check(picture, rules.full_decode) for picture in pictures]
            if len(checks) == 1:
                sizes[index - piece.start] = checks[0][0]
            problems = [*_text_problems(record, pictures, rules), *(problem for _, problem in checks if problem)]
        findings += [(index, Problem(p.kind, f"{table.named(index)}: {p.message}")) for p in problems]
    return findings, counts, sizes


def _text_problems(record: Record, images: list[ImagePlace], rules: Rules) -> Iterator[Problem]:
    """Faults and warnings of a well-formed record's turns."""
    try:
        turns = training_turns(record["conversations"], rules.template, rules.label_masking, bool(images))
        if images:
            turns = normalize_image_tokens(turns, rules.template, rules.label_masking)
            if (written := sum(text.count(DEFAULT_IMAGE_TOKEN) for _, text in turns)) != len(images):
                yield Problem("placeholders", f"{len(images)} images, but {written} places for them in the prompt")
    except ValueError as error:
        yield Problem("turns", str(error))
    if marker := other_marker(record):
        advice = f"write {DEFAULT_IMAGE_TOKEN} where a picture belongs"
        yield Problem("other_marker", f"{marker!r} is only text here; {advice}")


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = Parser("python -m llava.data.preflight", description=__doc__)
    add = parser.add_argument
    add("--data_path", required=True, help="records, as the trainer takes them")
    add("--image_folder", help="folder or zip file that the records' image paths start from")
    add("--version", default="v1", help="conversation template of the planned training")
    add("--label_masking", choices=LABEL_MASKINGS, default="assistant", help="as in training")
    add("--data_cache_dir", help="where the results are kept; default .llava_cache beside the data")
    add("--full_decode", action="store_true", help="decode every picture, not only its header")
    add("--seed", type=int, default=DEFAULT_SEED, help="the training's seed, by which a mixture draws")
    add("--list", action="store_true", help="show every fault, not only the first of each kind")
    args = parser.parse_args(argv)
    return exit_status(lambda: named_by("--data_path")(show)(args))


def show(args: argparse.Namespace) -> int:
    """Checks the data and prints the findings; returns 1 if there are faults, else 0."""
    cache, started = args.data_cache_dir, time.time()
    rules = Rules(get_template(args.version), args.label_masking, args.full_decode)
    check_label_masking(args.label_masking, rules.template)
    table = load_records(args.data_path, cache, check=False, show_progress=True, seed=args.seed)
    images = ImageStore(args.image_folder, cache, table.image_folders)
    manifest, path = preflight(table, images, rules)
    counts, shown = manifest.counts, None if args.list else _SHOWN
    how = "decoded in full" if manifest.full_decode else "by their headers"
    print(
        f"records   {counts['records']:,}: {counts['with_images']:,} with images, {counts['text_only']:,} text only; "
        f"{counts['images']:,} images, {how}"
    )
    print(f"faults    {manifest.kinds(manifest.faults) or 'none'}")
    print(f"warnings  {manifest.kinds(manifest.warnings) or 'none'}")
    for kind, findings in (*manifest.faults.items(), *manifest.warnings.items()):
        print(f"  {kind}:", *(f"    {text}" for _, text in findings[:shown]), sep="\n")
    if table.mixture:
        usable = table.without(manifest.bad_records())
        print("sources", *(f"  {line}" for line in source_lines(usable.epoch())), sep="\n")
    remembered = f", remembered; remove {path} to check again" if manifest.checked < started else ""
    print(f"checked   {time.ctime(manifest.checked)}{remembered}")
    return int(bool(manifest.faults))


if __name__ == "__main__":
    sys.exit(main())
