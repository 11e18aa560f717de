"""Photos and drawings with captions from Debian's `tuxpaint-stamps-default`, with questions about what they show."""

import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from llava.utils.files import write_json
from llava.utils.progress import progress
from playground.options import option
from playground.records import STATEMENTS
from playground.stamp_questions import (
    KINDS,
    NUM_CHOICES,
    Stamp,
    finetune_records,
    heldout_records,
    pretrain_records,
)
from playground.store import PlaygroundError, build

FOLDER = "stamps"
FORMAT = 3  # raise it when the same settings give other files
PACKAGE = "tuxpaint-stamps-default"
STAMPS_IN_PACKAGE = Path("usr/share/tuxpaint/stamps")
USED = (".png", ".txt", ".svg")
WHITE_ENOUGH = 250  # a picture with no pixel darker than this is invisible on white


@dataclass
class Settings:
    """What `python -m playground stamps` makes."""

    max_side: int = option(384, "longest side of the saved pictures in pixels; smaller ones keep their size")
    num_heldout: int = option(80, "pictures held out of training: each gives one question of every kind")
    seed: int = option(0, "seed of the split and of the questions")
    package_dir: str = option("", f"folder with the unpacked package (holds {STAMPS_IN_PACKAGE}); empty: download it")


def prepare(settings: Settings, root: Path, force: bool = False) -> Path:
    """Return the folder `<root>/stamps`, made unless it is complete."""

    def write(folder: Path) -> dict[str, Any]:
        if settings.package_dir:
            return write_stamps(settings, Path(settings.package_dir), folder)
        with unpacked(cached_package(root / "cache")) as package:
            return write_stamps(settings, package, folder)

    return build(root / FOLDER, "stamps", {**asdict(settings), "format": FORMAT}, write, force)


def cached_package(cache: Path) -> Path:
    """Return the Debian package in `cache`, fetched with `apt-get download` unless it is there."""
    packages = sorted(cache.glob(f"{PACKAGE}_*.deb"))
    if packages:
        return packages[-1]
    cache.mkdir(parents=True, exist_ok=True)
    print(f"stamps: downloading {PACKAGE} (160 MB) with apt-get", flush=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        if not _apt_download(folder):
            print("stamps: apt-get does not find it; refreshing its package lists once", flush=True)
            _run(["apt-get", "update"], folder)
            if not _apt_download(folder):
                raise PlaygroundError(
                    f"`apt-get download {PACKAGE}` failed (its message is above). If the package lists are missing or "
                    "old, run `apt-get update` as root once; on a system without apt, unpack the package yourself and "
                    "give its folder with --package-dir."
                )
        (package,) = Path(folder).glob(f"{PACKAGE}_*.deb")
        return package.rename(cache / package.name)


def _apt_download(folder: str) -> bool:
    return _run(["apt-get", "download", PACKAGE], folder)


def _run(command: list[str], folder: str) -> bool:
    with _started(command, cwd=folder) as process:
        return process.wait() == 0


def _started(command: list[str], **options: Any) -> subprocess.Popen:
    try:
        return subprocess.Popen(command, **options)
    except FileNotFoundError as error:
        raise PlaygroundError(
            f"`{command[0]}` is not on this system: {PACKAGE} comes from Debian. Unpack the package yourself and give "
            "its folder with --package-dir."
        ) from error


@contextmanager
def unpacked(package: Path) -> Iterator[Path]:
    """Yield a temporary folder with the package's pictures and captions; its thousands of sounds stay packed."""
    with tempfile.TemporaryDirectory(dir=package.parent) as folder:
        patterns = [f"*{ending}" for ending in USED]
        with _started(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as content:
            with _started(["tar", "-x", "-C", folder, "--wildcards", *patterns], stdin=content.stdout) as tar:
                content.stdout.close()  # if tar ends early, dpkg-deb must notice
        if content.returncode or tar.returncode:
            raise PlaygroundError(f"{package}: cannot be unpacked; it may be damaged. Delete it and run this again.")
        yield Path(folder)


def write_stamps(settings: Settings, package: Path, folder: Path) -> dict[str, Any]:
    """Write images and record files to `folder`; return the facts for the manifest."""
    stamps, skipped = find_stamps(package / STAMPS_IN_PACKAGE)
    (folder / "images").mkdir()
    visible = []
    for stamp in progress(stamps, "stamps", "pictures"):
        picture = flattened(stamp.path, settings.max_side)
        if min(low for low, _ in picture.getextrema()) >= WHITE_ENOUGH:
            skipped["white on white"] += 1
            continue
        picture.save(folder / "images" / f"{stamp.name}.png")
        visible.append(stamp)
    train, heldout = split(visible, settings)
    records = {
        "pretrain.json": pretrain_records(train, settings.seed),
        "finetune.json": finetune_records(train, settings.seed),
        "heldout.json": heldout_records(heldout, visible, settings.seed),
    }
    for name, content in records.items():
        write_json(folder / name, content)
    statements = {
        name: {
            f"{stamp.name}.png": {"picture": [stamp.caption, f"a picture of {stamp.kind}"], "quarters": []}
            for stamp in part
        }
        for name, part in (("train", train), ("heldout", heldout))
    }
    write_json(folder / STATEMENTS, statements)
    print(f"stamps: {len(train)} training and {len(heldout)} held-out pictures; skipped: {dict(skipped) or 'none'}")
    return {
        "pictures": {"train": len(train), "heldout": len(heldout)},
        "skipped": dict(skipped),
        "records": {name: len(content) for name, content in records.items()},
        "chance_percent": {kind: 100 / number for kind, number in NUM_CHOICES.items()},
    }


def find_stamps(folder: Path) -> tuple[list[Stamp], Counter]:
    """Return the captioned pictures below `folder`, sorted by path, and how many were skipped for what reason."""
    if not folder.is_dir():
        raise PlaygroundError(f"{folder}: expected the folder of the stamps there. Check --package-dir.")
    stamps, skipped = [], Counter()
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".svg" and not path.with_suffix(".png").exists():
            skipped["vector drawing only (.svg)"] += 1
        if path.suffix != ".png":
            continue
        caption = read_caption(path.with_suffix(".txt"))
        if not caption:
            skipped["no caption"] += 1
            continue
        parts = path.relative_to(folder).with_suffix("").parts
        stamps.append(Stamp(path, "_".join(parts), caption, KINDS.get(parts[0], parts[0])))
    if not stamps:
        raise PlaygroundError(f"{folder}: no .png with a .txt caption beside it; skipped: {dict(skipped)}.")
    return stamps, skipped


def read_caption(path: Path) -> str:
    """Return the English caption, the first line; translations follow it. Empty where there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return ""
    return lines[0].strip() if lines else ""


def flattened(path: Path, max_side: int) -> Image.Image:
    """Return the picture as RGB on white, its longer side at most `max_side`."""
    with Image.open(path) as source:
        picture = source.convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture)
    picture = white.convert("RGB")
    picture.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    return picture


def split(stamps: list[Stamp], settings: Settings) -> tuple[list[Stamp], list[Stamp]]:
    """Return training and held-out pictures, each in the order of `stamps`."""
    if not 0 <= settings.num_heldout < len(stamps):
        raise PlaygroundError(
            f"--num-heldout {settings.num_heldout}: expected 0 to {len(stamps) - 1}, with {len(stamps)} pictures."
        )
    chosen = set(random.Random(f"{settings.seed}/split").sample(range(len(stamps)), settings.num_heldout))
    train = [stamp for i, stamp in enumerate(stamps) if i not in chosen]
    return train, [stamp for i, stamp in enumerate(stamps) if i in chosen]
