"""A stand-in for the model hub: what downloads by huggingface_hub request, over HTTP on this machine."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from huggingface_hub import constants
from local_server import QuietHandler, listening


@dataclass
class Repository:
    """A repository with its files by path."""

    name: str
    files: dict[str, bytes]
    commits: int = 1

    def sha(self) -> str:
        return f"{self.commits:040x}"


class Hub:
    """What the server holds and what was requested.

    Attributes:
        models: repositories by id.
        received: method and path of each file whose content or header was sent.
    """

    def __init__(self) -> None:
        self.models: dict[str, Repository] = {}
        self.received: list[str] = []
        self.endpoint = ""


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(QuietHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if not path.startswith("/api/"):
            self._file(path)
            return
        _, owner, name, *rest = [*path.removeprefix("/api/").split("/"), "", ""]
        if repository := self.hub.models.get(f"{owner}/{name}"):
            self._describe(repository, rest)
        else:
            self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def _describe(self, repository: Repository, rest: list[str]) -> None:
        """Its files, all at once, or the revision that is asked for."""
        if rest[:1] == ["tree"]:
            contents = repository.files.items()
            self._answer(
                [{"type": "file", "path": path, "oid": git_hash(file), "size": len(file)} for path, file in contents]
            )
        else:
            sha = rest[1] if rest[:1] == ["revision"] and rest[1] != "main" else repository.sha()
            self._answer({"id": repository.name, "sha": sha})

    def _file(self, path: str) -> None:
        """`[/datasets]/OWNER/NAME/resolve/REVISION/PATH`."""
        owner, name, _, _, *inside = path.removeprefix("/datasets").strip("/").split("/")
        repository = self.hub.models[f"{owner}/{name}"]
        content = repository.files.get(unquote("/".join(inside)))
        if content is None:
            self._answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        self.hub.received.append(f"{self.command} {'/'.join(inside)}")
        self._send(content, 200, {"ETag": f'"{git_hash(content)}"', "X-Repo-Commit": repository.sha()})

    def _answer(self, content: dict | list, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(content).encode(), status, {"Content-Type": "application/json"} | (headers or {}))

    def _send(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """A hub that listens on this machine."""
    hub = Hub()
    with listening(_Handler, hub=hub) as hub.endpoint:
        yield hub


def use(hub: Hub, monkeypatch: Any) -> None:
    """Lets huggingface_hub in this process take the stand-in for the hub."""
    template = hub.endpoint + constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its storage has no stand-in
