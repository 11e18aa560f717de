"""Models and data sets of the hub: what a download would take, and the download itself.

The revision of a copy is that of the first call, in `revisions.json` next to the copies; later calls take the same one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava.launch.inputs import MISSING, WRONG
from llava.utils.files import write_json

REVISIONS = "revisions.json"
WEIGHTS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")


@dataclass(frozen=True)
class Published:
    """A repository of the hub, and the patterns of the files that are needed of it.

    Attributes:
        place: the folder of its files.
    """

    repository: str
    place: Path
    kind: str = "model"
    patterns: tuple[str, ...] = WEIGHTS

    def needed_files(self, revision: str | None = None) -> list[Any]:
        """The hub's `DryRunFileInfo` of the needed files: size, commit, and whether a download would fetch the file.

        Raises:
            OSError: no such repository, no access to it, none of the needed files, or the hub cannot be reached.
        """
        place = self.place if self.place.is_dir() else None  # a dry run makes no folder
        files = self.snapshot(place, revision=revision, dry_run=True)
        if not files:
            raise OSError(f"{self.repository}: no file fits {', '.join(self.patterns)}")
        return files

    def snapshot(self, place: Path | None, **options: Any) -> Any:
        """The hub's `snapshot_download` of the needed files; an error is an OSError that names the repository."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import DryRunError, HfHubHTTPError, RepositoryNotFoundError

        options |= {"repo_type": self.kind, "local_dir": place, "allow_patterns": list(self.patterns)}
        try:
            return snapshot_download(self.repository, **options)
        except (OSError, *HfHubHTTPError.__bases__) as error:  # what its HTTP library raises may be no OSError
            cause = error.__cause__ if isinstance(error, DryRunError) else error
            closed = isinstance(cause, RepositoryNotFoundError)  # or gated
            advice = "ask for access on its page, then run: hf auth login" if closed else "rerun the command to resume"
            raise OSError(f"{self.repository}: {' '.join(str(cause).split())}; {advice}") from error


def download(copies: Mapping[Published, Sequence[Any]], folder: Path) -> None:
    """Downloads what is missing of each repository's files, and notes their revisions in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    pinned = {published.repository: files[0].commit_hash for published, files in copies.items()}
    write_json(folder / REVISIONS, revisions(folder) | pinned)
    for published in copies:
        published.snapshot(published.place, revision=pinned[published.repository])


def revisions(folder: Path) -> dict[str, str]:
    """The revision of every repository that was fetched."""
    file = folder / REVISIONS
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def missing_data(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The data sets of `llava.data.prepare` of which stages lack files; `recipes` are as `DRY_RUN=json` prints them."""
    from llava.data.prepare import SOURCES  # takes a second

    inputs = [each for recipe in recipes for each in recipe["inputs"]]
    paths = [Path(each["value"]) for each in inputs if each["state"] in (MISSING, WRONG)]
    return [n for n, source in SOURCES.items() if any(path.is_relative_to(source.folder) for path in paths)]
