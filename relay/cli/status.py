"""`outbox-relay status`"""

from __future__ import annotations

import click

from pgqueue.cli import Command, database, dsn_option
from pgqueue.cli.doctor import slot_lines
from pgqueue.connection import execute
from pgqueue.dsn import connect
from pgqueue.schema_version import require_schema
from relay.lag import lag


@click.command(cls=Command)
@dsn_option
def command(dsn: str | None) -> None:
    """Show the depth of the outbox and whether somebody publishes it."""
    with database(dsn) as url, connect(url) as conn:
        require_schema(conn)
        seen = execute(conn, lag())
        slots = slot_lines(conn)
    click.echo(f"pending             {seen.pending}")
    click.echo(f"oldest pending      {seen.oldest_pending_s:.1f} s")
    click.echo(f"parked              {seen.parked}")
    click.echo(f"blocked aggregates  {seen.blocked_aggregates}")
    click.echo(f"relays              {seen.relays}")
    click.echo(f"orphan partitions   {seen.orphan_partitions}")
    for line in slots:
        click.echo(f"replication slot    {line}")
