"""A worker under conditions that come together rarely: nothing is stuck, starved, or spun for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from pgqueue import App
from pgqueue.config import WorkerSettings
from pgqueue.engine import Engine
from pgqueue.worker import Worker
from tests.server import Connection
from tests.waiting import eventually

Start = Callable[..., Worker]


@pytest.fixture
def start(dsn: str) -> Iterator[Start]:
    """Give a way to start workers in this process."""
    with ExitStack() as stack:

        def begin(app: App, **settings: Any) -> Worker:
            worker = Worker(app, dsn, WorkerSettings(**{"grace": 2.0, **settings}))
            worker.start()
            stack.callback(worker.stop)
            return worker

        yield begin


def left(conn: Connection) -> int:
    row = conn.execute("SELECT count(*) FROM pgqueue.job").fetchone()
    conn.rollback()
    return int(str(row[0])) if row else 0


def test_an_idle_reserved_slot_keeps_nobody_busy_while_jobs_of_other_queues_wait_on_the_shelf(
    conn: Connection, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, gate, turns = App(), threading.Event(), [0]
    begun = threading.Event()

    @app.job("work")
    def work(n: int) -> None:
        begun.set()
        gate.wait(20)

    turn = Engine._turn

    def counted(self: Engine) -> bool:
        turns[0] += 1
        return turn(self)

    monkeypatch.setattr(Engine, "_turn", counted)
    work.enqueue_many(conn, list(range(10)))
    conn.commit()
    start(app, queues=("critical", "default"), reserved={"critical": 1}, concurrency=2, prefetch=5)
    assert begun.wait(10)
    before, began = turns[0], time.monotonic()
    eventually(lambda: time.monotonic() - began > 1.0)
    assert turns[0] - before < 150
    gate.set()
    eventually(lambda: left(conn) == 0)


def test_a_keyed_job_whose_transaction_was_long_is_found_when_it_commits(
    conn: Connection, start: Start, dsn: str
) -> None:
    app, ran = App(), []

    @app.job("work")
    def work(n: int) -> None:
        ran.append(n)

    worker = start(app, visibility=5.0)
    horizon = worker._engine._intake.floors.horizon
    work.using(key="early").enqueue(conn, 0)
    conn.commit()
    eventually(lambda: ran == [0])
    with psycopg.connect(dsn) as slow:
        work.using(key="slow").enqueue(slow, 1)
        n = 2

        def other() -> bool:
            nonlocal n
            work.using(key=f"k{n}").enqueue(conn, n)
            conn.commit()
            n += 1
            return horizon.guarded

        eventually(other, timeout=10, look=0.05)
        eventually(lambda: len(ran) == n - 1)
        slow.commit()
    eventually(lambda: 1 in ran, timeout=10)


def test_a_finished_job_that_somebody_has_locked_keeps_nobody_from_claiming(
    conn: Connection, start: Start, dsn: str
) -> None:
    app, gate, ran = App(), threading.Event(), []

    @app.job("slow")
    def slow() -> None:
        gate.wait(20)

    @app.job("work")
    def work(n: int) -> None:
        ran.append(n)

    locked = slow.enqueue(conn).id
    conn.commit()
    worker = start(app, concurrency=4)
    eventually(lambda: bool(worker._hand.running))
    with psycopg.connect(dsn) as shop:
        shop.execute("SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE", [locked])
        gate.set()
        eventually(lambda: not worker._hand.running)
        work.using(key="k").enqueue(conn, 0)
        work.enqueue_many(conn, list(range(1, 20)))
        conn.commit()
        eventually(lambda: sorted(ran) == list(range(20)), timeout=5)
        eventually(lambda: left(conn) == 1)
    eventually(lambda: left(conn) == 0)
