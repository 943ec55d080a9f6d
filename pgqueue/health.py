"""Tell an orchestrator whether a service makes progress: by a port (200, 503) or a file (there or not).

The port answers /metrics too where the extra `metrics` is installed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pgqueue.events import Bus

Check = Callable[[], str | None]
#: Returns the content type and the body.
Page = Callable[[], tuple[str, bytes]]

EVERY_S: Final = 2.0


def pages(bus: Bus, dsn: str) -> dict[str, Page]:
    """Return the pages beside the health check, by path: /metrics where prometheus-client is installed."""
    if find_spec("prometheus_client") is None:
        return {}
    from pgqueue.metrics import Metrics

    return {"/metrics": Metrics(bus, dsn).page}


def serve(host: str, port: int, check: Check, pages: Mapping[str, Page]) -> ThreadingHTTPServer:
    """Answer GET on a port from a thread: a page by its path, else 200 `ok`, or 503 and which loop is stalled."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            stalled = None if page else check()
            kind, body = page() if page else ("text/plain; charset=utf-8", f"{stalled or 'ok'}\n".encode())
            self.send_response(503 if stalled else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the one it replaces
            """Say nothing: probes come every few seconds."""

    server = ThreadingHTTPServer((host, port), Answer)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="pgqueue-health", daemon=True).start()
    return server


def keep_file(path: Path, check: Check, stop: threading.Event) -> threading.Thread:
    """Keep a file while the service is well: touched every two seconds, gone when a loop stalls or ends."""

    def watch() -> None:
        while not stop.wait(EVERY_S):
            if check() is None:
                path.touch()
            else:
                path.unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    path.touch()
    thread = threading.Thread(target=watch, name="pgqueue-health-file", daemon=True)
    thread.start()
    return thread
