"""`pgqueue jobs list | show | cancel | reprioritise | move | edit`"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import click
import msgspec

from pgqueue.cancel import Cancellation, cancel, count_waiting, waiting
from pgqueue.change import Change, edit, move, reprioritise
from pgqueue.cli import Failure, Group, dsn_option, option
from pgqueue.cli._app import JobId
from pgqueue.cli._payload import checked
from pgqueue.cli._session import opened
from pgqueue.cli._table import cell, print_block, print_facts, print_json, print_table
from pgqueue.connection import execute
from pgqueue.dead import Attempt
from pgqueue.dead import show as show_dead
from pgqueue.errors import BadOption
from pgqueue.history import Status, status
from pgqueue.job import given_key
from pgqueue.jobs import Detail, LiveJob, jobs
from pgqueue.jobs import show as show_job
from pgqueue.states import State

LIVE = (State.READY, State.DELAYED, State.BLOCKED, State.IN_FLIGHT)
BATCH = 500
SAID = {
    "cancelled": "cancelled",
    "requested": "asked to stop: it runs, and will not run again",
    "dead": "unchanged: it is a dead letter; pgqueue dead discard",
    "gone": "unchanged: it is done, or never was",
}
CHANGED = {
    "changed": "changed",
    "held": "unchanged: it runs, or somebody else changes it just now",
    "dead": "unchanged: it is a dead letter; pgqueue dead replay",
    "gone": SAID["gone"],
}


@click.group("jobs", cls=Group)
def command() -> None:
    """Look at live jobs, change those that wait, and cancel them."""


def _json_option(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")(function)


@command.command("list")
@dsn_option
@click.option("--name", metavar="NAME", help="Only jobs of this name.")
@click.option("--queue", metavar="QUEUE", help="Only jobs of this queue.")
@click.option("--key", metavar="KEY", help="Only jobs with this ordering key.")
@click.option("--state", type=click.Choice([state.value for state in LIVE]), help="Only jobs in this state.")
@click.option("--before", type=JobId(), metavar="ID", help="Only ids below this one: the next page.")
@option(
    "--limit", type=click.IntRange(1), default=50, show_default=True, env="PGQUEUE_JOBS_LIMIT", help="Lines at most.",
)  # fmt: skip
@_json_option
def list_(
    dsn: str | None, *, name: str | None, queue: str | None, key: str | None, state: str | None, before: int | None,
    limit: int, as_json: bool,
) -> None:  # fmt: skip
    """List live jobs, the newest first."""
    statement = jobs(
        name=name, queue=queue, key=key, state=State(state) if state else None, n=limit, before=before
    )
    with opened(dsn) as conn:
        found = execute(conn, statement)
    if as_json:
        print_json(found)
        return
    print_table(
        ("ID", "NAME", "QUEUE", "PRIO", "STATE", "ATTEMPT", "ENQUEUED", "RUN AT", "WORKER", "KEY"),
        [
            (
                j.id, j.name, j.queue, j.priority, _state(j), j.attempt, j.enqueued_at, j.run_at, j.worker,
                given_key(j.key, j.name),
            )
            for j in found
        ],
        empty="no live jobs",
    )  # fmt: skip
    if len(found) == limit:
        click.echo(f"there may be more: pgqueue jobs list --before {found[-1].id}", err=True)


@command.command()
@dsn_option
@click.argument("job_id", type=JobId(), metavar="ID")
@_json_option
def show(dsn: str | None, *, job_id: int, as_json: bool) -> None:
    """Show everything about one live job, or what is kept of one that is done or cancelled."""
    with opened(dsn) as conn:
        found = execute(conn, show_job(job_id))
        ended = execute(conn, status(job_id)) if found is None else None
    if ended is not None and ended.state != "dead":
        _print_ended(ended, as_json=as_json)
        return
    if found is None:
        what = f"job {job_id} is a dead letter: pgqueue dead show {job_id}"
        raise Failure(what if ended else f"there is no trace of job {job_id}: it is done, or never was")
    if as_json:
        print_json(msgspec.to_builtins(found) | {"payload": value_of(found.payload)})
    else:
        _print(found)


@command.command("cancel")
@dsn_option
@click.argument("ids", type=JobId(), nargs=-1, metavar="[ID]...")
@click.option("--name", metavar="NAME", help="Every waiting job of this name.")
@click.option("--queue", metavar="QUEUE", help="Every waiting job of this queue.")
@click.option(
    "--yes", is_flag=True, help="With --name or --queue: do it; without this the command only counts."
)
def cancel_(dsn: str | None, *, ids: tuple[int, ...], name: str | None, queue: str | None, yes: bool) -> None:
    """Cancel jobs: one that waits is gone at once, one that runs is asked to stop and never runs again.

    By --name and --queue only jobs that wait are cancelled; jobs that run are named by their ids.
    """
    if bool(ids) == bool(name or queue):
        raise BadOption("jobs cancel", "name ids, or --name and --queue, and not both")
    with opened(dsn) as conn:
        if ids:
            _tell(execute(conn, cancel(ids)))
        elif not yes:
            count = execute(conn, count_waiting(name=name, queue=queue))
            click.echo(f"would cancel {count} waiting jobs; nothing was done: add --yes")
        else:
            done = after = 0
            while page := execute(conn, waiting(name=name, queue=queue, n=BATCH, after=after)):
                done += sum(one.state == "cancelled" for one in execute(conn, cancel(page)))
                after = page[-1]
            click.echo(f"cancelled {done} jobs")


@command.command("reprioritise")
@dsn_option
@click.argument("ids", type=JobId(), nargs=-1, required=True, metavar="ID...")
@click.argument("priority", type=click.IntRange(0, 9))
def reprioritise_(dsn: str | None, *, ids: tuple[int, ...], priority: int) -> None:
    """Give waiting jobs another priority, 0 to 9, lower runs first; they go behind those that have it."""
    with opened(dsn) as conn:
        _tell_changes(execute(conn, reprioritise(ids, priority)))


@command.command("move")
@dsn_option
@click.argument("ids", type=JobId(), nargs=-1, metavar="[ID]...")
@click.option("--to", metavar="QUEUE", required=True, help="The queue to move to.")
@click.option("--name", metavar="NAME", help="Every waiting job of this name.")
@click.option("--queue", metavar="QUEUE", help="Every waiting job of this queue.")
@click.option(
    "--yes", is_flag=True, help="With --name or --queue: do it; without this the command only counts."
)
def move_(
    dsn: str | None, *, ids: tuple[int, ...], to: str, name: str | None, queue: str | None, yes: bool
) -> None:
    """Move waiting jobs to the end of another queue. Jobs that run are left where they are."""
    if bool(ids) == bool(name or queue):
        raise BadOption("jobs move", "name ids, or --name and --queue, and not both")
    with opened(dsn) as conn:
        if ids:
            _tell_changes(execute(conn, move(ids, to)))
        elif not yes:
            count = execute(conn, count_waiting(name=name, queue=queue))
            click.echo(f"would move {count} waiting jobs; nothing was done: add --yes")
        else:
            done = after = 0
            while page := execute(conn, waiting(name=name, queue=queue, n=BATCH, after=after)):
                done += sum(one.state == "changed" for one in execute(conn, move(page, to)))
                after = page[-1]
            click.echo(f"moved {done} jobs")


@command.command("edit")
@dsn_option
@click.argument("job_id", type=JobId(), metavar="ID")
@click.argument("payload", metavar="PAYLOAD")
@click.option("--app", "path", metavar="APP", envvar="PGQUEUE_APP", show_envvar=True,
              help="Check the payload against the handler's type in APP (module:name).")  # fmt: skip
def edit_(dsn: str | None, *, job_id: int, payload: str, path: str | None) -> None:
    """Give a waiting job, or a dead letter, another payload: JSON, or @FILE to read it from a file."""
    with opened(dsn) as conn:
        live, dead = execute(conn, show_job(job_id)), execute(conn, show_dead(job_id))
        name = live.job.name if live else dead.name if dead else None
        if name is None:
            raise Failure(f"there is no job {job_id}: it is done, or never was")
        state = execute(conn, edit(job_id, checked(name, payload, path)))
    _tell_changes([Change(job_id, state)])


def _tell_changes(answers: list[Change]) -> None:
    for job_id, state in answers:
        click.echo(f"{job_id}\t{CHANGED[state]}")
    if not any(state == "changed" for _, state in answers):
        raise click.exceptions.Exit(1)


def _tell(answers: list[Cancellation]) -> None:
    for job_id, state in answers:
        click.echo(f"{job_id}\t{SAID[state]}")
    if not any(state in ("cancelled", "requested") for _, state in answers):
        raise click.exceptions.Exit(1)


def _state(job: LiveJob) -> str:
    return f"{job.state.value}, cancelling" if job.cancelling else job.state.value


def _print(found: Detail) -> None:
    job = found.job
    print_facts(
        [
            ("id", job.id), ("name", job.name), ("queue", job.queue), ("priority", job.priority),
            ("state", _state(job)), ("key", given_key(job.key, job.name)), ("dedup key", found.dedup_key),
            ("idempotency key", found.idempotency_key),
            ("attempt", job.attempt), ("max attempts", job.max_attempts), ("workers lost", job.lost),
            ("timeout s", found.timeout_s), ("backoff", None if found.backoff is None else json.dumps(found.backoff)),
            ("worker", job.worker), ("enqueued", job.enqueued_at), ("run at", job.run_at), ("claimed", job.claimed_at),
            ("deadline", job.deadline), ("expires", found.expires_at),
            ("progress", None if found.progress is None else f"{found.progress:.0%} {found.note or ''}".rstrip()),
        ]
    )  # fmt: skip
    if found.headers:
        print_block("headers", json.dumps(found.headers, indent=2, ensure_ascii=False))
    print_payload(found.payload)
    print_history(found.history)


def _print_ended(job: Status, *, as_json: bool) -> None:
    """Print what the history keeps of a job."""
    if as_json:
        print_json(msgspec.to_builtins(job))
        return
    print_facts(
        [
            ("id", job.id), ("name", job.name), ("queue", job.queue), ("state", job.state), ("attempt", job.attempt),
            ("enqueued", job.enqueued_at), ("started", job.started_at), ("finished", job.finished_at),
            ("result", None if job.result is None else json.dumps(job.result, ensure_ascii=False)),
            ("problem", job.problem),
        ]
    )  # fmt: skip


def print_payload(text: str) -> None:
    """Print a payload, spread over lines where it is JSON."""
    value = value_of(text)
    print_block(
        "payload", text if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
    )


def print_history(history: tuple[Attempt, ...]) -> None:
    """Print what went wrong before, the oldest attempt first."""
    for one in history:
        began, ended = (None if at is None else datetime.fromisoformat(at) for at in (one.started_at, one.at))
        title = (
            f"attempt {one.attempt}: {one.outcome}, {cell(began)} to {cell(ended)}, worker {cell(one.worker)}"
        )
        print_block(title, one.traceback or f"{one.error_type}: {one.error}")


def value_of(text: str) -> Any:
    """Return a payload as a value; as text where it is no JSON that Python reads."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
