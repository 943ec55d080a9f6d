"""For the tests of applications: run what was enqueued, with the real worker, and come back when it is done."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psycopg

from pgqueue.app import DEFAULT_QUEUE, App
from pgqueue.batch import fold
from pgqueue.config import WorkerSettings
from pgqueue.connection import execute
from pgqueue.depth import Unknown, depth, due, unknown
from pgqueue.errors import PgqueueError
from pgqueue.worker import Worker


class NotDrained(PgqueueError):
    """Jobs were left when the time was over."""

    def __init__(self, left: int, seconds: float, strange: Sequence[Unknown] = ()) -> None:
        self.left = left
        names = ", ".join(f"{found.name!r} in queue {found.queue!r} ({found.jobs})" for found in strange)
        why = f"the app has no handler for {names}" if names else "their handlers may be too slow"
        super().__init__(f"{left} jobs are still ready or running after {seconds:g} s; {why}")


def drain(app: App, dsn: str, *, timeout: float = 30.0, concurrency: int = 8) -> None:
    """Run the committed jobs of the app's queues until none is ready or running; those whose time has not come stay.

    A failing handler does not raise here: look at the job's effects, or at the dead letters. Raises NotDrained
    after `timeout` seconds.
    """
    queues = tuple(dict.fromkeys([DEFAULT_QUEUE, *(kind.queue for kind in app.types.values())]))
    worker = Worker(app, dsn, WorkerSettings(queues=queues, concurrency=concurrency, poll=0.05, grace=5.0))
    worker.start()
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            until = time.monotonic() + timeout
            while left := _left(connection, queues):
                if time.monotonic() > until:
                    strange = [found for found in execute(connection, unknown()) if found.queue in queues]
                    raise NotDrained(left, timeout, strange)
                time.sleep(0.02)
    finally:
        worker.stop()


def _left(connection: psycopg.Connection[tuple[object, ...]], queues: tuple[str, ...]) -> int:
    def count() -> int:
        found = execute(connection, depth())
        waiting = sum(d.ready + d.in_flight + d.blocked for d in found if d.queue in queues)
        return waiting + execute(connection, due(queues))

    if left := count():
        return left
    # All members of batches have ended: what completes them belongs to what was enqueued.
    execute(connection, fold())
    return count()
