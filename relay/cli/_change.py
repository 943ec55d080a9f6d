"""Change events that an operator names by their ids, and say what became of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import click

from pgqueue.cli import database
from pgqueue.cli._app import Id
from pgqueue.connection import execute
from pgqueue.dsn import connect
from pgqueue.schema_version import require_schema
from pgqueue.statement import Statement

EVENT_ID: Final = Id("event", "outbox-relay parked shows those in trouble")

Verb = Callable[[Sequence[int]], Statement[list[int]]]


def change(dsn: str | None, ids: Sequence[int], verb: Verb, what: str) -> None:
    """Run a verb on events and print one line for each; exit status 1 if it changed none."""
    with database(dsn) as url, connect(url) as conn:
        require_schema(conn)
        done: list[int] = execute(conn, verb(ids))
    for id_ in ids:
        click.echo(f"{id_}\t{what if id_ in done else 'unchanged: published, unknown, or not in trouble'}")
    if not done:
        raise click.exceptions.Exit(1)
