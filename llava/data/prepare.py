"""Makes the recipes' data ready: fetches what is missing, checks that it is complete, indexes and preflights it.

    python -m llava.data.prepare llava-558k       stage 1: LLaVA-558K, chat JSON and images.zip
    python -m llava.data.prepare llava-665k       stage 2: LLaVA-1.5's 665,298 records, and where their pictures are
    python -m llava.data.prepare llava-next       stage 2: LLaVA-NeXT's 779,289 rows in 250 Parquet shards
    python -m llava.data.prepare folder --data_path DATA --image_folder IMAGES

Files that are in the folder already are used as they are; the others come from the hub, and a download that was cut off
continues where it stopped. Nothing is converted. For llava-665k it says of each picture set where to get it, what is
there and how many pictures are missing. At the end the variables for scripts/pretrain.sh or scripts/finetune.sh are
printed. Exit status 1 if records have faults.
"""

import argparse
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llava.data.checks import record_images, starts_from
from llava.data.errors import named_by
from llava.data.preflight import add_flags, show
from llava.data.records import RecordTable, load_records
from llava.utils.commands import Parser, exit_status

_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.parquet")


@dataclass(frozen=True)
class Source:
    """A data set of the hub.

    Args:
        repository: its name.
        data: pattern of the records' files.
        images: the first of these that exists holds the images; empty where rows hold them. The first is downloaded.
        folder: where the scripts expect it.
        script: the stage that trains on it, and `version` its template there.
        records: how many there are.
        pictures: by folder, where its records' pictures come from; the image folder is then the folder itself.
    """

    repository: str
    data: str
    images: tuple[str, ...]
    folder: str
    script: str
    version: str
    records: int
    pictures: tuple[tuple[str, str], ...] = ()

    @property
    def patterns(self) -> tuple[str, ...]:
        """The files that are downloaded."""
        return (self.data, *(name for name in self.images[:1] if not self.pictures))


LLAVA_665K = (
    ("coco/train2017", "http://images.cocodataset.org/zips/train2017.zip"),
    ("gqa/images", "https://downloads.cs.stanford.edu/nlp/data/gqa/images.zip"),
    ("ocr_vqa/images", "https://github.com/haotian-liu/LLaVA#visual-instruction-tuning (a script; save as .jpg)"),
    ("textvqa/train_images", "https://dl.fbaipublicfiles.com/textvqa/images/train_val_images.zip"),
    ("vg/VG_100K", "https://cs.stanford.edu/people/rak248/VG_100K_2/images.zip"),
    ("vg/VG_100K_2", "https://cs.stanford.edu/people/rak248/VG_100K_2/images2.zip"),
)
"""The sources that LLaVA's README names for `llava_v1_5_mix665k.json`."""
SOURCES = {
    "llava-558k": Source(
        "liuhaotian/LLaVA-Pretrain",
        "blip_laion_cc_sbu_558k.json",
        ("images.zip", "images"),
        "playground/data/LLaVA-Pretrain",
        "pretrain",
        "plain",
        558_128,
    ),
    "llava-665k": Source(
        "liuhaotian/LLaVA-Instruct-150K",
        "llava_v1_5_mix665k.json",
        (".",),
        "playground/data/LLaVA-Instruct-150K",
        "finetune",
        "v1",
        665_298,
        LLAVA_665K,
    ),
    "llava-next": Source(
        "lmms-lab/LLaVA-NeXT-Data",
        "data/*.parquet",
        (),
        "playground/data/LLaVA-NeXT-Data",
        "finetune",
        "qwen_1_5",
        779_289,
    ),
}


def main(argv: list[str] | None = None) -> int:
    parser = Parser("python -m llava.data.prepare", description=__doc__)
    parser.add_argument("source", choices=[*SOURCES, "folder"])
    parser.add_argument("--folder", type=Path, help="where the files are or go; default: where the scripts expect them")
    parser.add_argument("--local_only", action="store_true", help="never download; say what is missing")
    parser.add_argument("--data_path", help="folder: records, as the trainer takes them")
    parser.add_argument("--image_folder", help="folder: folder or zip file of the images")
    parser.add_argument("--version", help="conversation template of the planned training; default the stage's")
    add_flags(parser, label_masking="upstream")
    args = parser.parse_args(argv)
    work = named_by("--data_path")(prepare)
    return exit_status(lambda: work(args), "interrupted: rerun the same command to resume")


def prepare(args: argparse.Namespace) -> int:
    """Fetches, verifies and checks the data and prints the scripts' variables; returns 1 if records have faults.

    Raises:
        FileNotFoundError: files are missing and are not to be downloaded.
        ValueError: files are incomplete.
    """
    scripts = ["pretrain", "finetune"]
    if args.source == "folder":
        if not args.data_path:
            raise ValueError("folder: --data_path is missing: the records' file, files or folder")
        args.version = args.version or "v1"
    else:
        source = SOURCES[args.source]
        folder = args.folder or Path(source.folder)
        if args.data_path or args.image_folder:
            raise ValueError(f"{args.source}: --data_path and --image_folder are for folder; pass --folder")
        args.data_path, args.image_folder = located(source, folder, args.local_only)
        if source.pictures:
            table = load_records(args.data_path, args.data_cache_dir, check=False, show_progress=True)
            print("\n".join(picture_sets(source.pictures, table, folder)))
        args.version = args.version or source.version
        scripts = [source.script]
    status = show(args)
    variables = f"DATA_PATH={shlex.quote(args.data_path)} IMAGE_FOLDER={shlex.quote(args.image_folder or '')}"
    if args.source == "folder" or args.version != SOURCES[args.source].version:
        variables += f" PROMPT_VERSION={args.version}"
    for script in scripts:
        print(f"train     {variables} PRESET=... NORM=... bash scripts/{script}.sh")
    return status


def located(source: Source, folder: Path, local_only: bool) -> tuple[str, str | None]:
    """`--data_path` and `--image_folder` of a source, which is downloaded to `folder` unless it is complete there."""
    if lacking := missing(source, folder):
        if local_only:
            where = f"--folder {folder}{starts_from(folder)}: missing {', '.join(lacking)}"
            raise FileNotFoundError(f"{where}; without --local_only it is downloaded")
        download(source, folder)
        if lacking := missing(source, folder):
            where = f"--folder {folder}: after the download of {source.repository} still"
            raise ValueError(f"{where} missing {', '.join(lacking)}")
    data, images = folder / source.data, _images(source, folder)
    return str(data.parent if "*" in data.name else data), str(images) if images else None


def missing(source: Source, folder: Path) -> list[str]:
    """What `folder` lacks: files, shards of a numbered set, images."""
    files = sorted(folder.glob(source.data))
    if not files:
        return [source.data]
    named = [match for file in files if (match := _SHARD.fullmatch(file.name))]
    there = {(match[1], int(match[2])) for match in named}
    lacking = [
        f"{name}-{number:0{len(count)}d}-of-{count}.parquet"
        for name, count in sorted({(match[1], match[3]) for match in named})
        for number in range(int(count))
        if (name, number) not in there
    ]
    return lacking if _images(source, folder) or not source.images else [*lacking, source.images[0]]


def _images(source: Source, folder: Path) -> Path | None:
    return next((folder / name for name in source.images if (folder / name).exists()), None)


def download(source: Source, folder: Path) -> None:
    """Downloads the files of `source` that `folder` lacks, and continues those that were cut off.

    Raises:
        OSError: the hub cannot be reached, or refuses the request.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    print(f"download  {source.repository}: {', '.join(source.patterns)} to {folder}", flush=True)
    try:
        snapshot_download(
            source.repository, repo_type="dataset", allow_patterns=list(source.patterns), local_dir=folder
        )
    except (OSError, *HfHubHTTPError.__bases__) as error:  # and what its HTTP library raises, which may be no OSError
        raise OSError(
            f"{source.repository} cannot be downloaded to {folder}; rerun the same command to resume ({error})"
        ) from error


def picture_sets(sources: tuple[tuple[str, str], ...], table: RecordTable, folder: Path) -> list[str]:
    """A line for each folder of pictures that records name: how many are there, and where missing ones come from."""
    named: dict[str, set[str]] = {place: set() for place, _ in sources}
    malformed = set(table.malformed().tolist())
    for index in range(len(table)):
        for image in [] if index in malformed else record_images(table[index]):
            path = PurePosixPath(str(image))
            named.setdefault(str(path.parent), set()).add(path.name)
    lines, origins = [], dict(sources)
    for place, names in named.items():
        there = {file.name for file in (folder / place).iterdir()} if (folder / place).is_dir() else set()
        lacking = sorted(names - there)
        line = f"pictures  {place}: {len(names) - len(lacking):,} of {len(names):,} there"
        if lacking:
            origin = origins.get(place, "a source that is not known here")
            line += f", {len(lacking):,} missing ({', '.join(lacking[:3])}, ...); put them there from {origin}"
        lines.append(line)
    return lines


if __name__ == "__main__":
    sys.exit(main())
