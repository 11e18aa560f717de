"""Gets data ready for training: downloads the files that are missing, and checks every record.

    python -m llava.data.prepare llava-558k       stage 1: LLaVA-558K, chat JSON and images.zip
    python -m llava.data.prepare llava-665k       stage 2: LLaVA-1.5's 665,298 records, and where their pictures are
    python -m llava.data.prepare llava-next       stage 2: LLaVA-NeXT's 779,289 rows in 250 Parquet shards

Files that are in the folder already are used as they are; the others come from the hub, and a download that was cut off
continues where it stopped. Nothing is converted. For llava-665k it says of each picture set where to get it, what is
there and how many pictures are missing. At the end the variables for scripts/pretrain.sh or scripts/finetune.sh are
printed. Further flags are those of llava.data.preflight. Exit status 1 if records have faults.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from llava.data import preflight
from llava.data.checks import record_images
from llava.data.records import RecordTable, load_records
from llava.utils.commands import Parser, exit_status
from llava.utils.paths import WORK

_SHARD = re.compile(r"train-\d{5}-of-(\d{5})\.parquet")


@dataclass(frozen=True)
class Source:
    """A data set of the hub.

    Args:
        repository: its name.
        data: pattern of the records' files.
        script: the stage that trains on it, and `version` its template there.
        images: the first that exists holds the images; the first is downloaded. Empty where rows hold them.
        pictures: by folder, where LLaVA's README says that pictures come from; they are not downloaded.
    """

    repository: str
    data: str
    script: str
    version: str
    images: tuple[str, ...] = ()
    pictures: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Where the scripts expect it."""
        return f"playground/data/{self.repository.split('/')[1]}"

    @property
    def patterns(self) -> tuple[str, ...]:
        """The files that are downloaded."""
        return (self.data, *(() if self.pictures else self.images[:1]))


LLAVA_665K = {
    "coco/train2017": "http://images.cocodataset.org/zips/train2017.zip",
    "gqa/images": "https://downloads.cs.stanford.edu/nlp/data/gqa/images.zip",
    "ocr_vqa/images": "https://github.com/haotian-liu/LLaVA#visual-instruction-tuning (a script; save as .jpg)",
    "textvqa/train_images": "https://dl.fbaipublicfiles.com/textvqa/images/train_val_images.zip",
    "vg/VG_100K": "https://cs.stanford.edu/people/rak248/VG_100K_2/images.zip",
    "vg/VG_100K_2": "https://cs.stanford.edu/people/rak248/VG_100K_2/images2.zip",
}
_CAPTIONS, _MIXTURE = "blip_laion_cc_sbu_558k.json", "llava_v1_5_mix665k.json"
SOURCES = {
    "llava-558k": Source("liuhaotian/LLaVA-Pretrain", _CAPTIONS, "pretrain", "plain", ("images.zip", "images")),
    "llava-665k": Source("liuhaotian/LLaVA-Instruct-150K", _MIXTURE, "finetune", "v1", (".",), LLAVA_665K),
    "llava-next": Source("lmms-lab/LLaVA-NeXT-Data", "data/*.parquet", "finetune", "qwen_1_5"),
}


def main(argv: list[str] | None = None) -> int:
    parser = Parser("python -m llava.data.prepare", description=__doc__)
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("--folder", type=Path, help="where the files are or go; default: where the scripts expect them")
    args, flags = parser.parse_known_args(argv)
    source = SOURCES[args.source]
    folder = (args.folder or WORK / source.folder).absolute()  # the scripts' relative paths start elsewhere
    return exit_status(lambda: prepare(source, folder, flags), "interrupted: rerun the same command to resume")


def prepare(source: Source, folder: Path, flags: list[str]) -> int:
    """Fetches, verifies and checks the data and prints the scripts' variables; returns 1 if records have faults.

    `flags` are further ones of `llava.data.preflight`.

    Raises:
        OSError: the hub cannot be reached.
        ValueError: files are incomplete.
    """
    if missing(source, folder):
        download(source, folder)
    if lacking := missing(source, folder):
        place = f"--folder {folder}: after the download of {source.repository} still"
        raise ValueError(f"{place} missing {', '.join(lacking)}")
    data, images = folder / source.data, _images(source, folder)
    data = data.parent if "*" in data.name else data
    if source.pictures:
        table = load_records(str(data), check=False, show_progress=True)
        print("\n".join(picture_sets(source.pictures, table, folder)))
    settings = ["--version", source.version, "--label_masking", "upstream"]
    settings += ["--image_folder", str(images)] if images else []
    status = preflight.main(["--data_path", str(data), *settings, *flags])
    if status > 1:
        return status
    variables = f"DATA_PATH={shlex.quote(str(data))} IMAGE_FOLDER={shlex.quote(str(images or ''))}"
    print(f"train     {variables} PRESET=... NORM=... bash scripts/{source.script}.sh")
    return status


def missing(source: Source, folder: Path) -> list[str]:
    """What `folder` lacks: files, shards of a numbered set, images."""
    files = {file.name for file in folder.glob(source.data)}
    if not files:
        return [source.data]
    counts = {int(match[1]) for name in files if (match := _SHARD.fullmatch(name))}
    shards = {f"train-{number:05d}-of-{count:05d}.parquet" for count in counts for number in range(count)}
    images = source.images[:1] if _images(source, folder) is None else ()
    return [*sorted(shards - files), *images]


def _images(source: Source, folder: Path) -> Path | None:
    return next((folder / name for name in source.images if (folder / name).exists()), None)


def download(source: Source, folder: Path) -> None:
    """Downloads the files of `source` that `folder` lacks, and continues those that were cut off.

    Raises:
        OSError: the hub cannot be reached, or refuses the request.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = list(source.patterns)
    print(f"download  {source.repository}: {', '.join(patterns)} to {folder}", flush=True)
    try:
        snapshot_download(source.repository, repo_type="dataset", allow_patterns=patterns, local_dir=folder)
    except (OSError, *HfHubHTTPError.__bases__) as error:  # and what its HTTP library raises, which may be no OSError
        advice = f"rerun the same command to resume ({error})"
        raise OSError(f"{source.repository} cannot be downloaded to {folder}; {advice}") from error


def picture_sets(origins: Mapping[str, str], table: RecordTable, folder: Path) -> list[str]:
    """A line for each folder of pictures that records name: how many are there, and where missing ones come from."""
    named: dict[str, set[str]] = {place: set() for place in origins}
    malformed = set(table.malformed().tolist())
    for index in range(len(table)):
        for image in [] if index in malformed else record_images(table[index]):
            path = PurePosixPath(str(image))
            named.setdefault(str(path.parent), set()).add(path.name)
    lines = []
    for place, names in named.items():
        lacking = sorted(names - set(os.listdir(folder / place) if (folder / place).is_dir() else ()))
        line = f"pictures  {place}: {len(names) - len(lacking):,} of {len(names):,} there"
        if lacking:
            origin = origins.get(place, "a source that is not known here")
            line += f", {len(lacking):,} missing ({', '.join(lacking[:3])}, ...); put them there from {origin}"
        lines.append(line)
    return lines


if __name__ == "__main__":
    sys.exit(main())
