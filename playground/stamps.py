"""Photos and drawings with captions from Debian's `tuxpaint-stamps-default`, with questions about what they show."""

import random
import shlex
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from llava.utils.files import write_json
from llava.utils.progress import progress
from playground.records import STATEMENTS
from playground.stamp_questions import (
    KINDS,
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
    """What `python -m playground stamps` makes.

    Attributes:
        max_side: longest side of the saved pictures in pixels; smaller ones keep their size.
        num_heldout: pictures held out of training: each gives one question of every kind.
        seed: seed of the split and of the questions.
        package_dir: folder with the unpacked package, which holds `STAMPS_IN_PACKAGE`; empty: download it.
    """

    max_side: int = 384
    num_heldout: int = 80
    seed: int = 0
    package_dir: str = ""


def prepare(settings: Settings, root: Path, force: bool = False) -> Path:
    """Return the folder `<root>/stamps`, made unless it is complete."""

    def write(folder: Path) -> dict[str, Any]:
        if settings.package_dir:
            return write_stamps(settings, Path(settings.package_dir), folder)
        with tempfile.TemporaryDirectory() as unpacked:
            unpack(cached_package(root / "cache"), Path(unpacked))
            return write_stamps(settings, Path(unpacked), folder)

    return build(root / FOLDER, "stamps", {**asdict(settings), "format": FORMAT}, write, force)


def cached_package(cache: Path) -> Path:
    """Return the Debian package in `cache`, fetched with `apt-get download` unless it is there."""
    packages = sorted(cache.glob(f"{PACKAGE}_*.deb"))
    if packages:
        return packages[-1]
    cache.mkdir(parents=True, exist_ok=True)
    print(f"stamps: downloading {PACKAGE} (160 MB) with apt-get", flush=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        _run(f"apt-get download {PACKAGE}", folder, "run `apt-get update` as root once if its package lists are old")
        (package,) = Path(folder).glob(f"{PACKAGE}_*.deb")
        return package.rename(cache / package.name)


def unpack(package: Path, folder: Path) -> None:
    """Write the package's pictures and captions to `folder`; its thousands of sounds stay packed."""
    archive, patterns = shlex.quote(str(package.absolute())), " ".join(f"'*{ending}'" for ending in USED)
    command = f"set -o pipefail; dpkg-deb --fsys-tarfile {archive} | tar -x --wildcards {patterns}"
    _run(command, folder, f"{package} may be damaged: delete it and run this again")


def _run(command: str, folder: str | Path, advice: str) -> None:
    if subprocess.run(["bash", "-c", command], cwd=folder).returncode:
        raise PlaygroundError(
            f"`{command}` failed (its message is above); {advice}. Without apt, unpack the package "
            "yourself and give its folder with --package-dir."
        )


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
    chosen = set(random.Random(f"{settings.seed}/split").sample(range(len(visible)), settings.num_heldout))
    train = [stamp for i, stamp in enumerate(visible) if i not in chosen]
    heldout = [stamp for i, stamp in enumerate(visible) if i in chosen]
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
    }


def find_stamps(folder: Path) -> tuple[list[Stamp], Counter]:
    """Return the captioned pictures below `folder`, sorted by path, and how many were skipped for what reason."""
    stamps, skipped = [], Counter()
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".svg" and not path.with_suffix(".png").exists():
            skipped["vector drawing only (.svg)"] += 1
        if path.suffix != ".png":
            continue
        text = path.with_suffix(".txt")
        lines = text.read_text(encoding="utf-8").splitlines() if text.is_file() else []
        if not lines or not (caption := lines[0].strip()):  # translations follow the English caption
            skipped["no caption"] += 1
            continue
        parts = path.relative_to(folder).with_suffix("").parts
        stamps.append(Stamp(path, "_".join(parts), caption, KINDS.get(parts[0], parts[0])))
    if not stamps:
        raise PlaygroundError(
            f"{folder}: no .png with a .txt caption beside it; skipped: {dict(skipped)}. Check --package-dir."
        )
    return stamps, skipped


def flattened(path: Path, max_side: int) -> Image.Image:
    """Return the picture as RGB on white, its longer side at most `max_side`."""
    with Image.open(path) as source:
        picture = source.convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture)
    picture = white.convert("RGB")
    picture.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    return picture
