"""Kept HTTP connections to the addresses that were checked, and to no other.

The name is resolved once a connection, every address is checked, and the connection goes to one of them; TLS and the
Host header keep the name. So nothing is asked of the resolver a second time, whose answer might be another one. There
is no redirect, no cookie and no proxy here.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Final

from relay.sinks.addresses import resolve

CONNECT_S: Final = 5.0
#: The longest silence within an answer.
ANSWER_S: Final = 10.0
BODY_READ: Final = 65_536


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
        """Send a whole request and read the answer; a long body is left at `until`.

        Raises NotPublic or Unreachable if nothing was sent, else NoAnswer.
        """
        connection = self._take()
        keep = False
        try:
            connection.sendall(request)
            response = HTTPResponse(connection, method="POST")
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
        """Connect to the first address of the host that answers; each has CONNECT_S."""
        try:
            addresses = resolve(self._host, self._port, allow_private=self._allow_private)
        except OSError as error:
            raise Unreachable(str(error)) from error
        failed: OSError | None = None
        for address in addresses:
            try:
                return self._open(address)
            except OSError as error:
                failed = error
        raise Unreachable(str(failed or f"{self._host} has no address")) from failed

    def _open(self, address: str) -> socket.socket:
        connection = socket.create_connection((address, self._port), CONNECT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._secure is not None:
                connection = self._secure.wrap_socket(connection, server_hostname=self._host)
            connection.settimeout(ANSWER_S)
        except BaseException:
            connection.close()
            raise
        return connection


def _ended(connection: socket.socket) -> bool:
    """Tell whether a kept connection was ended by the other side, or has something to say unasked."""
    looked = select.poll()
    looked.register(connection, select.POLLIN)
    return bool(looked.poll(0))


def _read(response: HTTPResponse, until: float) -> bytes:
    """Read the body so that the connection can be kept; give up on a long or slow one."""
    body = b""
    while len(body) <= BODY_READ and time.monotonic() <= until and (chunk := response.read1(BODY_READ)):
        body += chunk
    return body
