"""Handlers that are counted while they are inside, and workers in this process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import psycopg

from pgqueue import App, Job
from pgqueue.config import WorkerSettings
from pgqueue.worker import Worker
from tests.server import Connection

Start = Callable[..., Worker]


class Gauge:
    """Counts how many handlers are inside at once, in all and by key; holds them until told to go on."""

    def __init__(self) -> None:
        self.inside = self.most = self.done = 0
        self.inside_of: Counter[object] = Counter()
        self.most_of: Counter[object] = Counter()
        self.open = threading.Event()
        self._lock = threading.Lock()

    def visit(self, key: object = None, wait: float = 100.0) -> None:
        with self._lock:
            self.inside += 1
            self.inside_of[key] += 1
            self.most = max(self.most, self.inside)
            self.most_of[key] = max(self.most_of[key], self.inside_of[key])
        self.open.wait(wait)
        with self._lock:
            self.inside -= 1
            self.inside_of[key] -= 1
            self.done += 1


@contextmanager
def workers(dsn: str) -> Iterator[Start]:
    """Give a way to start workers, which end with the block."""
    with ExitStack() as stack:

        def begin(app: App, **settings: Any) -> Worker:
            worker = Worker(
                app, dsn, WorkerSettings(**{"visibility": 60.0, "grace": 5.0, "poll": 0.05, **settings})
            )
            worker.start()
            stack.callback(worker.stop)
            return worker

        yield begin


class Begun(NamedTuple):
    """When a job began, in seconds of the server's clock: not before `claimed`, and not after `seen`."""

    claimed: float
    seen: float


def begun(dsn: str, job: Job) -> Begun:
    """Look, in the handler of a job, when it has begun."""
    with psycopg.connect(dsn) as conn:
        row = conn.execute(
            "SELECT extract(epoch FROM claimed_at)::float8, extract(epoch FROM clock_timestamp())::float8"
            " FROM pgqueue.job WHERE id = %s",
            [job.id],
        ).fetchone()
    assert row
    return Begun(*row)


def quickest(jobs: Sequence[Begun], more: int) -> float:
    """Return the shortest time from the beginning of a job to that of so many more."""
    jobs = sorted(jobs)
    assert len(jobs) > more
    return min(
        max(job.seen for job in jobs[n : n + more + 1]) - first.claimed
        for n, first in enumerate(jobs[:-more])
    )


def count(conn: Connection, table: str = "job") -> int:
    """Count the rows of a table of schema pgqueue."""
    found = conn.execute(f"SELECT count(*) FROM pgqueue.{table}".encode()).fetchone()
    conn.rollback()
    assert found
    return int(str(found[0]))
