"""A server of files on this machine that continues a download, and whose connections can be cut."""

import contextlib
import re
from collections.abc import Iterator

from local_server import QuietHandler, listening


class Files:
    """What the server has and what was asked of it.

    Attributes:
        contents: content by path; a number instead is the status that is answered.
        cuts: by path, how many bytes of an answer are sent before the connection is cut.
        asked: path, and first byte that was asked for, of every request.
    """

    def __init__(self) -> None:
        self.contents: dict[str, bytes | int] = {}
        self.cuts: dict[str, int] = {}
        self.asked: list[tuple[str, int]] = []
        self.address = ""


class _Handler(QuietHandler):
    files: Files

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        self.files.asked.append((self.path, start))
        content = self.files.contents.get(self.path, 404)
        if isinstance(content, int) or (asked and start >= len(content)):
            self.send_response(content if isinstance(content, int) else 416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(content[start:][: self.files.cuts.get(self.path)])


@contextlib.contextmanager
def serve_files() -> Iterator[Files]:
    """A server of `Files` that listens on this machine."""
    files = Files()
    with listening(_Handler, files=files) as files.address:
        yield files
