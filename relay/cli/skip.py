"""`outbox-relay skip`"""

from __future__ import annotations

import click

from pgqueue.cli import Command, dsn_option
from relay.cli._change import EVENT_ID, change
from relay.park import skip


@click.command(cls=Command)
@dsn_option
@click.argument("ids", type=EVENT_ID, nargs=-1, required=True)
def command(dsn: str | None, ids: tuple[int, ...]) -> None:
    """Set events aside for good, so that the later ones of their aggregates go on."""
    change(dsn, ids, skip, "skipped")
