"""Checks every record and picture of a planned training, and shows its findings.

    python -m llava.data.preflight --data_path DATA --image_folder IMAGES --version qwen_1_5 --label_masking upstream

Training does the same before its first step, and reuses the manifest that this writes. Exit status 1 if there are
faults.
"""

import argparse
import math
import sys
import time

from llava.anyres import CropRules, Picture, is_anyres, parse_pinpoints
from llava.conversation import get_template
from llava.data.errors import named_by
from llava.data.images import ImageStore
from llava.data.mixture import source_lines
from llava.data.parquet_files import LARGE_GROUP, largest_image_group
from llava.data.preflight_manifest import (
    FAULTS,
    MOST_FOLDERS,
    WARNINGS,
    Manifest,
    Rules,
    fault_kinds,
    preflight,
    unread_fields,
    usable_records,
    when,
)
from llava.data.records import DEFAULT_SEED, RecordTable, load_records
from llava.data.turns import LABEL_MASKINGS
from llava.utils.commands import Parser, exit_status, whole
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
    parser.add_argument("--model_name_or_path", help="count the samples that are too long for this model's tokenizer")
    parser.add_argument(
        "--model_max_length", type=whole(1), default=2048, help="longest sample in tokens, for that count"
    )
    parser.add_argument(
        "--num_visual_tokens",
        type=whole(1),
        default=729,
        help="for that count: visual tokens of a crop, after the projector",
    )
    parser.add_argument("--image_aspect_ratio", help="for that count: as in training")
    parser.add_argument("--image_grid_pinpoints", help="with anyres: as in training")
    parser.add_argument("--mm_patch_merge_type", default="flat", help="with anyres: as in training (default flat)")
    parser.add_argument(
        "--crop_side", type=whole(1), default=384, help="with anyres: pixels of the vision tower's square"
    )


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
    if args.model_name_or_path:
        print(length_report(args, usable_records(table, manifest, "skip", ""), images))
    print(f"checked   {when(manifest)}" + (remembered(manifest) if manifest.checked < started else ""))
    print(f"manifest  {path}")
    return int(bool(manifest.faults))


def remembered(manifest: Manifest) -> str:
    """What the report adds about the result of an earlier start."""
    if manifest.folders is None:
        what = f"; pictures in more than {MOST_FOLDERS:,} folders were not looked at again"
    else:
        what = "; no file was added to the pictures' folders or taken away since" if manifest.folders else ""
    return f", remembered{what}; --recheck checks again"


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
        lines += [f"  {kind}: {FAULTS[kind]}", *(f"    {text}" for _, text in findings[:shown])]
    lines.append(
        "warnings  " + (", ".join(f"{findings['count']:,} {k}" for k, findings in manifest.warnings.items()) or "none")
    )
    for kind, findings in manifest.warnings.items():
        lines += [f"  {kind}: {WARNINGS[kind]}", *(f"    {text}" for _, text in findings["first"][:shown])]
    if manifest.unread:
        lines.append(f"not read  {unread_fields(manifest)}")
    return "\n".join(lines)


def _sources(table: RecordTable) -> str:
    """The data sets of a mixture, with their shares of an epoch."""
    try:
        return "\n".join(["sources", *(f"  {line}" for line in source_lines(table.epoch()))])
    except ValueError as error:
        return f"sources   {error}"


def length_report(args: argparse.Namespace, table: RecordTable, images: ImageStore) -> str:
    """A line that says how many samples are longer than `--model_max_length`; measures lengths that are not cached."""
    from llava.data.dataset import LazySupervisedDataset
    from llava.mm_utils import load_tokenizer

    tokenizer = load_tokenizer(args.model_name_or_path, model_max_length=args.model_max_length, padding_side="right")
    rules = _crop_rules(args)
    dataset = LazySupervisedDataset(
        table, tokenizer, args.version, None, images, "square", rules.visual_tokens(Picture()), args.model_max_length,
        label_masking=args.label_masking, crop_rules=rules,
    )  # fmt: skip
    lengths = dataset.whole_lengths()
    longer = int((lengths > args.model_max_length).sum())
    return (
        f"lengths   {longer:,} of {len(lengths):,} samples are longer than {args.model_max_length:,} tokens and are "
        f"cut; the longest has {lengths.max():,}"
    )


def _crop_rules(args: argparse.Namespace) -> CropRules:
    """The training's crop rules, for a tower whose visual tokens are its patches."""
    grids = args.image_grid_pinpoints if is_anyres(args.image_aspect_ratio) else None
    return CropRules(
        args.num_visual_tokens,
        math.isqrt(args.num_visual_tokens),
        args.crop_side,
        args.image_aspect_ratio,
        args.mm_patch_merge_type,
        () if grids is None else parse_pinpoints(grids, args.crop_side),
    )


if __name__ == "__main__":
    sys.exit(main())
