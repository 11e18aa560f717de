"""Checks every record and picture of a planned training, and shows its findings.

    python -m llava.data.preflight --data_path DATA --image_folder IMAGES --version qwen_1_5 --label_masking upstream

Training does the same before its first step, and reuses the manifest that this writes. Exit status 1 if there are
faults.
"""

import argparse
import sys
import time

from llava.conversation import get_template
from llava.data.errors import named_by
from llava.data.images import ImageStore
from llava.data.parquet_files import LARGE_GROUP, largest_image_group
from llava.data.preflight_manifest import Manifest, Rules, fault_kinds, preflight, unread_fields, warning_kinds, when
from llava.data.records import DEFAULT_SEED, RecordTable, load_records
from llava.data.table import source_lines
from llava.data.turns import LABEL_MASKINGS
from llava.utils.commands import Parser, exit_status
from llava.utils.pixels import ORIENTATIONS

_SHOWN = 10


def main(argv: list[str] | None = None) -> int:
    parser = Parser("python -m llava.data.preflight", description=__doc__)
    parser.add_argument("--data_path", required=True, help="records, as the trainer takes them")
    parser.add_argument("--image_folder", help="folder or zip file that the records' image paths start from")
    parser.add_argument("--version", default="v1", help="conversation template of the planned training (default v1)")
    add_flags(parser, label_masking="assistant")
    args = parser.parse_args(argv)
    return exit_status(lambda: named_by("--data_path")(show)(args))


def add_flags(parser: argparse.ArgumentParser, label_masking: str) -> None:
    """Adds the flags of `show` other than data and template, under the trainer's names."""
    parser.add_argument(
        "--label_masking",
        choices=LABEL_MASKINGS,
        default=label_masking,
        help=f"which tokens the training learns (default {label_masking})",
    )
    parser.add_argument("--data_cache_dir", help="where the results are kept; default .llava_cache beside the data")
    parser.add_argument("--full_decode", action="store_true", help="decode every picture, not only its header")
    parser.add_argument(
        "--seed", type=int, default=DEFAULT_SEED, help="the training's seed, by which a mixture draws (default 42)"
    )
    parser.add_argument("--recheck", action="store_true", help="check again, ignoring an earlier result")
    parser.add_argument(
        "--image_orientation", choices=ORIENTATIONS, default="stored", help="as in training (default stored)"
    )
    parser.add_argument("--list", action="store_true", help="show every fault, not only the first of each kind")


def show(args: argparse.Namespace) -> int:
    """Checks the data and prints the findings; returns 1 if there are faults, else 0."""
    table = load_records(args.data_path, args.data_cache_dir, check=False, show_progress=True, seed=args.seed)
    images = ImageStore(
        args.image_folder, args.data_cache_dir, others=table.image_folders, orientation=args.image_orientation
    )
    rules = Rules(get_template(args.version), args.label_masking, args.full_decode)
    started = time.time()
    manifest, path = preflight(table, images, rules, recheck=args.recheck)
    print(report(manifest, None if args.list else _SHOWN))
    if table.source_names:
        print(_sources(table.without(manifest.bad_records())))
    size = max((largest_image_group(source) for source in set(table.sources) if source.suffix == ".parquet"), default=0)
    if size > LARGE_GROUP:
        print(
            f"shards    row groups of up to {size >> 20} MiB of images: slow to read at random; "
            "docs/data.md writes them again with small ones"
        )
    print(
        f"checked   {when(manifest)}" + (", remembered; --recheck checks again" if manifest.checked < started else "")
    )
    print(f"manifest  {path}")
    return int(bool(manifest.faults))


def report(manifest: Manifest, shown: int | None = _SHOWN) -> str:
    """The manifest as text, with the first findings of each kind; all of them where `shown` is None."""
    counts = manifest.counts
    how = "decoded in full" if manifest.full_decode else "by their headers"
    lines = [
        f"records   {counts['records']:,}: {counts['with_images']:,} with images, {counts['text_only']:,} text only; "
        f"{counts['images']:,} images, {how}",
        f"faults    {fault_kinds(manifest) or 'none'}",
    ]
    for kind, findings in manifest.faults.items():
        lines += [f"  {kind}:", *(f"    {text}" for _, text in findings[:shown])]
    lines.append(f"warnings  {warning_kinds(manifest) or 'none'}")
    for kind, findings in manifest.warnings.items():
        lines += [f"  {kind}:", *(f"    {text}" for _, text in findings[:shown])]
    if manifest.unread:
        lines.append(f"not read  {unread_fields(manifest)}")
    return "\n".join(lines)


def _sources(table: RecordTable) -> str:
    """The data sets of a mixture, with their shares of an epoch."""
    try:
        return "\n".join(["sources", *(f"  {line}" for line in source_lines(table.epoch()))])
    except ValueError as error:
        return f"sources   {error}"


if __name__ == "__main__":
    sys.exit(main())
