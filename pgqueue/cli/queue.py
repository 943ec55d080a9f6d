"""`pgqueue queue list | pause | resume | set`"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import click
import psycopg

from pgqueue import control, pressure
from pgqueue.age import age_queue
from pgqueue.cli import Group, dsn_option
from pgqueue.cli._app import Duration
from pgqueue.cli._payload import undeclared
from pgqueue.cli._session import opened
from pgqueue.cli._table import clean, print_json, print_table
from pgqueue.cli.depth import OLD_S
from pgqueue.connection import execute
from pgqueue.depth import depth
from pgqueue.errors import BadOption
from pgqueue.statement import Statement

LIMIT = 200


@click.group("queue", cls=Group)
def command() -> None:
    """See the queues; pause and resume a queue or a job type; set limits."""


@command.command("list")
@dsn_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def list_(dsn: str | None, *, as_json: bool) -> None:
    """List the queues with their depth (counted now where no worker samples it) and workers."""
    with opened(dsn) as conn:
        found = _queues(conn)
    if as_json:
        print_json(found)
        return
    print_table(
        ("QUEUE", "PAUSED", "WORKERS", "READY", "DELAYED", "IN FLIGHT", "BLOCKED", "OLDEST READY S", "PAUSED NAMES"),
        [
            (
                q.name, q.paused, q.workers, q.ready, q.delayed, q.in_flight, q.blocked, q.oldest_ready_s,
                q.paused_names,
            )
            for q in found
        ],
        empty="no queues yet: enqueue a job, start a worker, or run pgqueue sync APP",
    )  # fmt: skip


def _queues(conn: psycopg.Connection[Any]) -> list[control.Queue]:
    found = {queue.name: queue for queue in execute(conn, control.queues())}
    if stale := execute(conn, control.unsampled()):
        for d in execute(conn, depth()):
            if d.queue in stale:
                found[d.queue] = replace(
                    found.get(d.queue) or control.unheard(d.queue), ready=d.ready, delayed=d.delayed,
                    in_flight=d.in_flight, blocked=d.blocked, oldest_ready_s=d.oldest_ready_s, capped=False,
                    sampled_s_ago=0.0,
                )  # fmt: skip
    return [_fresh(found[name]) for name in sorted(found)]


def _fresh(queue: control.Queue) -> control.Queue:
    """Leave an old sample out: a queue that has one, and needed no count, has no jobs."""
    if queue.sampled_s_ago is None or queue.sampled_s_ago <= OLD_S:
        return queue
    return replace(queue, ready=0, delayed=0, in_flight=0, blocked=0, oldest_ready_s=0.0, sampled_s_ago=0.0)


def _options(function: Any) -> Any:
    function = click.option("--name", metavar="NAME", help="The jobs of this name, in every queue.")(function)
    return dsn_option(click.argument("queue", required=False)(function))


@command.command()
@_options
def pause(dsn: str | None, *, queue: str | None, name: str | None) -> None:
    """Pause a queue, or a job type in every queue. Running jobs go on; others wait from the next second on."""
    _switch(dsn, queue, name, control.pause_queue, control.pause_name, "paused")


@command.command()
@_options
def resume(dsn: str | None, *, queue: str | None, name: str | None) -> None:
    """Resume a queue, or a job type."""
    _switch(dsn, queue, name, control.resume_queue, control.resume_name, "resumed")


@command.command("set")
@dsn_option
@click.argument("queue")
@click.option(
    "--max-depth", type=int, metavar="N", help="Refuse jobs while so many wait or run; 0: no limit."
)
@click.option(
    "--max-age",
    type=Duration(),
    help="Refuse jobs while the oldest ready one has waited so long; 0: no limit.",
)
@click.option(
    "--age-after", type=Duration(), help="Move a job that waited so long up one priority; 0: never."
)
def set_(
    dsn: str | None, *, queue: str, max_depth: int | None, max_age: timedelta | None, age_after: timedelta | None
) -> None:  # fmt: skip
    """Limit what may wait in a queue, and let jobs that wait long gain priority.

    Producers over a limit get QueueFull, sheddable jobs are dropped.
    """
    if max_depth is None and max_age is None and age_after is None:
        raise BadOption("queue set", "give --max-depth, --max-age or --age-after")
    with opened(dsn) as conn:
        if age_after is not None:
            execute(conn, age_queue(queue, age_after))
        depth, age = execute(conn, pressure.limit(queue, max_depth=max_depth, max_age=max_age))
    limits = [f"max depth {depth or 'none'}", f"max age {'none' if age is None else f'{age:g} s'}"]
    if age_after is not None:
        limits.append(f"age after {f'{age_after.total_seconds():g} s' if age_after else 'none'}")
    click.echo(f"queue {clean(queue)}: {', '.join(limits)}")


Verb = Callable[[str], Statement[bool]]


def _switch(
    dsn: str | None, queue: str | None, name: str | None, by_queue: Verb, by_name: Verb, what: str
) -> None:
    if queue is not None and name is not None:
        raise BadOption("queue", "give the name of a queue or the --name of jobs, not both")
    if queue is None and name is None:
        raise BadOption("queue", "give the name of a queue, or the --name of jobs")
    if queue is not None and (not queue.strip() or len(queue.encode()) > LIMIT or "\0" in queue):
        raise BadOption("queue", f"{clean(queue[:40])!r} is not a queue name: 1 to {LIMIT} bytes, not blank")
    with opened(dsn) as conn:
        if name is not None:
            if not execute(conn, by_name(name)):
                known = execute(conn, control.names())
                raise undeclared(name, known, "")
            click.echo(f"{what} the jobs {clean(name)}")
        elif queue is not None:
            if not execute(conn, by_queue(queue)):
                click.echo(f"warning: nothing else is known of a queue {clean(queue)!r}", err=True)
            click.echo(f"{what} queue {clean(queue)}")
