"""Open the database for a command that looks or acts once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from pgqueue.cli import database
from pgqueue.dsn import connect
from pgqueue.schema_version import require_schema


@contextmanager
def opened(dsn: str | None, *, check: bool = True) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """Yield an autocommit connection: each statement is a transaction of its own, whole or not at all.

    Raises SchemaError unless this version can work on the database (`check=False`: whatever it is like).
    """
    with database(dsn) as url, connect(url, autocommit=True) as connection:
        if check:
            require_schema(connection)
        yield connection
