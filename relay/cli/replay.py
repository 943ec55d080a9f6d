"""`outbox-relay replay`"""

from __future__ import annotations

import sys
import time
from datetime import datetime, timedelta
from typing import Any

import click
import psycopg

from pgqueue.cli import Command, Failure, database, dsn_option, option
from pgqueue.cli._app import Id, Rate
from pgqueue.cli._filter import Moment
from pgqueue.cli._table import clean, print_json
from pgqueue.connection import execute
from pgqueue.dsn import connect
from pgqueue.errors import BadOption
from pgqueue.schema_version import require_schema
from relay import replay
from relay.replay import Replay, Which

#: A batch is what the rate allows in this time, and never more than LARGEST.
BEAT_S = 0.2
LARGEST = 500
RATE = 500.0

Connection = psycopg.Connection[Any]


@click.command(cls=Command)
@dsn_option
@click.option("--type", "event_type", metavar="TYPE", help="Only this type, or a prefix: order.*")
@click.option("--aggregate", metavar="ID", help="Only events of this aggregate.")
@click.option(
    "--since", type=Moment(), help="Only what was written from then on: 2026-03-01T12:00, or 2h ago."
)
@click.option("--to", "until", type=Moment(), help="Only what was written before.")
@click.option("--all", "everything", is_flag=True, help="All of history.")
@option(
    "--rate", type=Rate(), default=RATE, show_default=True, env="OUTBOX_REPLAY_RATE",
    help="Events a second; 0: as fast as it goes.",
)  # fmt: skip
@click.option(
    "--resume",
    type=Id("replay", "a replay that is stopped says its own"),
    metavar="REPLAY",
    help="Go on with a replay that was stopped.",
)
@click.option(
    "--new", "anew", is_flag=True, help="Begin anew although one of the same type and aggregate was stopped."
)
@click.option("--yes", is_flag=True, help="Do it; without this the command only says what it would do.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def command(
    dsn: str | None, *, event_type: str | None, aggregate: str | None, since: datetime | timedelta | None,
    until: datetime | timedelta | None, everything: bool, rate: float, resume: int | None, anew: bool, yes: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Publish events again that were published before, as copies with new ids in the old order.

    Says how many there are; --yes does it. Each copy has a new key, so that no inbox drops it, and names the old one in
    the header replay_of. It can be stopped at any time and resumed: each event is copied once.
    """
    with database(dsn) as url, connect(url, autocommit=True) as conn:
        require_schema(conn)
        clock = execute(conn, replay.now())
        which = Which(
            event_type=event_type,
            aggregate_id=aggregate,
            since=_moment(since, clock),
            until=_moment(until, clock),
        )
        if resume is not None:
            if not which.is_empty() or everything or anew:
                raise BadOption("--resume", "goes without filters, --all and --new")
            run = _known(conn, resume)
            which = run.which
        elif which.is_empty() != everything:
            raise BadOption(
                "events",
                "--all goes without filters" if everything else "name a filter (see --help), or --all",
            )
        else:
            stopped = execute(conn, replay.unfinished(which))
            if stopped is not None and not anew:
                raise Failure(
                    f"replay {stopped.id} of the same type and aggregate stopped after {stopped.copied} events: go on "
                    f"with --resume {stopped.id}, or begin anew with --new"
                )
        seen = execute(conn, replay.found(which))
        if not yes:
            _say(seen, which, as_json=as_json)
            return
        if resume is None:
            run = _begin(conn, which, anew=anew)
        total = _copy(conn, run, wanted=seen.events, rate=rate)
        if as_json:
            print_json({"replay": run.id, "found": seen.events, "copied": total})
        else:
            click.echo(f"replay {run.id}: {total} events are in the outbox again")


def _moment(given: datetime | timedelta | None, clock: datetime) -> datetime | None:
    return clock - given if isinstance(given, timedelta) else given


def _known(conn: Connection, id_: int) -> Replay:
    run = execute(conn, replay.show(id_))
    if run is None:
        raise Failure(f"there is no replay {id_}")
    if run.ended_at is not None:
        raise Failure(f"replay {id_} has ended, with {run.copied} events")
    return run


def _begin(conn: Connection, which: Which, *, anew: bool) -> Replay:
    with conn.transaction():
        if anew:
            execute(conn, replay.leave(which))
        run = execute(conn, replay.begin(which))
    if run is None:
        raise Failure("somebody else has begun the same replay just now")
    return run


def _say(seen: replay.Found, which: Which, *, as_json: bool) -> None:
    if as_json:
        print_json({"found": seen.events, "types": seen.types, "aggregates": seen.aggregates,
                    "first": seen.first, "last": seen.last})  # fmt: skip
    elif not seen.events:
        click.echo("no published events match")
    else:
        what = clean(which.event_type) if which.event_type else f"{seen.types} types"
        click.echo(
            f"would publish {seen.events} events again ({what}, {seen.aggregates} aggregates, "
            f"{seen.first} to {seen.last}); nothing was done: add --yes"
        )


def _copy(conn: Connection, run: Replay, *, wanted: int, rate: float) -> int:
    size = min(LARGEST, max(1, round(rate * BEAT_S))) if rate else LARGEST
    total, due = run.copied, time.monotonic()
    bar = click.progressbar(length=wanted, label="replay", file=sys.stderr, hidden=not sys.stderr.isatty())
    try:
        with bar:
            bar.update(total)
            while True:
                time.sleep(max(0.0, due - time.monotonic()))
                step = execute(conn, replay.copy(run.id, n=size))
                if step is None:  # somebody else has ended it
                    ended = execute(conn, replay.show(run.id))
                    return ended.copied if ended else total
                due = time.monotonic() + (step.now / rate if rate else 0.0)
                total = step.total
                bar.update(step.now)
                if step.ended:
                    return total
    except (KeyboardInterrupt, psycopg.Error):
        click.echo(f"stopped after {total} of {wanted}; go on with: --resume {run.id} --yes", err=True)
        raise
