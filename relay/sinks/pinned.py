"""Kept HTTP connections to the addresses that were checked, and to no other.

The name is resolved once a connection, every address is checked, and the connection goes to one of them; TLS and the
Host header keep the name. So nothing is asked of the resolver a second time, whose answer might be another one. There
is no redirect, no cookie and no proxy here.

Every step of a request ends at one deadline, and an answer has a most length: a receiver that dribbles for ever, or
says `100 Continue` for ever, holds nobody up.
"""

from __future__ import annotations

import io
import select
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Any, Final

from relay.sinks.addresses import resolve

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: For a connection: every address of the host, and TLS.
CONNECT_S: Final = 5.0
#: For a whole request: connecting, sending, and the answer.
ANSWER_S: Final = 10.0
BODY_READ: Final = 65_536
#: Bytes of an answer that are read: answers of 1xx before it, head, and body.
ANSWER_READ: Final = 2 * BODY_READ


class Unreachable(Exception):
    """No connection: nothing was sent."""


class NoAnswer(Exception):
    """Sent, perhaps in part, and not answered in time or not in HTTP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a receiver said: `headers` by names in lower case, as much of the body as was read."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Connections:
    """Connections to one host, kept while the host keeps them; as many as there are callers at a time."""

    def __init__(self, host: str, port: int, *, secure: ssl.SSLContext | None, allow_private: bool) -> None:
        self._host = host
        self._port = port
        self._secure = secure
        self._allow_private = allow_private
        self._kept: list[socket.socket] = []

    def post(self, request: bytes, until: float) -> Answer:
        """Send a whole request and read the answer within ANSWER_S; a long body is left at `until`, or at that.

        Raises NotPublic or Unreachable if nothing was sent, else NoAnswer.
        """
        deadline = time.monotonic() + ANSWER_S
        connection = self._take()
        keep = False
        try:
            _send(connection, request, deadline)
            response = HTTPResponse(_Incoming(connection, deadline), method="POST")  # type: ignore[arg-type]
            try:
                response.begin()
                body = _read(response, until)
                headers = {name.lower(): value for name, value in response.getheaders()}
                whole = response.isclosed() or response.length == 0
                keep = whole and response.status >= 200 and not response.will_close
            finally:
                response.close()
        except (OSError, HTTPException) as error:
            raise NoAnswer(str(error) or type(error).__name__) from error
        finally:
            if keep:
                self._kept.append(connection)
            else:
                connection.close()
        return Answer(status=response.status, headers=headers, body=body)

    def close(self) -> None:
        """Drop the kept connections."""
        while self._kept:
            self._kept.pop().close()

    def _take(self) -> socket.socket:
        while True:
            try:
                connection = self._kept.pop()
            except IndexError:
                return self._connect()
            if not _ended(connection):
                return connection
            connection.close()

    def _connect(self) -> socket.socket:
        """Connect to the first address of the host that answers; what is left of CONNECT_S is shared by those left."""
        try:
            addresses = resolve(self._host, self._port, allow_private=self._allow_private)
        except OSError as error:
            raise Unreachable(str(error)) from error
        until = time.monotonic() + CONNECT_S
        failed: OSError | None = None
        for place, address in enumerate(addresses):
            now = time.monotonic()
            try:
                return self._open(address, now + (until - now) / (len(addresses) - place))
            except OSError as error:
                failed = error
        raise Unreachable(str(failed or f"{self._host} has no address")) from failed

    def _open(self, address: str, until: float) -> socket.socket:
        connection = socket.create_connection((address, self._port), _left(until))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._secure is not None:
                connection.settimeout(_left(until))
                connection = self._secure.wrap_socket(connection, server_hostname=self._host)
        except BaseException:
            connection.close()
            raise
        return connection


class _TooLong(HTTPException):
    """The answer has more bytes than are read."""


class _Incoming(io.RawIOBase):
    """What comes over a connection until a deadline, at most ANSWER_READ bytes; to HTTPResponse it is a socket."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._room = ANSWER_READ

    def makefile(self, _mode: str) -> io.BufferedReader[Any]:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        if self._room <= 0:
            raise _TooLong(f"the answer has more than {ANSWER_READ} bytes")
        self._connection.settimeout(_left(self._deadline))
        count = self._connection.recv_into(buffer)
        self._room -= count
        return count


def _left(deadline: float) -> float:
    """Return how many seconds are left; raise TimeoutError if none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _send(connection: socket.socket, request: bytes, deadline: float) -> None:
    """Send all of a request; `sendall` over TLS would begin its time anew with each record."""
    rest = memoryview(request)
    while rest:
        connection.settimeout(_left(deadline))
        rest = rest[connection.send(rest) :]


def _ended(connection: socket.socket) -> bool:
    """Tell whether a kept connection was ended by the other side, or has something to say unasked."""
    looked = select.poll()
    looked.register(connection, select.POLLIN)
    return bool(looked.poll(0))


def _read(response: HTTPResponse, until: float) -> bytes:
    """Read the body so that the connection can be kept; give up on a long or slow one: the status is the answer."""
    body = b""
    with suppress(TimeoutError, _TooLong):
        while len(body) <= BODY_READ and time.monotonic() <= until and (chunk := response.read1(BODY_READ)):
            body += chunk
    return body
