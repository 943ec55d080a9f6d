"""`pgqueue dead list | show | replay | discard`"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click
import msgspec
import psycopg

from pgqueue import dead
from pgqueue.cli import Failure, Group, dsn_option, option
from pgqueue.cli._app import JobId, Rate
from pgqueue.cli._filter import filter_of, filter_options
from pgqueue.cli._payload import checked
from pgqueue.cli._session import opened
from pgqueue.cli._table import print_block, print_facts, print_json, print_table
from pgqueue.cli.jobs import print_history, print_payload, value_of
from pgqueue.connection import execute
from pgqueue.dead import DeadJob, Filter, Moved
from pgqueue.errors import BadOption
from pgqueue.job import given_key
from pgqueue.statement import Statement

#: Batches a second: small enough that the rate is even, large enough to be cheap.
BEAT_S = 0.2
UNLIMITED_BATCH = 500


@click.group("dead", cls=Group)
def command() -> None:
    """Look after dead letters: jobs that failed for good and wait for a person."""


def _json_option(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")(function)


def _move_options(function: Any) -> Any:
    for add in reversed(
        (
            click.option("--all", "everything", is_flag=True, help="Every dead letter there is."),
            click.option(
                "--yes", is_flag=True, help="Do it; without this the command only says what it would do."
            ),
            option(
                "--limit", type=click.IntRange(1), default=dead.LIMIT, show_default=True, env="PGQUEUE_DEAD_LIMIT",
                help="Jobs at most, the lowest ids first.",
            ),
            option(
                "--rate", type=Rate(), default=dead.RATE, show_default=True, env="PGQUEUE_DEAD_RATE",
                help="Jobs a second; 0: as fast as it goes.",
            ),
        )
    ):  # fmt: skip
        function = add(function)
    return function


@command.command("list")
@dsn_option
@filter_options
@click.option(
    "--each", is_flag=True, help="One line a dead letter, the newest first, instead of one an error type."
)
@option(
    "--limit",
    type=click.IntRange(1),
    default=50,
    show_default=True,
    env="PGQUEUE_DEAD_LIST_LIMIT",
    help="Lines at most.",
)
@_json_option
def list_(dsn: str | None, *, each: bool, limit: int, as_json: bool, **given: Any) -> None:
    """Count dead letters by error type, the one seen last first."""
    which = filter_of(given)
    with opened(dsn) as conn:
        if each:
            letters = execute(conn, dead.letters(which, n=limit))
        else:
            groups = execute(conn, dead.groups(which, n=limit))
    if as_json:
        print_json(letters if each else groups)
    elif each:
        print_table(
            ("ID", "NAME", "QUEUE", "DIED", "ATTEMPTS", "REASON", "ERROR TYPE", "ERROR"),
            [
                (d.id, d.name, d.queue, d.died_at, d.attempts, d.reason, d.error_type, d.error)
                for d in letters
            ],
            empty="no dead letters",
        )
    else:
        print_table(
            ("ERROR TYPE", "JOBS", "FIRST SEEN", "LAST SEEN", "QUEUES", "NAMES", "SAMPLE", "ERROR"),
            [
                (g.error_type, g.jobs, g.first_seen, g.last_seen, g.queues, g.names, g.sample, g.error)
                for g in groups
            ],
            empty="no dead letters",
        )


@command.command()
@dsn_option
@click.argument("job_id", type=JobId(), metavar="ID")
@_json_option
def show(dsn: str | None, *, job_id: int, as_json: bool) -> None:
    """Show everything about one dead letter: payload, traceback, every unsuccessful attempt."""
    with opened(dsn) as conn:
        found = execute(conn, dead.show(job_id))
    if found is None:
        raise _missing(job_id)
    if as_json:
        print_json(msgspec.to_builtins(found) | {"payload": value_of(found.payload)})
    else:
        _print(found)


@command.command("replay")
@dsn_option
@filter_options
@_move_options
@click.option(
    "--payload", metavar="JSON", help="Replace the payload of the one job; @FILE reads it from a file."
)
@click.option("--app", "path", metavar="APP", envvar="PGQUEUE_APP", show_envvar=True,
              help="Check the new payload against the handler's type in APP (module:name).")  # fmt: skip
@_json_option
def replay(
    dsn: str | None, *, everything: bool, yes: bool, limit: int, rate: float, payload: str | None, path: str | None,
    as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Put dead letters back into their queues: same id, attempts start again.

    Says how many there are; --yes does it. Jobs with an ordering key go back to their place. It can be stopped at any
    time, and two may run at once: each job is replayed once.
    """
    which = _chosen(filter_of(given), everything=everything)
    with opened(dsn) as conn:
        text = None
        if payload is not None:
            text = _payload(conn, which, payload, path)
        move = _Move(verb="replay", done="replayed", limit=limit, rate=rate, as_json=as_json)
        move.run(conn, which, lambda f, n, after: dead.replay(f, n=n, after=after, payload=text), yes=yes)


@command.command("discard")
@dsn_option
@filter_options
@_move_options
@_json_option
def discard(
    dsn: str | None, *, everything: bool, yes: bool, limit: int, rate: float, as_json: bool, **given: Any
) -> None:
    """Delete dead letters for good. Says how many there are; --yes does it."""
    which = _chosen(filter_of(given), everything=everything)
    move = _Move(verb="discard", done="discarded", limit=limit, rate=rate, as_json=as_json)
    with opened(dsn) as conn:
        move.run(conn, which, lambda f, n, after: dead.discard(f, n=n, after=after), yes=yes)


Batch = Callable[[Filter, int, int], Statement[Moved]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A replay or discard in batches, at most so many a second."""

    verb: str
    done: str
    limit: int
    rate: float
    as_json: bool

    def run(self, conn: psycopg.Connection[Any], which: Filter, batch: Batch, *, yes: bool) -> None:
        """Say what would be moved, or move it; exit status 1 if ids were named and none is there."""
        found = execute(conn, dead.tell(which))
        if not found.jobs and which.ids is not None:
            raise Failure(f"none of these is a dead letter: {', '.join(map(str, which.ids))}")
        wanted = min(found.jobs, self.limit)
        if not yes or not found.jobs:
            self._say(found.jobs, wanted, yes=yes)
            return
        # What is replayed now and dies again while this runs is for a person to look at, not for the next batch.
        ids = self._batches(conn, replace(which, until=found.until), batch, wanted)
        if self.as_json:
            print_json({"found": found.jobs, self.done: ids})
            return
        left = found.jobs - len(ids)
        more = f"; {left} are left: run it again, or raise --limit" if wanted < found.jobs and left else ""
        click.echo(f"{self.done} {len(ids)} of {found.jobs} dead letters{more}")

    def _say(self, found: int, wanted: int, *, yes: bool) -> None:
        if self.as_json:
            print_json({"found": found, **({self.done: []} if yes else {f"would_{self.verb}": wanted})})
        elif not found:
            click.echo("no dead letters match")
        else:
            which = f"{wanted}" if wanted == found else f"the first {wanted} of {found}"
            click.echo(f"would {self.verb} {which} dead letters; nothing was done: add --yes")

    def _batches(self, conn: psycopg.Connection[Any], which: Filter, batch: Batch, wanted: int) -> list[int]:
        size = max(1, round(self.rate * BEAT_S)) if self.rate else UNLIMITED_BATCH
        ids: list[int] = []
        after, due = 0, time.monotonic()
        bar = click.progressbar(
            length=wanted, label=self.verb, file=sys.stderr, hidden=not sys.stderr.isatty()
        )
        try:
            with bar:
                while len(ids) < wanted:
                    time.sleep(max(0.0, due - time.monotonic()))
                    due = time.monotonic() + (size / self.rate if self.rate else 0.0)
                    moved = execute(conn, batch(which, min(size, wanted - len(ids)), after))
                    if moved.last is None:
                        break
                    after = moved.last
                    ids.extend(moved.ids)
                    bar.update(len(moved.ids))
        except (KeyboardInterrupt, psycopg.Error):
            click.echo(f"stopped: {self.done} {len(ids)} of {wanted}", err=True)
            raise
        return ids


def _chosen(which: Filter, *, everything: bool) -> Filter:
    if which.is_empty() != everything:
        raise BadOption(
            "dead letters",
            "--all goes without ids and filters"
            if everything
            else "name ids or a filter (see --help), or --all",
        )
    return which


def _payload(conn: psycopg.Connection[Any], which: Filter, given: str, path: str | None) -> str:
    if which.ids is None or len(which.ids) != 1:
        raise BadOption("--payload", "goes with the id of one job")
    found = execute(conn, dead.show(which.ids[0]))
    if found is None:
        raise _missing(which.ids[0])
    return checked(found.name, given, path)


def _print(found: DeadJob) -> None:
    print_facts(
        [
            ("id", found.id), ("name", found.name), ("queue", found.queue), ("priority", found.priority),
            ("key", f"{found.key} (blocked by this)" if found.blocks else given_key(found.key, found.name)),
            ("dedup key", found.dedup_key), ("idempotency key", found.idempotency_key),
            ("reason", found.reason), ("error type", found.error_type),
            ("attempts", found.attempts), ("max attempts", found.max_attempts or "of the job type"),
            ("workers lost", found.lost), ("last worker", found.worker), ("trace id", found.trace_id),
            ("enqueued", found.enqueued_at), ("first attempt", found.first_attempt_at),
            ("last attempt", found.last_attempt_at), ("died", found.died_at), ("expires", found.expires_at),
        ]
    )  # fmt: skip
    if found.headers:
        print_block("headers", json.dumps(found.headers, indent=2, ensure_ascii=False))
    print_payload(found.payload)
    print_history(found.history)
    print_block("last attempt", found.traceback or f"{found.error_type}: {found.error}")


def _missing(job_id: int) -> Failure:
    return Failure(
        f"there is no dead letter {job_id}; pgqueue dead list --each shows the newest, pgqueue jobs show live jobs"
    )
