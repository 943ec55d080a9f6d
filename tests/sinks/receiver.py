"""A webhook receiver in a thread: keeps what it was sent, answers as told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One request as it arrived; header names in lower case."""

    headers: Mapping[str, str]
    body: str

    @property
    def key(self) -> str:
        """Return the idempotency key."""
        return self.headers["webhook-id"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What to answer. `hang_up` closes the connection instead, after the delivery was kept."""

    status: int = 204
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    hang_up: bool = False


OK = Answer()


class Receiver:
    """A server on loopback; `answer(delivery)` decides, deliveries answered 2xx or hung up on are kept."""

    def __init__(self, answer: Callable[[Delivery], Answer] = lambda _: OK) -> None:
        self.answer = answer
        self.kept: list[Delivery] = []
        self.seen: list[Delivery] = []
        self.together = 0
        self.most_together = 0
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Return where it listens, also after a stop."""
        return f"http://127.0.0.1:{self._port}/events"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                answer = receiver.take(
                    Delivery(headers={k.lower(): v for k, v in self.headers.items()}, body=body)
                )
                if answer.hang_up:
                    self.close_connection = True
                    return
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if answer.status != 204:
                    self.send_header("content-length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """Say nothing: senders are killed and speak the wrong protocol on purpose."""

        self._server = Quiet(("127.0.0.1", self._port), Handler, bind_and_activate=False)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._server.allow_reuse_address = True
        self._server.request_queue_size = 64
        self._server.server_bind()
        self._server.server_activate()
        self._port = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def stop(self) -> None:
        """Listen no more; connections that are open stay until the other side ends them."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def take(self, delivery: Delivery) -> Answer:
        """Decide about one delivery and keep it."""
        with self._lock:
            self.together += 1
            self.most_together = max(self.most_together, self.together)
            self.seen.append(delivery)
        try:
            answer = self.answer(delivery)
        finally:
            with self._lock:
                self.together -= 1
        if answer.hang_up or 200 <= answer.status < 300:
            with self._lock:
                self.kept.append(delivery)
        return answer
