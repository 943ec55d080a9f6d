"""Schedule: a rule that enqueues jobs at times. Durable and without a leader.

A schedule is a row. Any worker may look for due ticks; the statement that writes a tick and its job also moves the
schedule on, and it does so only from the state the ticks were worked out from, so a process that was paused in
between, or lost a race, writes nothing. The next tick follows from the last *scheduled* time, never from when it
ran; the time is the database's alone. Ticks that are found due together (nobody looked for a while) are missed
ones: `missed` says what becomes of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, get_args

import msgspec

from pgqueue.cron import Cron
from pgqueue.enqueue import as_seconds, check_name, check_range
from pgqueue.errors import BadOption
from pgqueue.statement import Row, Statement, load, nothing, scalar

Missed = Literal["skip", "once", "all"]

#: With `skip`, a tick that is not older than this still counts as on time.
PUNCTUAL: Final = timedelta(minutes=1)
_LONGEST_JITTER = 86_400.0

_SQL = load("pgqueue", "schedule")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When which job is enqueued with which payload (JSON text).

    `jitter`: seconds up to which a job is delayed at random. `missed`: of ticks that are found due together, `skip`
    runs the latest unless it is over a minute old, `once` the latest, `all` the latest `cap` of them, each as a job.
    """

    name: str
    job: str
    cron: Cron
    payload: str = "null"
    jitter: float | timedelta = 0.0
    missed: Missed = "once"
    cap: int = 10

    def __post_init__(self) -> None:
        check_name("name", self.name)
        check_name("job", self.job)
        jitter = self.jitter if isinstance(self.jitter, timedelta | int | float) else -1
        if not 0 <= as_seconds(jitter) <= _LONGEST_JITTER:
            raise BadOption("jitter", f"{self.jitter!r} is not between 0 s and a day")
        if self.missed not in get_args(Missed):
            raise BadOption("missed", f"{self.missed!r} is not one of {', '.join(get_args(Missed))}")
        check_range("cap", self.cap, 1, 1000, " (how many missed ticks run with missed='all')")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A schedule as people see it; `state` is active, paused, orphan or broken (see `problem`)."""

    name: str
    job: str
    expr: str
    zone: str
    source: str
    missed: str
    jitter_s: float
    state: str
    next_at: datetime | None
    last_at: datetime | None
    late_s: float
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A schedule to be looked at: ticks up to `after` are decided, `now` is the database's clock."""

    name: str
    expr: str
    zone: str
    missed: str
    cap: int
    after: datetime
    next_at: datetime | None
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be written: the ticks that run, the last one decided, the one that follows."""

    due: Due
    ticks: tuple[datetime, ...]
    through: datetime | None
    following: datetime


def plan(due: Due) -> Plan:
    """Work out which ticks run; raise BadOption for an expression or zone that makes no sense here."""
    cron = Cron(due.expr, due.zone)
    if due.next_at is None:
        return Plan(due=due, ticks=(), through=None, following=cron.next(due.after))
    found = cron.latest(due.after, due.now, due.cap if due.missed == "all" else 1)
    through = found[-1] if found else None
    if due.missed == "skip":
        found = [tick for tick in found if due.now - tick <= PUNCTUAL]
    return Plan(due=due, ticks=tuple(found), through=through, following=cron.next(max(due.now, due.after)))


def define(schedules: Iterable[Schedule]) -> Statement[None]:
    """Write the schedules of an app; another expression or zone starts a schedule anew from now."""
    rows = [
        {
            "name": s.name, "expr": s.cron.expr, "zone": s.cron.zone, "job": s.job, "missed": s.missed, "cap": s.cap,
            "jitter_s": as_seconds(s.jitter), "payload": msgspec.Raw(s.payload.encode()),
        }
        for s in schedules
    ]  # fmt: skip
    return Statement(_SQL["define"], {"schedules": msgspec.json.encode(rows).decode()}, nothing)


def add(schedule: Schedule) -> Statement[None]:
    """Define or change one schedule at run time; Postgres refuses (22023) a name that is defined in code."""
    params = {
        "name": schedule.name, "expr": schedule.cron.expr, "job": schedule.job, "payload": schedule.payload,
        "zone": schedule.cron.zone, "jitter": timedelta(seconds=as_seconds(schedule.jitter)), "missed": schedule.missed,
        "cap": schedule.cap,
    }  # fmt: skip
    return Statement(_SQL["add"], params, nothing)


def remove(name: str) -> Statement[bool]:
    """Remove a schedule, not its jobs; False if there is none of that name."""
    return Statement(_SQL["remove"], {"name": name}, scalar)


def pause(name: str) -> Statement[bool]:
    """Let a schedule rest; False if there is none of that name."""
    return Statement(_SQL["pause"], {"name": name, "paused": True}, scalar)


def resume(name: str) -> Statement[bool]:
    """Let a schedule go on from now: what fell due meanwhile does not run. False if there is none of that name."""
    return Statement(_SQL["pause"], {"name": name, "paused": False}, scalar)


def status() -> Statement[list[Status]]:
    """List the schedules by name."""
    return Statement(_SQL["status"], {}, _statuses)


def due(period: timedelta) -> Statement[list[Due]]:
    """Return up to 100 schedules to be looked at, none if it is not this process's turn; nobody else's for `period`."""
    return Statement(_SQL["due"], {"period": period}, _dues)


def settle(plan: Plan) -> Statement[None]:
    """Note the first tick of a schedule that has none yet; nothing if it has changed since."""
    params = {
        "name": plan.due.name, "expr": plan.due.expr, "zone": plan.due.zone, "after": plan.due.after,
        "following": plan.following,
    }  # fmt: skip
    return Statement(_SQL["settle"], params, nothing)


def fire(plan: Plan) -> Statement[list[tuple[datetime, int]]]:
    """Write the ticks with their jobs and move the schedule on; return (tick, job id) of what was written.

    Nothing is written, without an error and without waiting, where another process has done it or is at it, the
    schedule was changed or paused, or the database's clock has gone back. One transaction, READ COMMITTED.
    """
    params = {
        "name": plan.due.name, "expr": plan.due.expr, "zone": plan.due.zone, "expected": plan.due.next_at,
        "ticks": list(plan.ticks), "through": plan.through, "following": plan.following,
    }  # fmt: skip
    return Statement(_SQL["fire"], params, lambda rows: [(row[0], row[1]) for row in rows])


def broken(due: Due, problem: str) -> Statement[None]:
    """Note why a schedule's ticks cannot be worked out or written; it is tried again after a minute."""
    params = {
        "name": due.name,
        "expr": due.expr,
        "zone": due.zone,
        "problem": problem.replace("\0", "")[:1000],
    }
    return Statement(_SQL["broken"], params, nothing)


def _dues(rows: Sequence[Row]) -> list[Due]:
    return [
        Due(
            name=r[0], expr=r[1], zone=r[2], missed=r[3], cap=r[4], after=r[5].astimezone(UTC),
            next_at=r[6], now=r[7].astimezone(UTC),
        )
        for r in rows
    ]  # fmt: skip


def _statuses(rows: Sequence[Row]) -> list[Status]:
    return [
        Status(
            name=r[0], job=r[1], expr=r[2], zone=r[3], source=r[4], missed=r[5], jitter_s=r[6], state=r[7],
            next_at=r[8], last_at=r[9], late_s=r[10], problem=r[11],
        )
        for r in rows
    ]  # fmt: skip
