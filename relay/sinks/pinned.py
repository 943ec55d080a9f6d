"""TCP connections to the addresses that were checked, and to no other.

The name is resolved once a connection, every address is checked, and the connection goes to one of them; TLS and the
Host header keep the name. So nothing is asked of the resolver a second time, whose answer might be another one.
"""

from __future__ import annotations

from collections.abc import Iterable

import httpcore

from relay.sinks.addresses import resolve


class Pinned(httpcore.NetworkBackend):
    """Connects for a connection pool of httpcore."""

    def __init__(self, *, allow_private: bool) -> None:
        self._allow_private = allow_private
        self._plain = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first address of a host that answers; each has `timeout` seconds."""
        try:
            addresses = resolve(host, port, allow_private=self._allow_private)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        failed: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in addresses:
            try:
                return self._plain.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
        raise failed
