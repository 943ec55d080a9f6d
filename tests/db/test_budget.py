"""The retry budget: an outage meets first executions and a trickle of retries, and every job still ends."""

from __future__ import annotations

import threading
import time
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
    began = time.monotonic()
    assert ask(conn, 100) == 60
    assert ask(conn, 100) <= time.monotonic() - began


def test_a_token_comes_every_second_and_a_minute_is_saved_up(conn: Connection) -> None:
    began = time.monotonic()
    ask(conn, 60)
    age(conn, 5)
    assert 5 <= ask(conn, 100) <= 5 + time.monotonic() - began
    age(conn, 3600)
    assert ask(conn, 1000) == 60


def test_a_tenth_of_the_executions_comes_where_that_is_more(conn: Connection) -> None:
    ask(conn, 60)
    assert ask(conn, 1000, ran=5000) == 500
    assert ask(conn, 1000, ran=500) == 50
    age(conn, 20)
    assert ask(conn, 1000, ran=500) == 50  # the more of the two, not both


def test_queues_have_budgets_of_their_own(conn: Connection) -> None:
    assert ask(conn, 60, queue="a") == 60
    assert ask(conn, 60, queue="b") == 60


def test_many_workers_together_get_what_one_would(conn: Connection, dsn: str) -> None:
    def worker(_: int) -> int:
        with psycopg.connect(dsn) as own:
            return ask(own, 10)

    began = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        granted = list(pool.map(worker, range(16)))
    assert 60 <= sum(granted) <= 60 + time.monotonic() - began


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
    """contribsys/faktory#99, hatchet-dev/hatchet#1540: everything failed, and was tried again at once."""
    app, calls = failing
    began = time.monotonic()
    app.types["fails"].enqueue_many(conn, list(range(300)))
    conn.commit()

    def settled() -> bool:
        many = conn.execute(
            "SELECT count(*) >= 200 FROM pgqueue.job WHERE run_at > enqueued_at + interval '100 s'"
        ).fetchone()
        conn.rollback()
        return len(set(calls)) == 300 and many == (True,)

    eventually(settled, timeout=30)
    retries = len(calls) - 300
    # The saved minute, a tenth of the executions, the seconds of this test.
    assert retries <= 60 + 30 + time.monotonic() - began


def test_every_job_still_ends(conn: Connection, failing: tuple[App, list[int]]) -> None:
    app, calls = failing
    began = time.monotonic()
    app.types["fails"].enqueue_many(conn, list(range(200)))
    conn.commit()

    def ended() -> bool:
        conn.execute(
            "UPDATE pgqueue.job SET run_at = now() WHERE run_at > now() + interval '1 s'"
        )  # time passes
        conn.commit()
        return conn.execute("SELECT count(*) FROM pgqueue.dead_job").fetchone() == (200,)

    eventually(ended, timeout=60)
    # A retry that finds no budget when its time has come counts without being run.
    assert 200 < len(calls) <= 200 + 20 + 60 + (time.monotonic() - began) + 5
    dead = conn.execute("SELECT DISTINCT error_type, attempt, reason, error FROM pgqueue.dead_job").fetchall()
    assert dead == [("RuntimeError", 3, "exhausted", "the other side is down")]
    tried = conn.execute(
        "SELECT a ->> 'error_type', count(*) > 100"
        " FROM pgqueue.dead_job d, json_array_elements(d.attempts) a GROUP BY 1"
    ).fetchall()
    assert sorted(map(str, tried)) == ["('RetryBudget', True)", "('RuntimeError', True)"]
    counted = conn.execute(
        "SELECT outcome, sum(n) > 100 FROM (SELECT n, outcome FROM pgqueue.tally UNION ALL "
        "SELECT n, outcome FROM pgqueue.tally_minute) t WHERE outcome IN ('deferred', 'put_off') GROUP BY 1"
    ).fetchall()
    assert sorted(counted) == [("deferred", True), ("put_off", True)]


@pytest.mark.parametrize("key", [None, "customer"])
@pytest.mark.parametrize("attempts", [2, 500])
def test_a_deferred_retry_runs_when_the_side_is_well_again_and_else_waits_for_its_turn(
    conn: Connection, dsn: str, key: str | None, attempts: int
) -> None:
    """Whether it has an ordering key or not; with the last attempt it ends without having been run again."""
    app, well, calls = App(), threading.Event(), []

    @app.job("call", max_attempts=attempts, backoff=Backoff(base=0.01, cap=0.02))
    def call(n: int) -> None:
        calls.append(n)
        if n == 0 and not well.is_set():
            raise RuntimeError("down")

    conn.execute("INSERT INTO pgqueue.budget (queue, tokens, granted, at) VALUES ('default', -1e6, 0, now())")
    call.using(key=key).enqueue(conn, 0)
    conn.commit()
    worker = Worker(app, dsn, WorkerSettings(poll=0.05, grace=5.0))
    worker.start()
    try:
        if attempts == 2:
            eventually(lambda: seen(conn, "SELECT reason FROM pgqueue.dead_job") == ("exhausted",))
            assert calls == [0]
            assert seen(conn, "SELECT error_type, error, attempt FROM pgqueue.dead_job") == (
                "RuntimeError",
                "down",
                2,
            )
        else:
            put_off = "SELECT count(*) > 1 FROM pgqueue.attempt_log WHERE error_type = 'RetryBudget'"
            eventually(lambda: seen(conn, put_off) == (True,))
            assert calls == [0]
            well.set()
            call.enqueue(conn, 1)  # a success, which lets it through
            conn.commit()
            eventually(lambda: seen(conn, "SELECT count(*) FROM pgqueue.job") == (0,))
            assert sorted(calls) == [0, 0, 1]
            assert seen(conn, "SELECT count(*) FROM pgqueue.dead_job") == (0,)
    finally:
        worker.stop()


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
