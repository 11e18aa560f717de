"""The pictures that a mixture's records name, from the archives and the links by which their owners publish them.

Only pictures that records name and the folder lacks are fetched. An archive stays in `archives/` below the folder,
under the name of its set (`gqa-images.zip`), and one that is there already is used. What a link gives is written as it
comes under the name in the records, whatever its ending: readers tell a picture's format by its content.
"""

import http.client
import json
import os
import sys
import urllib.error
import urllib.request
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

from PIL import Image

from llava.data.checks import record_images
from llava.data.table import RecordTable
from llava.utils.files import write_bytes
from llava.utils.progress import progress

DEAD, UNREACHABLE = "dead links", "links that could not be reached (rerun the same command)"
_AT_ONCE, _TIMEOUT = 16, 30  # links that are asked at a time; seconds
_HOPELESS = 64  # links without any answer, from the first, after which no more are asked
_SHOWN = 3
_BUSY = (408, 429)  # HTTP statuses that say: later


@dataclass(frozen=True)
class PictureSet:
    """Pictures that records name as `FOLDER/NAME`, and where they come from.

    Args:
        name: the set's name in reports.
        folder: below the image folder, with `/`.
        archive: address of a zip file with the members `LAST PART OF FOLDER/NAME`.
        links: address of a JSON object that has, for each NAME without its ending, an object with `imageURL`.
    """

    name: str
    folder: str
    archive: str = ""
    links: str = ""

    def archive_file(self, folder: Path) -> Path:
        """Where the zip file is or goes, below the image folder."""
        return folder / "archives" / f"{self.folder.replace('/', '-')}.zip"

    def links_file(self, folder: Path) -> Path:
        """Where the list of links is or goes, below the image folder."""
        return (folder / self.folder).parent / "dataset.json"


LLAVA_665K = (
    PictureSet("COCO train2017", "coco/train2017", "http://images.cocodataset.org/zips/train2017.zip"),
    PictureSet("GQA", "gqa/images", "https://downloads.cs.stanford.edu/nlp/data/gqa/images.zip"),
    PictureSet(
        "OCR-VQA",
        "ocr_vqa/images",
        links="https://drive.usercontent.google.com/download?id=1r0tyZUwGCc4wIG4RkiglCGNL_nFJjR6Q&export=download"
        "&confirm=t",
    ),
    PictureSet("TextVQA", "textvqa/train_images", "https://dl.fbaipublicfiles.com/textvqa/images/train_val_images.zip"),
    PictureSet("Visual Genome, part 1", "vg/VG_100K", "https://cs.stanford.edu/people/rak248/VG_100K_2/images.zip"),
    PictureSet("Visual Genome, part 2", "vg/VG_100K_2", "https://cs.stanford.edu/people/rak248/VG_100K_2/images2.zip"),
)
"""The sources that LLaVA's README names for `llava_v1_5_mix665k.json`; none of them publishes a digest."""


def complete(sets: Iterable[PictureSet], table: RecordTable, folder: Path, local_only: bool) -> None:
    """Fetches the pictures that records name and `folder` lacks, and prints for each set what is there and what not.

    A picture that its source no longer has, such as one behind a dead link, is counted and no error: the preflight
    names the records.

    Raises:
        FileNotFoundError: pictures are missing and `local_only` is set.
        OSError: a source could not be reached, or is not what it should be; the other sets were fetched all the same.
    """
    named = _named_pictures(table)
    failed, missing = 0, 0
    for pictures in sets:
        names = named.pop(pictures.folder, set())
        lacking, causes = _lacking(pictures, names, folder), Counter[str]()
        if lacking and not local_only:
            try:
                causes = _fetch(pictures, lacking, folder)
            except (ValueError, OSError) as error:
                print(f"error: {pictures.name}: {error}", file=sys.stderr, flush=True)
                failed += 1
            lacking = _lacking(pictures, names, folder)
        missing += len(lacking)
        print(f"pictures  {_state(pictures, names, lacking, causes)}", flush=True)
    for place, names in sorted(named.items()):
        print(f"pictures  {place or '.'}: {len(names):,} named by records, from no source that is known here")
    if failed:
        raise OSError(f"--folder {folder}: {failed} of the sources above failed; rerun the same command to resume")
    if missing and local_only:
        raise FileNotFoundError(
            f"--folder {folder}: {missing:,} pictures are missing; without --local_only they are downloaded"
        )


def _named_pictures(table: RecordTable) -> dict[str, set[str]]:
    """The file names of the pictures that well-formed records name, by folder."""
    named: dict[str, set[str]] = {}
    malformed = set(table.malformed().tolist())
    for index in progress(range(len(table)), "pictures of the records", "records"):
        if index in malformed:
            continue
        for image in record_images(table[index]):
            path = PurePosixPath(str(image))
            named.setdefault(str(path.parent), set()).add(path.name)
    return named


def _lacking(pictures: PictureSet, names: set[str], folder: Path) -> set[str]:
    """Those of `names` that the set's folder does not have."""
    place = folder / pictures.folder
    return names - set(os.listdir(place)) if place.is_dir() else names


def _state(pictures: PictureSet, names: set[str], lacking: set[str], causes: Mapping[str, int]) -> str:
    if not lacking:
        return f"{pictures.name} ({pictures.folder}): {len(names):,}, all here"
    first = ", ".join(sorted(lacking)[:_SHOWN]) + (", ..." if len(lacking) > _SHOWN else "")
    why = ", ".join(f"{count:,} {cause}" for cause, count in causes.items())
    source = pictures.archive or pictures.links
    return (
        f"{pictures.name} ({pictures.folder}): {len(names) - len(lacking):,} of {len(names):,} here, "
        f"{len(lacking):,} missing{f': {why}' if why else ''} ({first}); source {source}"
    )


def _fetch(pictures: PictureSet, lacking: set[str], folder: Path) -> Counter[str]:
    """Writes what it can of the lacking pictures; counts the others by cause."""
    (folder / pictures.folder).mkdir(parents=True, exist_ok=True)
    archive = pictures.archive_file(folder)
    if pictures.archive and not archive.exists():
        _download(pictures.archive, archive)
        if not zipfile.is_zipfile(archive):
            size = archive.stat().st_size
            archive.unlink()
            raise ValueError(f"{pictures.archive}: expected a zip file, found {size:,} bytes of something else")
    if archive.exists():
        lacking = lacking - _unpack(pictures, archive, lacking, folder)
    if not pictures.links:
        return Counter({f"not in {archive}": len(lacking)} if lacking else {})
    return _follow(pictures, lacking, folder) if lacking else Counter()


def _download(address: str, target: Path) -> None:
    """Downloads a file; one that was cut off is resumed from `NAME.incomplete`.

    Raises:
        OSError: the server cannot be reached or refuses, or the size is not what it said.
    """
    from huggingface_hub.file_download import http_get

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.incomplete")
    print(f"download  {address} to {target}", flush=True)
    try:
        with partial.open("ab") as file:
            http_get(address, file, resume_size=file.tell(), displayed_filename=target.name)
    except Exception as error:  # also those of the HTTP library that the hub's client uses
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:  # which says that nothing is left to send
            raise OSError(f"{address} cannot be downloaded ({str(error) or type(error).__name__:.300})") from error
    os.replace(partial, target)


def _unpack(pictures: PictureSet, archive: Path, lacking: set[str], folder: Path) -> set[str]:
    """Writes those of the lacking pictures that the archive has; returns their names.

    Raises:
        ValueError: the archive is no zip file, has none of the pictures, or is damaged.
    """
    inside, place = PurePosixPath(pictures.folder).name, folder / pictures.folder
    advice = f"delete it and start the same command again: it comes from {pictures.archive or 'a source of your own'}"
    try:
        with zipfile.ZipFile(archive) as file:
            members = set(file.namelist())
            found = {name for name in lacking if f"{inside}/{name}" in members}
            if not found and not any(member.startswith(f"{inside}/") for member in members):
                some = ", ".join(sorted(members)[:_SHOWN]) or "nothing"
                raise ValueError(f"{archive}: expected members {inside}/NAME, found {some}; {advice}")
            for name in progress(sorted(found), f"unpacking {archive.name}", "pictures"):
                write_bytes(place / name, file.read(f"{inside}/{name}"))  # which checks the member's checksum
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{archive}: damaged ({error}); {advice}") from error
    return found


# ---- links -----------------------------------------------------------------------------------------------------------


def _follow(pictures: PictureSet, lacking: set[str], folder: Path) -> Counter[str]:
    """Writes what the links of the lacking pictures give; counts the others by cause.

    Raises:
        OSError: no server answers.
    """
    links, causes = _links(pictures, folder), Counter[str]()
    with_link = {name: link for name in sorted(lacking) if (link := links.get(Path(name).stem))}
    if without := len(lacking) - len(with_link):
        causes[f"without a link in {pictures.links_file(folder)}"] = without
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        jobs = [pool.submit(_follow_one, link, folder / pictures.folder / name) for name, link in with_link.items()]
        for done, job in enumerate(progress(as_completed(jobs), pictures.name, "links", total=len(jobs)), 1):
            if cause := job.result():
                causes[cause] += 1
            if done == causes[UNREACHABLE] == _HOPELESS:
                raise OSError(f"none of the first {done} links could be reached, such as {next(iter(links.values()))}")
    finally:
        pool.shutdown(cancel_futures=True)
    return causes


def _links(pictures: PictureSet, folder: Path) -> dict[str, str]:
    """The link of each picture, by its name without ending."""
    file = pictures.links_file(folder)
    if not file.exists():
        _download(pictures.links, file)
    try:
        return {name: entry["imageURL"] for name, entry in json.loads(file.read_text(encoding="utf-8")).items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f'{file}: expected a JSON object of {{"NAME": {{"imageURL": ...}}}}, found something else ({error}); '
            f"delete it and start the same command again: it comes from {pictures.links}"
        ) from error


def _follow_one(link: str, target: Path) -> str:
    """Writes the picture behind a link; returns what keeps it from that, or an empty text."""
    if not link.startswith(("http://", "https://")):
        return DEAD
    request = urllib.request.Request(link, headers={"User-Agent": "Mozilla/5.0 (llava)"})  # some refuse Python's own
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            content = response.read()
    except urllib.error.HTTPError as error:
        return DEAD if 400 <= error.code < 500 and error.code not in _BUSY else UNREACHABLE
    except (OSError, http.client.HTTPException):
        return UNREACHABLE
    try:
        with Image.open(BytesIO(content)) as picture:
            is_picture = max(picture.size) > 1  # servers send one pixel in the place of a picture that is gone
    except Exception:  # Pillow's decoders raise whatever damaged bytes lead them to
        is_picture = False
    if not is_picture:
        return DEAD
    write_bytes(target, content)
    return ""
