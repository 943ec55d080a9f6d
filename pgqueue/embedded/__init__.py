"""An embedded PostgreSQL for tests, demos and a first try; the binaries come from the extra `embedded`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pgqueue.embedded.binaries import EmbeddedUnavailable
from pgqueue.embedded.server import Embedded, EmbeddedFailed

__all__ = ["Embedded", "EmbeddedFailed", "EmbeddedUnavailable", "open_dsn"]

SCHEME = "embedded:"


@contextmanager
def open_dsn(dsn: str) -> Iterator[str]:
    """Yield a DSN that libpq takes: `embedded:[path]` runs a server for the length of the block, others
    pass as is.

    `embedded:` alone throws its data away at the end; with a path they are kept there for the next time.
    """
    if not dsn.startswith(SCHEME):
        yield dsn
        return
    path = dsn.removeprefix(SCHEME).removeprefix("//")
    with Embedded(Path(path).expanduser() if path else None) as server:
        yield server.dsn()
