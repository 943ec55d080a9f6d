"""`pgqueue schedule list | add | remove | pause | resume | next`"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice
from typing import get_args
from zoneinfo import ZoneInfo

import click
import psycopg

from pgqueue import control, schedule
from pgqueue.cli import Failure, Group, dsn_option
from pgqueue.cli._app import Duration
from pgqueue.cli._payload import checked, undeclared
from pgqueue.cli._session import opened
from pgqueue.cli._table import clean, print_json, print_table
from pgqueue.connection import execute
from pgqueue.cron import Cron
from pgqueue.errors import BadOption
from pgqueue.schedule import Missed, Schedule


@click.group("schedule", cls=Group)
def command() -> None:
    """See, add, pause and remove schedules; work out the ticks of an expression."""


@command.command("list")
@dsn_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def list_(dsn: str | None, *, as_json: bool) -> None:
    """List the schedules. orphan: no running worker that has the job defines it any more, so it rests."""
    with opened(dsn) as conn:
        found = execute(conn, schedule.status())
    if as_json:
        print_json(found)
        return
    print_table(
        ("NAME", "STATE", "EXPRESSION", "ZONE", "JOB", "MISSED", "NEXT", "LAST", "LATE S", "FROM", "PROBLEM"),
        [
            (
                s.name, s.state, s.expr, s.zone, s.job, s.missed, s.next_at, s.last_at, s.late_s, s.source, s.problem,
            )
            for s in found
        ],
        empty="no schedules: write @app.schedule(..) above a handler, or run pgqueue schedule add",
    )  # fmt: skip
    if orphans := [s.name for s in found if s.state == "orphan"]:
        click.echo(f"for good: pgqueue schedule remove {clean(orphans[0])}", err=True)


@command.command()
@dsn_option
@click.argument("name")
@click.argument("expr")
@click.argument("job")
@click.option(
    "--timezone", default="UTC", show_default=True, metavar="ZONE", help="IANA zone of the expression."
)
@click.option("--payload", default="null", show_default=True, metavar="JSON",
              help="The payload of each job; @FILE reads it from a file.")  # fmt: skip
@click.option("--app", "path", metavar="APP", envvar="PGQUEUE_APP", show_envvar=True,
              help="Check the payload against the handler's type in APP (module:name).")  # fmt: skip
@click.option(
    "--jitter", type=Duration(), default="0s", show_default=True, help="Delay each job at random up to this."
)
@click.option(
    "--missed", type=click.Choice(get_args(Missed)), default="once", show_default=True,
    help="What becomes of ticks that nobody ran in time.",
)  # fmt: skip
@click.option(
    "--cap", type=int, default=10, show_default=True, help="With --missed all: how many of them run."
)
@click.option("--force", is_flag=True, help="Take a job name that no worker has declared yet.")
def add(
    dsn: str | None, *, name: str, expr: str, job: str, timezone: str, payload: str, path: str | None,
    jitter: timedelta, missed: Missed, cap: int, force: bool,
) -> None:  # fmt: skip
    """Enqueue JOB at the times of EXPR, under NAME; change it if it is there."""
    made = Schedule(name=name, job=job, cron=Cron(expr, timezone), jitter=jitter, missed=missed, cap=cap)
    with opened(dsn) as conn:
        known = execute(conn, control.names())
        if job not in known and not force:
            raise undeclared(job, known, ", or give --force")
        made = replace(made, payload=checked(job, payload, path))
        try:
            execute(conn, schedule.add(made))
        except psycopg.errors.InvalidParameterValue as error:
            raise Failure(clean(error.diag.message_primary or str(error))) from error
    click.echo(f"added {clean(name)}; next {_shown(made.cron, datetime.now(UTC), 1)[0]}")


@command.command()
@dsn_option
@click.argument("name")
def remove(dsn: str | None, *, name: str) -> None:
    """Remove a schedule; the jobs it made stay. One that is still in the code comes back with the next worker."""
    with opened(dsn) as conn:
        _known(name, found=execute(conn, schedule.remove(name)))
    click.echo(f"removed {clean(name)}")


@command.command()
@dsn_option
@click.argument("name")
def pause(dsn: str | None, *, name: str) -> None:
    """Let a schedule rest until it is resumed, whatever is deployed meanwhile."""
    with opened(dsn) as conn:
        _known(name, found=execute(conn, schedule.pause(name)))
    click.echo(f"paused {clean(name)}")


@command.command()
@dsn_option
@click.argument("name")
def resume(dsn: str | None, *, name: str) -> None:
    """Let a schedule go on from now; what fell due meanwhile does not run."""
    with opened(dsn) as conn:
        _known(name, found=execute(conn, schedule.resume(name)))
    click.echo(f"resumed {clean(name)}")


@command.command("next")
@click.argument("expr")
@click.option(
    "--timezone", default="UTC", show_default=True, metavar="ZONE", help="IANA zone of the expression."
)
@click.option("-n", "count", type=click.IntRange(1, 1000), default=5, show_default=True, help="How many.")
@click.option(
    "--from", "start", type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"]),
    help="Local time in the zone to start after.  [default: now]",
)  # fmt: skip
def next_(*, expr: str, timezone: str, count: int, start: datetime | None) -> None:
    """Print the next ticks of EXPR, local and in UTC; needs no database."""
    cron = Cron(expr, timezone)
    after = datetime.now(UTC) if start is None else start.replace(tzinfo=_zone(timezone))
    for line in _shown(cron, after, count):
        click.echo(line)


def _shown(cron: Cron, after: datetime, count: int) -> list[str]:
    zone = _zone(cron.zone)
    return [
        f"{tick.astimezone(zone):%a %Y-%m-%d %H:%M:%S %z} {cron.zone}  {tick:%Y-%m-%d %H:%M:%S}Z"
        for tick in islice(cron.ticks(after), count)
    ]


def _zone(name: str) -> tzinfo:
    return UTC if name == "UTC" else ZoneInfo(name)


def _known(name: str, *, found: bool) -> None:
    if not found:
        raise BadOption("name", f"there is no schedule {clean(name)!r}; see pgqueue schedule list")
