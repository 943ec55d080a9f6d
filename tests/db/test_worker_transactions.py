"""Transactional handlers: effects and acknowledgement are one commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pgqueue import App, Backoff, ConfigError, Job
from pgqueue.config import WorkerSettings
from pgqueue.events import AlreadyApplied, Bus, Event, JobFinished, LeasesLost
from pgqueue.worker import CONNECTIONS, Worker
from tests.process.apps import exactly
from tests.server import Connection, Server
from tests.waiting import eventually

Start = Callable[..., Worker]
KINDS = ["psycopg", "apsycopg", "connection", "session", "aconnection", "asession"]


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def start(dsn: str, conn: Connection, events: list[Event]) -> Iterator[Start]:
    """Give a way to start workers in this process; handlers write to public.effect."""
    conn.execute("CREATE TABLE public.effect (id bigserial, kind text NOT NULL, attempt int NOT NULL)")
    conn.commit()
    with ExitStack() as stack:

        def begin(app: App, **settings: Any) -> Worker:
            bus = Bus()
            bus.subscribe(Event, events.append)
            worker = Worker(app, dsn, WorkerSettings(**{"visibility": 30.0, "grace": 5.0, **settings}), bus)
            worker.start()
            stack.callback(worker.stop)
            return worker

        yield begin


def seen(conn: Connection, query: str) -> list[tuple[Any, ...]]:
    rows = conn.execute(query).fetchall()
    conn.rollback()
    return rows


def drained(conn: Connection) -> bool:
    return seen(conn, "SELECT count(*) FROM pgqueue.job") == [(0,)]


@pytest.mark.parametrize("name", KINDS)
def test_the_effect_and_the_ack_commit_together(conn: Connection, start: Start, name: str) -> None:
    """oban-bg/oban-py#8: what was called transactional went over a connection of its own."""
    exactly.app.enqueue(conn, name, "once")
    conn.commit()
    start(exactly.app)
    eventually(lambda: drained(conn))
    assert seen(conn, "SELECT kind, attempt FROM public.effect") == [("once", 1)]
    assert seen(conn, "SELECT count(*) FROM pgqueue.dead_job") == [(0,)]


@pytest.mark.parametrize("name", KINDS)
def test_a_failed_attempt_leaves_no_effect(conn: Connection, start: Start, name: str) -> None:
    exactly.app.enqueue(conn, name, "fail once", backoff=Backoff(base=0.01, cap=0.05))
    conn.commit()
    start(exactly.app)
    eventually(lambda: drained(conn))
    assert seen(conn, "SELECT kind, attempt FROM public.effect") == [("fail once", 2)]


def test_a_lost_lease_undoes_the_effect(
    conn: Connection, dsn: str, start: Start, events: list[Event]
) -> None:
    """oban-bg/oban#532: a stale attempt wrote its end over that of the current one."""
    app, reached, go = App(), threading.Event(), threading.Event()

    @app.job("late", transactional=True)
    def late(kind: str, own: psycopg.Connection, job: Job) -> None:
        own.execute(exactly.sentence(kind, job))
        if job.attempt == 1:
            reached.set()
            go.wait(100)

    late.enqueue(conn, "late")
    conn.commit()
    start(app)
    assert reached.wait(60)
    with psycopg.connect(dsn, autocommit=True) as other:  # another claim takes the job over
        other.execute("UPDATE pgqueue.job SET lease = lease + 1, deadline = now() - interval '1 s'")
    go.set()
    eventually(lambda: drained(conn), timeout=30)
    # The second attempt may end before the first.
    eventually(lambda: any(isinstance(event, LeasesLost) for event in events))
    assert seen(conn, "SELECT kind, attempt FROM public.effect") == [("late", 2)]


def test_a_business_lock_on_the_job_only_delays_the_commit(conn: Connection, dsn: str, start: Start) -> None:
    app, reached, locked = App(), threading.Event(), threading.Event()

    @app.job("patient", transactional=True)
    def patient(kind: str, own: psycopg.Connection, job: Job) -> None:
        own.execute(exactly.sentence(kind, job))
        reached.set()
        locked.wait(100)

    ref = patient.enqueue(conn, "patient")
    conn.commit()
    with psycopg.connect(dsn) as other:
        start(app)
        assert reached.wait(60)
        other.execute("SELECT FROM pgqueue.job WHERE id = %s FOR SHARE", (ref.id,))
        locked.set()
        wait = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        eventually(lambda: seen(conn, wait))
    eventually(lambda: drained(conn))
    assert seen(conn, "SELECT kind, attempt FROM public.effect") == [("patient", 1)]


def test_two_jobs_of_one_idempotency_key_have_one_effect(
    conn: Connection, start: Start, events: list[Event]
) -> None:
    for _ in range(5):
        exactly.app.enqueue(conn, "session", "keyed", idempotency_key="order-1")
    conn.commit()
    start(exactly.app)
    eventually(lambda: drained(conn), timeout=30)
    assert seen(conn, "SELECT kind, attempt FROM public.effect") == [("keyed", 1)]
    assert sum(isinstance(event, AlreadyApplied) for event in events) == 4


def test_a_handler_that_is_not_transactional_marks_and_acks_together(
    conn: Connection, start: Start, events: list[Event]
) -> None:
    app, runs = App(), []

    @app.job("plain")
    def plain(kind: str, job: Job) -> None:
        runs.append(job.idempotency_key)
        if len(runs) == 1:
            raise RuntimeError("the first attempt fails and leaves no marker")

    for _ in range(3):
        plain.using(idempotency_key="k", backoff=Backoff(base=0.01, cap=0.05)).enqueue(conn, "x")
    conn.commit()
    start(app)
    eventually(lambda: drained(conn), timeout=30)
    assert runs == ["k", "k"]
    assert sum(isinstance(event, AlreadyApplied) for event in events) == 2
    assert seen(conn, "SELECT count(*) FROM pgqueue.effect WHERE applied_at IS NOT NULL") == [(1,)]


def test_keyed_jobs_of_one_idempotency_key_keep_their_lane_going(conn: Connection, start: Start) -> None:
    app, runs = App(), []

    @app.job("lane")
    def lane(n: int) -> None:
        runs.append(n)

    for n in range(4):
        lane.using(key="customer", idempotency_key="same" if n in (1, 2) else f"own-{n}").enqueue(conn, n)
    conn.commit()
    start(app)
    eventually(lambda: drained(conn), timeout=30)
    assert runs == [0, 1, 3]


def test_a_handle_without_transactional_is_refused_and_the_other_way_round() -> None:
    app = App()
    with pytest.raises(ConfigError, match="transactional=True"):

        @app.job("a")
        def a(payload: str, conn: psycopg.Connection) -> None: ...

    with pytest.raises(ConfigError, match="AsyncSession"):

        @app.job("b", transactional=True)
        def b(payload: str) -> None: ...

    with pytest.raises(ConfigError, match="match the two"):

        @app.job("c", transactional=True)
        async def c(payload: str, conn: psycopg.Connection) -> None: ...


@pytest.mark.parametrize("is_async", [False, True])
def test_a_pooled_connection_that_the_server_has_closed_costs_no_attempt(
    conn: Connection, dsn: str, start: Start, is_async: bool
) -> None:
    app = App()
    if is_async:

        @app.job("once", transactional=True, max_attempts=1)
        async def once(kind: str, own: psycopg.AsyncConnection, job: Job) -> None:
            await own.execute(exactly.sentence(kind, job))

    else:

        @app.job("once", transactional=True, max_attempts=1)
        def once(kind: str, own: psycopg.Connection, job: Job) -> None:
            own.execute(exactly.sentence(kind, job))

    start(app)
    for n in range(3):
        app.enqueue(conn, "once", str(n))
        conn.commit()
        eventually(lambda: drained(conn))
        with psycopg.connect(dsn, autocommit=True) as admin:
            ended = admin.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE application_name LIKE 'pgqueue-handler%' AND datname = current_database()"
            ).fetchone()
            assert ended == (1,)
            eventually(
                lambda: (
                    admin.execute(
                        "SELECT FROM pg_stat_activity"
                        " WHERE application_name LIKE 'pgqueue-handler%' AND datname = current_database()"
                    ).fetchone()
                    is None
                )
            )
    assert seen(conn, "SELECT kind, attempt FROM public.effect ORDER BY 1") == [("0", 1), ("1", 1), ("2", 1)]


@pytest.mark.parametrize("keep", [None, timedelta(days=1)])
def test_a_transaction_whose_key_another_job_has_taken_meanwhile_is_undone(
    conn: Connection, dsn: str, start: Start, keep: timedelta | None
) -> None:
    """Its lease had run out, so the key was free; its row is still there, so the lease alone says nothing."""
    app, reached, go = App(), threading.Event(), threading.Event()

    @app.job("keyed", transactional=True, keep=keep)
    def keyed(kind: str, own: psycopg.Connection, job: Job) -> None:
        own.execute(exactly.sentence(kind, job))
        if kind == "first" and job.attempt == 1:
            reached.set()
            go.wait(100)

    first = keyed.using(idempotency_key="k").enqueue(conn, "first").id
    conn.commit()
    start(app)
    assert reached.wait(60)
    with psycopg.connect(dsn, autocommit=True) as other:
        (second,) = other.execute(
            "SELECT pgqueue.enqueue('keyed', '\"second\"', delay => '1 h')"
        ).fetchone() or (0,)
        other.execute("UPDATE pgqueue.effect SET job_id = %s, lease = 77", [second])
        go.set()
        eventually(lambda: seen(conn, "SELECT lease FROM pgqueue.job WHERE lease <> 0") != [])
        other.execute("UPDATE pgqueue.effect SET applied_at = now()")
        other.execute("DELETE FROM pgqueue.job WHERE id = %s", [second])
        other.execute(
            "UPDATE pgqueue.job SET deadline = now() - interval '1 s' WHERE id = %s AND lease <> 0", [first]
        )
    eventually(lambda: drained(conn), timeout=30)
    assert seen(conn, "SELECT kind FROM public.effect") == []


@pytest.mark.parametrize("name", KINDS)
def test_a_transaction_that_cannot_be_opened_costs_no_attempt(
    conn: Connection, server: Server, start: Start, events: list[Event], name: str
) -> None:
    """timgit/pg-boss#756: what was claimed and not run uses up its attempts."""
    database = conn.info.dbname
    start(exactly.app)
    there = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE application_name LIKE 'pgqueue-worker %' AND datname = current_database()"
    )
    eventually(lambda: seen(conn, there) == [(CONNECTIONS,)])
    with server.admin() as admin:
        admin.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false".encode())
        try:
            exactly.app.types[name].using(max_attempts=1).enqueue(conn, "once")
            conn.commit()

            def put_off() -> bool:
                return any(isinstance(e, JobFinished) and e.outcome == "snooze" and e.error for e in events)

            eventually(put_off, timeout=20)
            assert not drained(conn)
        finally:
            admin.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true".encode())
    eventually(lambda: drained(conn), timeout=20)
    assert seen(conn, "SELECT kind, attempt FROM public.effect") == [("once", 1)]
