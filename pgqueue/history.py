"""History: what became of a job, by its id.

A job of a type with `keep` moves to `job_history` in the statement that acknowledges it, with its result if the type
asks for that. The table has a partition for each day on which rows go; workers make them ahead by turn and drop them
without waiting for a lock. A job of any other type leaves no trace but its counters when it is done.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pgqueue.statement import Row, Statement, load, scalar

_SQL = load("pgqueue", "history")

#: States in which nothing more happens by itself.
ENDED = frozenset({"done", "cancelled", "dead"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What became of a job.

    `state`: ready, delayed, blocked, in_flight, dead; done and cancelled where its type keeps jobs. `progress` (0 to 1)
    and `note` are what the handler last said. `problem`: why a result could not be kept, or by which job the
    idempotency key had been applied, so that this one was skipped. `max_attempts`: None = the
    built-in default.
    """

    id: int
    state: str
    name: str
    queue: str
    attempt: int
    max_attempts: int | None
    enqueued_at: datetime
    run_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    progress: float | None
    note: str | None
    result: Any
    problem: str | None
    error_type: str | None
    error: str | None

    @property
    def ended(self) -> bool:
        """Whether nothing more happens by itself."""
        return self.state in ENDED


def status(job_id: int) -> Statement[Status | None]:
    """Read the status of a job; None if no trace of it is left, or it is not committed. Takes no lock."""

    def read(rows: Sequence[Row]) -> Status | None:
        return _status(job_id, rows[0]) if rows else None

    return Statement(_SQL["status"], {"id": job_id}, read)


def days() -> Statement[int]:
    """Make the partitions of the next days and drop those that are over; return how many. Needs a transaction."""
    return Statement(_SQL["days"], {}, scalar)


def _status(job_id: int, r: Row) -> Status:
    return Status(
        id=job_id, state=r[0], name=r[1], queue=r[2], attempt=r[3], max_attempts=r[4], enqueued_at=r[5], run_at=r[6],
        started_at=r[7], finished_at=r[8], progress=r[9], note=r[10],
        result=json.loads(r[11]) if r[11] is not None else None, problem=r[12], error_type=r[13], error=r[14],
    )  # fmt: skip
