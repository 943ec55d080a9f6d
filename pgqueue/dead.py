"""Dead letters: jobs that need a person. Find them, look at one, replay them, discard them.

    execute(conn, dead.groups())                                # by error type
    execute(conn, dead.show(17))                                # payload, traceback, every attempt
    execute(conn, dead.replay(Filter(ids=[17])))                # back into its queue, under the same id
    execute(conn, dead.replay(Filter(error_type="KeyError", queue="mail"), n=100))

A replay or discard is one statement: a crash leaves each job in exactly one place, and of two operators at once
each job goes with one. The same in SQL: `pgqueue.dead_letters(...)`, `pgqueue.replay(ids)`, `pgqueue.discard(ids)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from pgqueue.statement import Row, Statement, load

_SQL = load("pgqueue", "dead")

#: The alert: more new dead letters than this within ten minutes.
ALERT = 300
LIMIT = 100
RATE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which dead letters; what is None does not matter.

    `since` and `until` are about the time of death: a moment, or how long ago. `matching` compares values of the
    payload, written as text, by their dotted path: {"order.id": "17"}.
    """

    ids: Sequence[int] | None = None
    error_type: str | None = None
    reason: str | None = None
    name: str | None = None
    queue: str | None = None
    since: datetime | timedelta | None = None
    until: datetime | timedelta | None = None
    matching: Mapping[str, str] = field(default_factory=dict)

    def is_empty(self) -> bool:
        """Tell whether every dead letter passes."""
        return self == Filter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The dead letters of one error type; `sample` and `error` are the youngest job's."""

    error_type: str | None
    jobs: int
    first_seen: datetime
    last_seen: datetime
    reasons: tuple[str, ...]
    queues: tuple[str, ...]
    names: tuple[str, ...]
    sample: int
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """One dead letter in brief."""

    id: int
    name: str
    queue: str
    key: str | None
    attempts: int
    reason: str
    error_type: str | None
    error: str | None
    died_at: datetime
    worker: str | None
    trace_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt that did not succeed. Times are ISO texts."""

    attempt: int
    outcome: str
    started_at: str | None
    at: str
    worker: str | None
    error_type: str | None
    error: str | None
    traceback: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadJob:
    """Everything about one dead letter. `history` holds the attempts before the last one, oldest first.

    `payload` is the JSON text as it was enqueued. `blocks`: its ordering key waits until it is replayed or discarded.
    """

    id: int
    name: str
    queue: str
    priority: int
    key: str | None
    dedup_key: str | None
    idempotency_key: str | None
    attempts: int
    max_attempts: int | None
    lost: int
    reason: str
    error_type: str | None
    error: str | None
    traceback: str | None
    worker: str | None
    trace_id: str | None
    enqueued_at: datetime
    first_attempt_at: datetime | None
    last_attempt_at: datetime | None
    died_at: datetime
    expires_at: datetime | None
    headers: Mapping[str, Any]
    payload: str
    history: tuple[Attempt, ...]
    blocks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How many letters pass a filter; `until`: the time of death they are all before."""

    jobs: int
    until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The ids that were moved, and the last id looked at (None: nothing was left)."""

    ids: tuple[int, ...]
    last: int | None


def groups(which: Filter | None = None, *, n: int = 50) -> Statement[list[Group]]:
    """Count dead letters by error type, the one seen last first."""
    return Statement(_SQL["groups"], _params(which) | {"n": n}, lambda rows: [_group(r) for r in rows])


def letters(which: Filter | None = None, *, n: int = 50) -> Statement[list[Letter]]:
    """List dead letters, the newest first."""
    return Statement(_SQL["letters"], _params(which) | {"n": n}, lambda rows: [_letter(r) for r in rows])


def tell(which: Filter | None = None) -> Statement[Found]:
    """Count the dead letters that a replay or discard would move. Takes no lock."""
    return Statement(_SQL["tell"], _params(which), lambda rows: Found(jobs=rows[0][0], until=rows[0][1]))


def show(job_id: int) -> Statement[DeadJob | None]:
    """Read one dead letter; None if there is none of that id."""
    return Statement(_SQL["show"], {"id": job_id}, lambda rows: _dead_job(rows[0]) if rows else None)


def replay(which: Filter, *, n: int = LIMIT, after: int = 0, payload: str | None = None) -> Statement[Moved]:
    """Put up to n dead letters with an id above `after` back into their queues, the lowest first.

    The id and enqueue time stay, attempts start again, the place in the queue is new; a job with an ordering key
    goes back to its place. Rows that somebody else moves at this moment are passed. `payload`, JSON text, replaces
    that of one job (Postgres refuses it for several); nothing here knows the handler's type.
    """
    params = _params(which) | {"n": n, "after": after, "payload": payload}
    return Statement(_SQL["replay"], params, _moved)


def discard(which: Filter, *, n: int = LIMIT, after: int = 0) -> Statement[Moved]:
    """Delete up to n dead letters with an id above `after` for good, the lowest first."""
    return Statement(_SQL["discard"], _params(which) | {"n": n, "after": after}, _moved)


def rate() -> Statement[list[tuple[str, str | None, int]]]:
    """Return the new dead letters of the last ten minutes: (queue, error type, jobs)."""
    return Statement(_SQL["rate"], {}, lambda rows: [(r[0], r[1], r[2]) for r in rows])


def _params(which: Filter | None) -> dict[str, object]:
    which = which or Filter()
    return {
        "ids": None if which.ids is None else list(which.ids),
        "error_type": which.error_type,
        "reason": which.reason,
        "name": which.name,
        "queue": which.queue,
        "since": which.since if isinstance(which.since, datetime) else None,
        "since_ago": which.since if isinstance(which.since, timedelta) else None,
        "until": which.until if isinstance(which.until, datetime) else None,
        "until_ago": which.until if isinstance(which.until, timedelta) else None,
        "matching": json.dumps(dict(which.matching)) if which.matching else None,
    }


def _moved(rows: Sequence[Row]) -> Moved:
    return Moved(ids=tuple(rows[0][1]), last=rows[0][0])


def _group(r: Row) -> Group:
    return Group(
        error_type=r[0], jobs=r[1], first_seen=r[2], last_seen=r[3], reasons=tuple(r[4]), queues=tuple(r[5]),
        names=tuple(r[6]), sample=r[7], error=r[8],
    )  # fmt: skip


def _letter(r: Row) -> Letter:
    return Letter(
        id=r[0], name=r[1], queue=r[2], key=r[3], attempts=r[4], reason=r[5], error_type=r[6], error=r[7],
        died_at=r[8], worker=r[9], trace_id=r[10],
    )  # fmt: skip


def _dead_job(r: Row) -> DeadJob:
    return DeadJob(
        id=r[0], name=r[1], queue=r[2], priority=r[3], key=r[4], dedup_key=r[5], idempotency_key=r[6],
        attempts=r[7], max_attempts=r[8], lost=r[9], reason=r[10], error_type=r[11], error=r[12], traceback=r[13],
        worker=r[14], trace_id=r[15], enqueued_at=r[16], first_attempt_at=r[17], last_attempt_at=r[18],
        died_at=r[19], expires_at=r[20], headers=json.loads(r[21]) if r[21] else {}, payload=r[22],
        history=tuple(Attempt(**one) for one in json.loads(r[23])), blocks=r[24],
    )  # fmt: skip
