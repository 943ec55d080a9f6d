"""`outbox-relay retry`"""

from __future__ import annotations

import click

from pgqueue.cli import Command, dsn_option
from relay.cli._change import EVENT_ID, change
from relay.park import retry


@click.command(cls=Command)
@dsn_option
@click.argument("ids", type=EVENT_ID, nargs=-1, required=True)
def command(dsn: str | None, ids: tuple[int, ...]) -> None:
    """Make parked or waiting events due again, in their old place and with all attempts."""
    change(dsn, ids, retry, "due again")
