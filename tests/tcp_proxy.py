"""A TCP proxy on loopback that makes the faults of a network: cut, refuse, delay, freeze, lose the replies."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from typing import Self

CHUNK = 65_536
RESET = struct.pack("ii", 1, 0)


class TcpProxy:
    """Forwards connections to a port of this machine, as told; what is told holds for old and new connections.

    A system call that a stop of the process interrupts begins again by the number of its file. So threads close their
    sockets themselves: a new socket could have the number meanwhile.
    """

    def __init__(self, target: int, port: int = 0) -> None:
        self.target = target
        self.port = port
        self.connections = 0
        self.delay = 0.0
        self._listener: socket.socket | None = None
        self._server: threading.Thread | None = None
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        self._flows = threading.Event()
        self._flows.set()
        self._replies = True
        self._swallowed = threading.Event()
        self._cut_after: int | None = None
        self._cut = threading.Event()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.accept()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._flows.set()
        self.refuse()

    def accept(self) -> None:
        """Take connections, on the same port as before if there was one."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port = listener.getsockname()[1]
        self._listener = listener
        self._server = threading.Thread(target=self._serve, args=[listener], daemon=True)
        self._server.start()

    def refuse(self) -> None:
        """Take no connections any more, and cut those there are."""
        listener, self._listener = self._listener, None
        if listener is not None and self._server is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            self._server.join(60)
        self.cut()

    def cut(self) -> None:
        """Reset every connection."""
        with self._lock:
            for pair in self._pairs:
                _reset(*pair)
            self._pairs = set()

    def cut_after(self, size: int) -> threading.Event:
        """Reset every connection once so many bytes more went to the broker; return the event of it."""
        self._cut.clear()
        self._cut_after = size
        return self._cut

    def lose_replies(self) -> threading.Event:
        """Let requests through and swallow the replies; return the event of the first one swallowed."""
        self._swallowed.clear()
        self._replies = False
        return self._swallowed

    def freeze(self) -> None:
        """Forward nothing, in either direction, with every connection open."""
        self._flows.clear()

    def heal(self) -> None:
        """Forward everything again; connections that lost replies are cut first, for they are out of step."""
        if not self._replies:
            self._replies = True
            self.cut()
        self._cut_after = None
        self.delay = 0.0
        self._flows.set()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                listener.close()
                return
            self.connections += 1
            try:
                server = socket.create_connection(("127.0.0.1", self.target), 5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = (client, server)
            with self._lock:
                self._pairs.add(pair)
            if self._listener is not listener:  # refused meanwhile
                self.cut()
            threading.Thread(target=self._carry, args=[pair], daemon=True).start()

    def _carry(self, pair: tuple[socket.socket, socket.socket]) -> None:
        client, server = pair
        answers = threading.Thread(target=self._pump, args=[pair, server, client, True], daemon=True)
        answers.start()
        self._pump(pair, client, server, False)
        answers.join()
        with self._lock:
            client.close()
            server.close()

    def _pump(
        self,
        pair: tuple[socket.socket, socket.socket],
        source: socket.socket,
        sink: socket.socket,
        back: bool,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                self._flows.wait()
                if self.delay:
                    self._over.wait(self.delay)
                if back and not self._replies:
                    self._swallowed.set()
                    continue
                if not back and self._cut_after is not None:
                    self._cut_after -= len(data)
                    if self._cut_after < 0:
                        sink.sendall(data[: self._cut_after])
                        self._cut_after = None
                        self.cut()
                        self._cut.set()
                        return
                sink.sendall(data)
        with self._lock:
            if pair in self._pairs:
                self._pairs.discard(pair)
                _reset(*pair)


def _reset(*ends: socket.socket) -> None:
    """Reset connections; the numbers of their files stay taken, by a socket that is good for nothing."""
    with socket.socket() as nowhere:
        for end in ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.shutdown(socket.SHUT_RD)
            with contextlib.suppress(OSError):
                os.dup2(nowhere.fileno(), end.fileno(), inheritable=False)
