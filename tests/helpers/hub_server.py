"""A stand-in for the model hub: what uploads and downloads by huggingface_hub ask, over HTTP on this machine."""

import base64
import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from huggingface_hub import constants
from local_server import QuietHandler, listening

WRITER, READER = "hf_writer", "hf_reader"  # tokens; any other is not accepted
OWNER = "owner"  # in whose name the writer may make repositories


@dataclass
class Repository:
    """A repository: for each branch its files by path, each with its content.

    Attributes:
        public: whether it may be read without a token.
        gated: whether its files may be read with `READER` alone.
    """

    name: str
    private: bool = False
    public: bool = False
    gated: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: int = 1

    def sha(self) -> str:
        return f"{self.commits:040x}"


class Hub:
    """What the server holds and what was asked of it.

    Attributes:
        models: repositories by id.
        received: names of requests, and of every file whose content came.
        fails: part of a request, method and path, whose connection is cut, or None.
    """

    def __init__(self) -> None:
        self.models: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.received: list[str] = []
        self.fails: str | None = None
        self.endpoint = ""


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entries(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, str | int]]:
    """The files and folders below a folder of a repository."""
    below = {path: content for path, content in files.items() if path.startswith(f"{folder}/") or not folder}
    depth = folder.count("/") + 2 if folder else 1
    parents = {"/".join(path.split("/")[:count]) for path in below for count in range(depth, path.count("/") + 1)}
    shown = [{"type": "directory", "path": path, "oid": git_hash(path.encode()), "size": 0} for path in sorted(parents)]
    shown += [{"type": "file", "path": path, "oid": git_hash(content), "size": len(content)}
              for path, content in below.items()]  # fmt: skip
    return [entry for entry in shown if recursive or str(entry["path"]).count("/") == depth - 1]


class _Handler(QuietHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if not self.path.startswith("/api/"):
            self._file()
            return
        kind, *rest = self.path.partition("?")[0].removeprefix("/api/").split("/")
        name = "/".join(rest[:2])
        repository = self.hub.models.get(name)
        if repository and repository.public:
            self._describe(repository, rest[2:])
            return
        if not self._accepted():
            return
        if kind == "models" and name in self.hub.models:
            repository = self.hub.models[name]
            self._answer({"id": name, "sha": repository.sha(), "private": repository.private})
        else:
            self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0]
        if self._cut(path) or not self._accepted():
            return
        if path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif not self._may_write():
            return
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        else:
            _, _, _, owner, name, action, branch = path.split("/")
            getattr(self, f"_{action}")(self.hub.models[f"{owner}/{name}"], branch, body)

    def do_PUT(self) -> None:
        if self._cut(self.path):
            return
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.objects[self.path.rsplit("/", 1)[1]] = content
        self._answer({})

    # --- reading ------------------------------------------------------------------------------------------------------

    def _describe(self, repository: Repository, rest: list[str]) -> None:
        files = repository.branches["main"]
        if rest[:1] == ["auth-check"]:
            self._refuse_gated(repository) or self._answer({})
        elif rest[:1] == ["tree"]:
            self._answer(entries(files, "/".join(rest[2:]), "recursive=true" in self.path.lower()))
        else:
            siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
            gated = "manual" if repository.gated else False
            sha = rest[1] if rest[:1] == ["revision"] and rest[1] != "main" else repository.sha()
            self._answer({"id": repository.name, "sha": sha, "gated": gated, "siblings": siblings})

    def _file(self) -> None:
        """`[/datasets]/OWNER/NAME/resolve/REVISION/PATH`."""
        owner, name, _, _, *path = self.path.partition("?")[0].removeprefix("/datasets").strip("/").split("/")
        repository = self.hub.models[f"{owner}/{name}"]
        if self._cut(f"{self.command} {self.path}") or self._refuse_gated(repository):
            return
        content = repository.branches["main"].get(unquote("/".join(path)))
        if content is None:
            self._answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        self.hub.received.append(f"{self.command} {'/'.join(path)}")
        self.send_response(200)
        for header, value in (("ETag", f'"{git_hash(content)}"'), ("X-Repo-Commit", repository.sha())):
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _refuse_gated(self, repository: Repository) -> bool:
        refused = repository.gated and not self.headers.get("Authorization", "").endswith(READER)
        if refused:
            self._answer({"error": "Access is restricted"}, 403, {"X-Error-Code": "GatedRepo"})
        return refused

    # --- what is asked ------------------------------------------------------------------------------------------------

    def _create(self, asked: dict) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != OWNER:
            self._answer({"error": "You don't have the rights"}, 403)
            return
        status = 409 if name in self.hub.models else 200
        self.hub.models.setdefault(name, Repository(name, private=asked.get("visibility") == "private"))
        self._answer({"url": f"{self.hub.endpoint}/{name}", "name": name}, status)

    def _branch(self, repository: Repository, branch: str, body: bytes) -> None:
        if branch in repository.branches:
            self._answer({"error": "Reference already exists"}, 409)
        else:
            repository.branches[branch] = dict(repository.branches["main"])
            self._answer({})

    def _preupload(self, repository: Repository, branch: str, body: bytes) -> None:
        here, files = repository.branches[branch], []
        for file in json.loads(body)["files"]:
            path, large = file["path"], file["path"].endswith((".safetensors", ".bin", ".gguf"))
            content = here.get(path)
            oid = None if content is None else hashlib.sha256(content).hexdigest() if large else git_hash(content)
            mode = "lfs" if large else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._answer({"files": files})

    def _batch(self, asked: dict) -> None:
        objects = []
        for entry in asked["objects"]:
            upload = {"upload": {"href": f"{self.hub.endpoint}/lfs/{entry['oid']}"}}
            objects.append(entry | ({} if entry["oid"] in self.hub.objects else {"actions": upload}))
        self._answer({"objects": objects, "transfer": "basic"})

    def _commit(self, repository: Repository, branch: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                content = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self.hub.objects[value["oid"]]
            else:
                continue
            repository.branches[branch][value["path"]] = content
            self.hub.received.append(value["path"])
        repository.commits += 1
        oid = repository.sha()
        self._answer({"commitUrl": f"{self.hub.endpoint}/{repository.name}/commit/{oid}", "commitOid": oid})

    # --- how it is answered -------------------------------------------------------------------------------------------

    def _cut(self, path: str) -> bool:
        cut = self.hub.fails is not None and self.hub.fails in path
        if cut:
            self.close_connection = True
            self.connection.close()
        return cut

    def _accepted(self) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token in (WRITER, READER):
            return True
        message = "Invalid credentials in Authorization header"
        self._answer({"error": message}, 401, {"X-Error-Message": message})
        return False

    def _may_write(self) -> bool:
        may = self.headers["Authorization"].endswith(WRITER)
        if not may:
            self._answer({"error": "You don't have the rights"}, 403)
        return may

    def _answer(self, content: dict | list, status: int = 200, headers: dict | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        described = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, value in (described | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
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
