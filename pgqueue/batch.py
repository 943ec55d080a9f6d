"""Batch: jobs that are enqueued together, and a job that runs when all of them are done.

Members run like any other job, at once and anywhere. Each appends its end to `batch_tally` in the transaction of
the end, so members never wait for each other; `fold` counts these rows and enqueues the completion job, once. A
member that dies keeps the batch waiting until it is replayed and succeeds, or is discarded; one that is cancelled or
discarded has ended too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from pgqueue.errors import BadOption, QueueFull
from pgqueue.statement import Row, Statement, column, load, nothing
from pgqueue.step import Step, steps_json, steps_of

_SQL = load("pgqueue", "batch")


class BatchRef(NamedTuple):
    """The answer to a batch: its id, and the ids of its jobs in the order of the steps."""

    id: int
    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatus:
    """How far a batch is. `gone`: cancelled or discarded. `job_id`: the completion job, once it is enqueued.

    `problem`: why that could not be enqueued though all members have ended; it is tried again every minute.
    """

    id: int
    size: int
    done: int
    gone: int
    unfinished: int
    job_id: int | None
    completed_at: datetime | None
    problem: str | None


def batch(steps: Sequence[Step], then: Step | None) -> Statement[BatchRef]:
    """Enqueue jobs and remember what runs when all are done; without any job that is at once.

    Raises BadOption; reading the rows raises QueueFull where a queue of the jobs is full.
    """
    if then is not None and not isinstance(then, Step):
        raise BadOption("then", f"{then!r} is not a step; make one of the job: job.with_payload(...)")
    members = steps_of("steps", steps)
    params = {"steps": steps_json(members), "completion": then.text() if then else None}
    return Statement(_SQL["enqueue"], params, _ref)


def fold() -> Statement[list[int]]:
    """Count ended members and enqueue the completion jobs that are due; returns the batches. Needs a transaction."""
    return Statement(_SQL["fold"], {}, column)


def look(batch_id: int) -> Statement[BatchStatus | None]:
    """Read how far a batch is; None if there is none of that id. Completed ones are kept for 7 days."""
    return Statement(_SQL["look"], {"id": batch_id}, _status)


def prune() -> Statement[None]:
    """Delete batches that completed more than 7 days ago."""
    return Statement(_SQL["prune"], {}, nothing)


def _ref(rows: Sequence[Row]) -> BatchRef:
    if rows[0][0] < 0:  # the mark of a full queue: seconds, and the queue
        raise QueueFull(rows[0][2], timedelta(seconds=-rows[0][0]))
    return BatchRef(rows[0][0], tuple(row[1] for row in rows[1:]))


def _status(rows: Sequence[Row]) -> BatchStatus | None:
    if not rows:
        return None
    r: Any = rows[0]
    return BatchStatus(
        id=r[0], size=r[1], done=r[2], gone=r[3], unfinished=r[4], job_id=r[5], completed_at=r[6], problem=r[7]
    )  # fmt: skip
