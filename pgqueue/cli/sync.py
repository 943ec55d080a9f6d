"""`pgqueue sync`"""

from __future__ import annotations

import click

from pgqueue.cli import Command, dsn_option
from pgqueue.cli._app import load_app
from pgqueue.cli._session import opened
from pgqueue.connection import execute
from pgqueue.declare import declare
from pgqueue.errors import ConfigError
from pgqueue.schedule import define


@click.command("sync", cls=Command)
@click.argument("app", envvar="PGQUEUE_APP")
@dsn_option
def command(app: str, dsn: str | None) -> None:
    """Write the job types and schedules of APP (module:name) to the database: every producer's rows follow them.

    Each worker does so when it starts; run this after a migration, before the producers start.
    """
    loaded = load_app(app)
    types, schedules = loaded.types, loaded.schedules
    if not types:
        raise ConfigError(f"{app} has no jobs: import the modules that define them where the app is made")
    with opened(dsn) as conn:
        execute(conn, declare(kind.policy for kind in types.values()))
        execute(conn, define(schedules.values()))
    for name, kind in sorted(types.items()):
        click.echo(f"{name}\tqueue {kind.queue}")
    for name, schedule in sorted(schedules.items()):
        click.echo(f"{name}\tschedule {schedule.cron.expr} {schedule.cron.zone}")
