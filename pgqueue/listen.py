"""Listen: hear of jobs the moment they are committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import psycopg
import psycopg.sql

from pgqueue.heartbeat import channels
from pgqueue.pipeline import Pipeline

#: What a notification says when jobs were given back, which stand below the floors of others.
BELOW: Final = b"below"


def listen(connection: psycopg.Connection[Any], queues: Sequence[str]) -> None:
    """Listen for jobs of these queues; closes a connection on which that fails."""
    try:
        with Pipeline(connection) as p:
            names = p.send(channels(queues))
        for name in names.result():  # they come from the database
            connection.execute(
                psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(name)), prepare=False
            )
    except BaseException:
        connection.close()
        raise


def take_notes(connection: psycopg.Connection[Any]) -> set[bytes]:
    """Take in what was notified, without waiting; return what the notifications said."""
    said: set[bytes] = set()
    connection.pgconn.consume_input()
    while (note := connection.pgconn.notifies()) is not None:
        said.add(note.extra)
    return said
