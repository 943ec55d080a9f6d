"""Jobs: look at live ones, and at the workers that run them. Nothing here changes or locks anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pgqueue.dead import Attempt
from pgqueue.statement import Row, Statement, load
from pgqueue.states import State

_SQL = load("pgqueue", "jobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveJob:
    """One live job in brief. `worker`: who holds it, where known; `cancelling`: somebody asked it to stop."""

    id: int
    name: str
    queue: str
    priority: int
    key: str | None
    state: State
    attempt: int
    max_attempts: int | None
    lost: int
    enqueued_at: datetime
    run_at: datetime | None
    claimed_at: datetime | None
    deadline: datetime | None
    worker: str | None
    cancelling: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """Everything about one live job.

    `history`: its unsuccessful attempts, oldest first. `progress` (0 to 1) and `note`: what its handler last said.
    """

    job: LiveJob
    dedup_key: str | None
    idempotency_key: str | None
    timeout_s: float | None
    expires_at: datetime | None
    backoff: Mapping[str, Any] | None
    headers: Mapping[str, Any]
    payload: str
    history: tuple[Attempt, ...]
    progress: float | None
    note: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """One worker process; `alive`: it beat within 30 s; `overrun`: slots kept by handlers over their time."""

    host: str
    pid: int
    version: str
    queues: tuple[str, ...]
    names: tuple[str, ...]
    concurrency: int
    in_flight: int
    draining: bool
    alive: bool
    started_at: datetime
    beat_s_ago: float
    overrun: int


def jobs(
    *,
    name: str | None = None,
    queue: str | None = None,
    key: str | None = None,
    state: State | None = None,
    n: int = 50,
    before: int | None = None,
) -> Statement[list[LiveJob]]:
    """List live jobs with an id below `before`, the newest first. A rare name or state reads the whole table."""
    params = {"name": name, "queue": queue, "key": key, "state": state, "n": n, "before": before}
    return Statement(_SQL["jobs"], params, lambda rows: [_job(r) for r in rows])


def show(job_id: int) -> Statement[Detail | None]:
    """Read one live job; None if there is none of that id."""
    return Statement(_SQL["show"], {"id": job_id}, lambda rows: _detail(rows[0]) if rows else None)


def workers() -> Statement[list[WorkerRow]]:
    """List the worker processes that have not ended in order."""
    return Statement(_SQL["workers"], {}, lambda rows: [_worker(r) for r in rows])


def _job(r: Row) -> LiveJob:
    return LiveJob(
        id=r[0], name=r[1], queue=r[2], priority=r[3], key=r[4], state=State(r[5]), attempt=r[6], max_attempts=r[7],
        lost=r[8], enqueued_at=r[9], run_at=r[10], claimed_at=r[11], deadline=r[12], worker=r[13], cancelling=r[14],
    )  # fmt: skip


def _detail(r: Row) -> Detail:
    return Detail(
        job=_job(r), dedup_key=r[15], idempotency_key=r[16], timeout_s=r[17], expires_at=r[18],
        backoff=json.loads(r[19]) if r[19] else None, headers=json.loads(r[20]) if r[20] else {}, payload=r[21],
        history=tuple(Attempt(**one) for one in json.loads(r[22])), progress=r[23], note=r[24],
    )  # fmt: skip


def _worker(r: Row) -> WorkerRow:
    return WorkerRow(
        host=r[0], pid=r[1], version=r[2], queues=tuple(r[3]), names=tuple(r[4]), concurrency=r[5], in_flight=r[6],
        draining=r[7], alive=r[8], started_at=r[9], beat_s_ago=r[10], overrun=r[11],
    )  # fmt: skip
