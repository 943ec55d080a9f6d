"""`outbox-relay hold`"""

from __future__ import annotations

import click

from pgqueue.cli import Command, Failure, database, dsn_option
from pgqueue.connection import execute
from pgqueue.dsn import connect
from pgqueue.schema_version import require_schema
from relay.park import hold


@click.command(cls=Command)
@dsn_option
@click.argument("aggregate")
@click.option("--why", default="held by hand", show_default=True, help="The reason that `parked` shows.")
def command(dsn: str | None, aggregate: str, why: str) -> None:
    """Stop an aggregate at its oldest unpublished event, until `retry` or `skip` with the id that is printed."""
    with database(dsn) as url, connect(url) as conn:
        require_schema(conn)
        held = execute(conn, hold(aggregate, why=why))
    if held is None:
        raise Failure(f"aggregate {aggregate!r} has no unpublished event to stop at")
    click.echo(f"{held}\theld; go on with: outbox-relay retry {held}")
