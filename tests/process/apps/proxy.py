"""A proxy between a worker and Postgres that can lose what one of them said."""

from __future__ import annotations

import select
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

LISTENER = ".s.PGSQL.5432"


class Proxy:
    """Passes bytes on. `cut` loses one round trip: the first request that holds all the given marks."""

    def __init__(self, dsn: str) -> None:
        parts = conninfo_to_dict(dsn)
        self._host, self._port = str(parts.get("host") or "localhost"), int(parts.get("port") or 5432)
        # The path of a socket is short, so not pytest's own folder.
        self._folder = tempfile.TemporaryDirectory(prefix="proxy-")
        self.dsn = make_conninfo(dsn, host=self._folder.name, port=5432)
        self._marks: tuple[bytes, ...] = ()
        self._delivered = False
        self._lock = threading.Lock()
        self.cuts = threading.Event()
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(Path(self._folder.name) / LISTENER))
        self._door.listen()
        self._closing = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for thread in self._threads:
            thread.join(5)
        self._folder.cleanup()

    def cut(self, *marks: bytes, delivered: bool) -> None:
        """Break the connection at the next request with these marks, before it arrives or after it was answered."""
        self._delivered, self._marks = delivered, marks

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._door.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        asked, marked = b"", False  # what the client has said since the server's last answer
        with client, self._connect() as server, suppress(OSError):
            while not self._closing:
                for ready in select.select([client, server], [], [], 0.1)[0]:
                    data = ready.recv(1 << 20)
                    if not data:
                        return
                    if ready is client:
                        asked += data
                        marked = marked or self._is_marked(asked)
                        if marked and not self._delivered:
                            self.cuts.set()
                            return
                        server.sendall(data)
                    elif marked:  # the answer: the commit has happened
                        self.cuts.set()
                        return
                    else:
                        asked = b""
                        client.sendall(data)

    def _is_marked(self, data: bytes) -> bool:
        with self._lock:
            if not self._marks or not all(mark in data for mark in self._marks):
                return False
            self._marks = ()
            return True

    def _connect(self) -> socket.socket:
        if self._host.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{self._host}/.s.PGSQL.{self._port}")
            return server
        return socket.create_connection((self._host, self._port))
