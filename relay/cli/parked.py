"""`outbox-relay parked`"""

from __future__ import annotations

import click

from pgqueue.cli import Command, database, dsn_option
from pgqueue.cli._app import Id
from pgqueue.connection import execute
from pgqueue.dsn import connect
from pgqueue.schema_version import require_schema
from relay.park import Parked, parked

REASON = 160


@click.command(cls=Command)
@dsn_option
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Rows at most.")
@click.option(
    "--after",
    type=Id("event", "0 is before the first", least=0),
    default=0,
    show_default=True,
    help="Only ids above this one.",
)
def command(dsn: str | None, limit: int, after: int) -> None:
    """List events that are parked or wait, oldest first."""
    with database(dsn) as url, connect(url) as conn:
        require_schema(conn)
        rows = execute(conn, parked(after=after, limit=limit))
    for row in rows:
        click.echo("\t".join(_columns(row)))
    if not rows:
        click.echo("no event is parked, and none waits after a rejection", err=True)
    if len(rows) == limit:
        click.echo(f"there may be more: outbox-relay parked --after {rows[-1].id}", err=True)


def _columns(row: Parked) -> list[str]:
    state = "waits" if row.parked_at is None else "blocks" if row.blocks else "parked"
    reason = " ".join(row.last_error.split())[:REASON]
    return [str(row.id), state, row.event_type, row.aggregate_id or "-", f"attempts={row.attempts}", reason]
