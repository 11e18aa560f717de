"""An HTTP server on this machine, for the time of a test."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, *args) -> None:
        """Nothing on stderr."""


@contextlib.contextmanager
def listening(handler: type[QuietHandler], **shared: object) -> Iterator[str]:
    """The address of a server whose handlers have the attributes `shared`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), shared))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
