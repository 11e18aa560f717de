"""Published models and data sets: what the hub says of them, and their copies in a folder, each at one revision.

The revision is that of the first call, in `revisions.json` next to the copies; later calls take the same one.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from llava.utils.files import write_json

REVISIONS = "revisions.json"
MODEL, DATASET = "model", "dataset"
WEIGHTS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
SLACK = 1 << 30  # bytes that stay free on the disk


@dataclass(frozen=True)
class Published:
    """A repository of the hub, and the patterns of the files that are needed of it.

    Attributes:
        place: where its files are or go, if not among the copies.
    """

    repository: str
    kind: str = MODEL
    patterns: tuple[str, ...] = WEIGHTS
    place: Path | None = None

    def copy_in(self, folder: Path) -> Path:
        """Its place among the copies; the paper's numbers are looked up by the last part."""
        return self.place or folder / f"{self.kind}s" / self.repository.rpartition("/")[2]


@dataclass(frozen=True)
class State:
    """What the hub has of a repository, and what is here.

    Attributes:
        files: bytes of each needed file, by its path.
        missing: bytes of those that are not here.
        barred: why the hub would refuse the download, or nothing.
    """

    published: Published
    revision: str
    files: dict[str, int]
    missing: int
    barred: str = ""


def state_of(published: Published, folder: Path) -> State:
    """Asks the hub.

    Raises:
        OSError: there is no such repository, or the hub cannot be reached.
        ValueError: the repository has none of the needed files.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError
    from huggingface_hub.utils import filter_repo_objects

    name, api = published.repository, HfApi()
    wanted = revisions(folder).get(name)
    with _hub_errors(name):
        asked = api.dataset_info if published.kind == DATASET else api.model_info
        info = asked(name, revision=wanted, files_metadata=True)
        barred = ""
        if info.gated:
            try:
                api.auth_check(name, repo_type=published.kind)
            except GatedRepoError:
                barred = f"{name} is gated: ask for access on its page, then run: hf auth login"
    there = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    files = {path: there[path] for path in filter_repo_objects(there, allow_patterns=list(published.patterns))}
    if published.kind == MODEL and not any(path.endswith(".safetensors") for path in files):
        files |= {path: there[path] for path in filter_repo_objects(there, allow_patterns=["*.bin"])}
    if not files:
        raise ValueError(f"{name}: no file fits {', '.join(published.patterns)}; it has {', '.join(there) or 'none'}")
    place = published.copy_in(folder)
    missing = sum(size for path, size in files.items() if not _is_whole(place / path, size))
    return State(published, str(info.sha), files, missing, barred)


def problems(states: Sequence[State], folder: Path) -> list[str]:
    """Why the downloads cannot succeed: refused access, or too little space on a disk."""
    faults = [state.barred for state in states if state.barred and state.missing]
    disks: dict[int, tuple[Path, int]] = {}  # by device: a folder of it, and what it needs
    for state in states:
        place = state.published.copy_in(folder).absolute()
        present = next(path for path in (place, *place.parents) if path.exists())
        shown, needed = disks.get(disk := present.stat().st_dev, (present, 0))
        disks[disk] = shown, needed + state.missing
    for present, needed in disks.values():
        if needed and needed + SLACK > (free := disk_usage(present).free):
            needs = f"{(needed + SLACK) / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB free"
            faults.append(f"{present}: {needs}; make room, or pass another --output-dir")
    return faults


def download(states: Sequence[State], folder: Path) -> None:
    """Downloads what is missing.

    Raises:
        OSError: the hub cannot be reached, or refuses the request.
        ValueError: a downloaded file has another size than the hub says.
    """
    from huggingface_hub import snapshot_download

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / REVISIONS, revisions(folder) | {s.published.repository: s.revision for s in states})
    for state in states:
        if not state.missing:
            continue
        published, place = state.published, state.published.copy_in(folder)
        print(f"download  {published.repository}: {state.missing / 1e9:.2f} GB to {place}", flush=True)
        with _hub_errors(published.repository):
            snapshot_download(
                published.repository,
                repo_type=published.kind,
                revision=state.revision,
                allow_patterns=list(state.files),
                local_dir=place,
            )
        if cut := [path for path, size in state.files.items() if not _is_whole(place / path, size)]:
            raise ValueError(f"{place}: {', '.join(cut)} has another size than the hub says; rerun the same command")


def revisions(folder: Path) -> dict[str, str]:
    """The revision of every repository that was fetched."""
    file = folder / REVISIONS
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _is_whole(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


@contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    """Within the block every error of the hub becomes an OSError that names the repository."""
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        yield
    except RepositoryNotFoundError as error:
        raise OSError(f"{repository}: not on the hub, or not for you to see; log in by: hf auth login") from error
    except (OSError, *HfHubHTTPError.__bases__) as error:  # and what its HTTP library raises, which may be no OSError
        text = " ".join(str(error).split())
        raise OSError(f"{repository}: the hub does not answer; rerun the same command to resume ({text})") from error
