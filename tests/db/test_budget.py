"""The retry budget: an outage meets first executions and a trickle of retries, and every job still ends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import LiteralString

import psycopg
import pytest

from pgqueue import App, Backoff
from pgqueue.budget import Report, draw
from pgqueue.config import WorkerSettings
from pgqueue.connection import execute
from pgqueue.worker import Worker
from tests.server import Connection
from tests.waiting import eventually


def ask(conn: Connection, want: int, ran: int = 0, queue: str = "default") -> int:
    granted = execute(conn, draw([Report(queue=queue, ran=ran, want=want)]))[queue]
    conn.commit()
    return granted


def seen(conn: Connection, query: LiteralString) -> tuple[object, ...] | None:
    row = conn.execute(query).fetchone()
    conn.rollback()
    return row


def age(conn: Connection, seconds: float) -> None:
    conn.execute("UPDATE pgqueue.budget SET at = at - %s * interval '1 s'", (seconds,))
    conn.commit()


def test_a_minute_of_tokens_is_there_at_first_and_no_more(conn: Connection) -> None:
    assert ask(conn, 100) == 60
    assert ask(conn, 1) == 0


def test_a_token_comes_every_second_and_a_minute_is_saved_up(conn: Connection) -> None:
    ask(conn, 60)
    age(conn, 5)
    assert ask(conn, 100) == 5
    age(conn, 3600)
    assert ask(conn, 1000) == 60


def test_a_tenth_of_the_executions_comes_where_that_is_more(conn: Connection) -> None:
    ask(conn, 60)
    assert ask(conn, 1000, ran=5000) == 500
    assert ask(conn, 1000, ran=50) == 5


def test_queues_have_budgets_of_their_own(conn: Connection) -> None:
    assert ask(conn, 60, queue="a") == 60
    assert ask(conn, 60, queue="b") == 60


def test_many_workers_together_get_what_one_would(conn: Connection, dsn: str) -> None:
    def worker(_: int) -> int:
        with psycopg.connect(dsn) as own:
            return ask(own, 10)

    with ThreadPoolExecutor(16) as pool:
        granted = list(pool.map(worker, range(16)))
    assert 60 <= sum(granted) <= 62  # the seconds that pass meanwhile


@pytest.fixture
def failing(dsn: str) -> Iterator[tuple[App, list[int]]]:
    """Run a worker whose handler always fails."""
    app, calls = App(), []

    @app.job("fails", max_attempts=3, backoff=Backoff(base=0.01, cap=300.0, jitter="none"))
    def fails(n: int) -> None:
        calls.append(n)
        raise RuntimeError("the other side is down")

    worker = Worker(app, dsn, WorkerSettings(poll=0.05, grace=5.0))
    worker.start()
    yield app, calls
    worker.stop()


def test_an_outage_meets_every_first_execution_and_few_retries(
    conn: Connection, failing: tuple[App, list[int]]
) -> None:
    app, calls = failing
    app.types["fails"].enqueue_many(conn, list(range(300)))
    conn.commit()

    def settled() -> bool:
        many = conn.execute(
            "SELECT count(*) >= 200 FROM pgqueue.job WHERE run_at > now() + interval '100 s'"
        ).fetchone()
        conn.rollback()
        return len(set(calls)) == 300 and many == (True,)

    eventually(settled, timeout=30)
    retries = len(calls) - 300
    assert retries <= 60 + 30 + 10  # the saved minute, a tenth of the executions, the seconds of this test


def test_every_job_still_ends(conn: Connection, failing: tuple[App, list[int]]) -> None:
    app, calls = failing
    app.types["fails"].enqueue_many(conn, list(range(200)))
    conn.commit()

    def ended() -> bool:
        conn.execute(
            "UPDATE pgqueue.job SET run_at = now() WHERE run_at > now() + interval '1 s'"
        )  # time passes
        conn.commit()
        return conn.execute("SELECT count(*) FROM pgqueue.dead_job").fetchone() == (200,)

    eventually(ended, timeout=60)
    assert len(calls) == 600
    deferred = conn.execute(
        "SELECT sum(n) > 0 FROM (SELECT n, outcome FROM pgqueue.tally UNION ALL "
        "SELECT n, outcome FROM pgqueue.tally_minute) t WHERE outcome = 'deferred'"
    ).fetchone()
    assert deferred == (True,)


def test_a_success_never_touches_the_budget(conn: Connection, dsn: str) -> None:
    app = App()

    @app.job("works")
    def works() -> None: ...

    worker = Worker(app, dsn, WorkerSettings(poll=0.05, grace=5.0))
    worker.start()
    try:
        works.enqueue_many(conn, [None] * 200)
        conn.commit()
        eventually(lambda: seen(conn, "SELECT count(*) FROM pgqueue.job") == (0,))
    finally:
        worker.stop()
    assert conn.execute("SELECT count(*) FROM pgqueue.budget").fetchone() == (0,)
