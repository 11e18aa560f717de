"""Models and data sets of the hub: what a download would take, and the download itself.

The revision is that of the first call, in `revisions.json` next to the copies; later calls take the same one.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Any

from llava.utils.files import write_json

REVISIONS = "revisions.json"
WEIGHTS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")


@dataclass(frozen=True)
class Published:
    """A repository of the hub, and the patterns of the files that are needed of it.

    Attributes:
        place: the folder of its files; None: the hub's own cache.
    """

    repository: str
    place: Path | None = None
    kind: str = "model"
    patterns: tuple[str, ...] = WEIGHTS

    def snapshot(self, place: Path | None, **options: Any) -> Any:
        """The hub's `snapshot_download`; a fault is an OSError that names the repository."""
        from huggingface_hub import snapshot_download

        with _hub_errors(self.repository):
            return snapshot_download(self.repository, repo_type=self.kind, local_dir=place, **options)

    def needed_files(self, revision: str | None = None) -> list[Any]:
        """The hub's `DryRunFileInfo` of the needed files: size, commit, and whether a download would fetch the file.

        Raises:
            OSError: no such repository, no access to it, none of the needed files, or the hub cannot be reached.
        """
        place = self.place if self.place and self.place.is_dir() else None  # a dry run makes no folder
        for patterns in (self.patterns, (*self.patterns, "*.bin")):
            files = self.snapshot(place, revision=revision, allow_patterns=list(patterns), dry_run=True)
            if self.kind != "model" or any(file.filename.endswith(".safetensors") for file in files):
                break
        if not files:
            raise OSError(f"{self.repository}: no file fits {', '.join(self.patterns)}")
        return files


Files = Mapping[Published, Sequence[Any]]
"""The needed files of each repository."""


def to_download(files: Sequence[Any]) -> int:
    """Bytes that are not here."""
    return sum(file.file_size for file in files if file.will_download)


def lacking_space(states: Files, folder: Path) -> list[str]:
    """The disks without room for the downloads; those without a place of their own are in `folder`."""
    needed: Counter[int] = Counter()  # by free bytes, which tell the disks apart
    for published, files in states.items():
        place = (published.place or folder).absolute()
        present = next(path for path in (place, *place.parents) if path.exists())
        needed[disk_usage(present).free] += to_download(files)
    text = "the downloads need {:.1f} GB of a disk that has {:.1f} GB free; make room"
    return [text.format(size / 1e9, free / 1e9) for free, size in needed.items() if size > free]


def download(states: Files, folder: Path) -> None:
    """Downloads what is missing, and notes the revisions in `folder`; an OSError says why it cannot."""
    folder.mkdir(parents=True, exist_ok=True)
    pinned = {published.repository: files[0].commit_hash for published, files in states.items()}
    write_json(folder / REVISIONS, revisions(folder) | pinned)
    for published, files in states.items():
        if size := to_download(files):
            print(f"download  {published.repository}: {size / 1e9:.2f} GB to {published.place}", flush=True)
        names = [file.filename for file in files]
        published.snapshot(published.place, revision=files[0].commit_hash, allow_patterns=names)


def revisions(folder: Path) -> dict[str, str]:
    """The revision of every repository that was fetched."""
    file = folder / REVISIONS
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


@contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    from huggingface_hub.errors import DryRunError, GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        yield
    except (OSError, *HfHubHTTPError.__bases__) as error:  # and what its HTTP library raises, which may be no OSError
        cause = error.__cause__ if isinstance(error, DryRunError) else error
        if isinstance(cause, GatedRepoError):
            raise OSError(f"{repository} is gated: ask for access on its page, then run: hf auth login") from error
        if isinstance(cause, RepositoryNotFoundError):
            raise OSError(f"{repository}: not on the hub, or not for you to see; log in by: hf auth login") from error
        text = " ".join(str(cause).split())
        raise OSError(f"{repository}: the hub does not answer; rerun the same command to resume ({text})") from error
