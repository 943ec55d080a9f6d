"""A finished job of a type that keeps them is found by its id until its time is over, with its result if asked for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pgqueue import App, ConfigError, Job, JobRef, Permanent
from pgqueue.cancel import cancel
from pgqueue.config import WorkerSettings
from pgqueue.connection import execute
from pgqueue.declare import Policy, declare
from pgqueue.errors import StillRunning
from pgqueue.finish import complete, drop
from pgqueue.history import days
from pgqueue.job import Completed
from pgqueue.worker import Worker
from tests.factories import Holder, enqueue, token
from tests.server import Connection

Start = Callable[..., Worker]
WEEK = 604_800.0


@pytest.fixture
def start(dsn: str) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(app: App, **settings: Any) -> Worker:
            worker = Worker(app, dsn, WorkerSettings(**{"visibility": 60.0, "grace": 5.0, **settings}))
            worker.start()
            stack.callback(worker.stop)
            return worker

        yield begin


@pytest.fixture
def auto(dsn: str) -> Iterator[Connection]:
    """Give a connection in autocommit mode."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SET search_path = ''")
        yield connection


def seen(conn: Connection, query: str) -> list[tuple[Any, ...]]:
    rows = conn.execute(query.encode()).fetchall()
    conn.rollback()
    return rows


def kept(conn: Connection, seconds: float = WEEK, name: str = "work") -> None:
    """Declare a type that keeps its jobs, and make the partitions."""
    execute(conn, declare([Policy(name=name, keep=seconds)]))
    execute(conn, days())
    conn.commit()


def partitions(conn: Connection) -> list[str]:
    found = conn.execute(
        "SELECT c.relname::text FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid"
        " WHERE i.inhparent = 'pgqueue.job_history'::regclass ORDER BY 1"
    ).fetchall()
    conn.rollback()
    return [str(row[0]) for row in found]


def finish(dsn: str, *ends: Completed) -> None:
    with Holder(dsn) as holder:
        jobs = holder.claim()
        pairs = list(zip(jobs, ends, strict=True))
        assert holder.run(complete([(token(job), end) for job, end in pairs])) == [job.id for job in jobs]


def test_a_job_s_status_follows_it_from_its_enqueue_to_its_end(
    conn: Connection, auto: Connection, start: Start
) -> None:
    app, reached, go = App(), threading.Event(), threading.Event()

    @app.job("total", keep="7d", result=True, max_attempts=3)
    def total(numbers: list[int], job: Job) -> dict[str, int]:
        job.progress(0.5, "half way")
        reached.set()
        go.wait(100)
        return {"sum": sum(numbers)}

    ref = total.enqueue(conn, [1, 2, 3])
    assert app.status(auto, ref) is None  # not committed
    conn.commit()
    waiting = app.status(auto, ref)
    assert waiting is not None
    assert (waiting.state, waiting.attempt, waiting.started_at, waiting.ended) == ("ready", 0, None, False)
    start(app)
    assert reached.wait(60)
    running = app.status(auto, ref)
    assert running is not None
    assert (running.state, running.attempt, running.max_attempts) == ("in_flight", 1, 3)
    assert running.started_at is not None
    with pytest.raises(StillRunning, match=f"job {ref.id} is in_flight after 0.05 s"):
        ref.wait(auto, timeout=0.05)
    go.set()
    done = ref.wait(auto, timeout=60)
    assert done is not None
    assert (done.state, done.attempt, done.result, done.problem) == ("done", 1, {"sum": 6}, None)
    assert done.finished_at is not None
    assert done.finished_at >= running.started_at
    (row,) = seen(
        conn, "SELECT payload::text, until - finished_at, worker IS NOT NULL FROM pgqueue.job_history"
    )
    assert row[0] == "[1,2,3]"
    assert abs(row[1] - timedelta(days=7)) < timedelta(minutes=1)
    assert row[2]


def test_a_dead_job_says_why(conn: Connection, auto: Connection, start: Start) -> None:
    app = App()

    @app.job("bad", keep="7d")
    def bad(job: Job) -> None:
        job.progress(0.25, "a quarter")
        job.checkpoint(1)
        raise Permanent("no such account")

    ref = bad.enqueue(conn)
    conn.commit()
    start(app)
    status = ref.wait(auto, timeout=60)
    assert status is not None
    assert (status.state, status.error_type, status.error) == (
        "dead", "pgqueue.errors.Permanent", "no such account",
    )  # fmt: skip


def test_a_wait_works_on_asynchronous_handles(conn: Connection, dsn: str, start: Start) -> None:
    app = App()

    @app.job("answer", result=True)
    async def answer() -> int:
        return 42

    ref = answer.enqueue(conn)
    conn.commit()
    start(app)

    async def result() -> Any:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as handle:
            status = await ref.wait_async(handle, timeout=60)
            assert await app.astatus(handle, ref) == status
            return status and status.result

    assert asyncio.run(result()) == 42


def test_a_wait_inside_a_transaction_is_refused(conn: Connection, dsn: str) -> None:
    with pytest.raises(ConfigError, match="commit, and wait on a connection in autocommit mode"):
        JobRef(1).wait(conn, timeout=1)

    async def inside() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as handle:
            await JobRef(1).wait_async(handle, timeout=1)

    with pytest.raises(ConfigError, match="autocommit"):
        asyncio.run(inside())


def test_a_result_that_cannot_be_kept_leaves_the_job_done_and_says_why(
    conn: Connection, auto: Connection, start: Start
) -> None:
    """kestra 10653: the write of an outcome failed on its text, and the job was stuck."""
    app = App()

    @app.job("odd", result=True)
    def odd() -> object:
        return object()

    ref = odd.enqueue(conn)
    conn.commit()
    start(app)
    status = ref.wait(auto, timeout=60)
    assert status is not None
    assert (status.state, status.result) == ("done", None)
    assert "the result has no JSON form" in str(status.problem)


def test_a_job_of_a_type_that_keeps_none_leaves_no_trace(
    conn: Connection, auto: Connection, start: Start
) -> None:
    app = App()

    @app.job("plain")
    def plain() -> int:
        return 1

    ref = plain.enqueue(conn)
    conn.commit()
    start(app)
    assert ref.wait(auto, timeout=60) is None
    assert partitions(conn) == []


@pytest.mark.parametrize("running", [False, True])
def test_a_cancelled_job_is_kept_as_cancelled(
    conn: Connection, dsn: str, auto: Connection, *, running: bool
) -> None:
    kept(conn)
    (job_id,) = enqueue(conn)
    conn.commit()
    if running:
        with Holder(dsn) as holder:
            holder.run(drop([token(job) for job in holder.claim()]))
    else:
        execute(conn, cancel([job_id]))
        conn.commit()
    status = App().status(auto, job_id)
    assert status is not None
    assert (status.state, status.attempt, status.ended) == ("cancelled", int(running), True)
    assert (status.started_at is not None) == running


def test_partitions_are_made_ahead_for_each_span_and_once(conn: Connection) -> None:
    execute(conn, declare([Policy(name="a", keep=WEEK), Policy(name="b", keep=86_400.0), Policy(name="c")]))
    assert execute(conn, days()) == 6
    assert execute(conn, days()) == 0
    conn.commit()
    wanted = seen(
        conn,
        "SELECT 'job_history_' || to_char((now() AT TIME ZONE 'UTC')::date + d, 'YYYYMMDD')"
        " FROM unnest(ARRAY[1, 2, 3, 7, 8, 9]) d",
    )
    assert partitions(conn) == [row[0] for row in wanted]


def test_a_partition_whose_day_is_over_is_dropped_with_its_rows(conn: Connection, dsn: str) -> None:
    kept(conn)
    enqueue(conn, 2)
    conn.commit()
    finish(dsn, Completed(), Completed(result="1"))
    old(conn)
    assert seen(conn, "SELECT count(*) FROM pgqueue.job_history") == [(3,)]
    assert execute(conn, days()) == 1
    conn.commit()
    assert seen(conn, "SELECT count(*) FROM pgqueue.job_history") == [(2,)]
    assert "job_history_20200101" not in partitions(conn)


def old(conn: Connection) -> None:
    """Make a partition whose day is long over, with a row."""
    conn.execute("CREATE TABLE pgqueue.job_history_20200101 (LIKE pgqueue.job_history INCLUDING ALL)")
    conn.execute(
        "ALTER TABLE pgqueue.job_history ATTACH PARTITION pgqueue.job_history_20200101"
        " FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-01-02 00:00+00')"
    )
    conn.execute("INSERT INTO pgqueue.history_day VALUES ('2020-01-01')")
    conn.execute(
        "INSERT INTO pgqueue.job_history (id, until, outcome, name, queue, priority, attempt, enqueued_at, payload)"
        " VALUES (99, '2020-01-01 12:00+00', 'done', 'work', 'default', 5, 1, '2019-12-25', '1')"
    )
    conn.commit()


def test_dropping_waits_for_nobody_and_nobody_for_it(conn: Connection, dsn: str) -> None:
    """A DROP that waits for one reader makes every later acknowledgement queue up behind it."""
    kept(conn)
    old(conn)
    enqueue(conn)
    conn.commit()
    with Holder(dsn) as holder, psycopg.connect(dsn) as reader:
        holder.connection.execute(
            "SET lock_timeout = 0"
        )  # whoever waits for a lock does so until he is stopped
        holder.connection.execute("SET statement_timeout = '20s'")
        reader.execute("SELECT count(*) FROM pgqueue.job_history")  # holds every partition
        assert holder.run(days()) == 0
        assert seen(conn, "SELECT count(*) FROM pgqueue.job_history") == [(1,)]
        (job,) = holder.claim()
        assert holder.run(complete([(token(job), Completed())])) == [job.id]
        reader.rollback()
        reader.execute(
            "INSERT INTO pgqueue.job_history (id, until, outcome, name, queue, priority, attempt, enqueued_at, payload)"
            " VALUES (1, now() + interval '7 days', 'done', 'w', 'q', 5, 1, now(), '1')"
        )
        assert holder.run(days()) == 0  # a writer holds the table, not this partition: it is emptied at least
        assert seen(conn, "SELECT count(*) FROM pgqueue.job_history WHERE until < now()") == [(0,)]
        reader.commit()
        assert holder.run(days()) == 1
    assert "job_history_20200101" not in partitions(conn)


def test_making_a_partition_lets_writers_go_on(conn: Connection, dsn: str) -> None:
    """que 342: DDL behind a long writer stalled everybody."""
    kept(conn)
    enqueue(conn)
    conn.commit()
    with Holder(dsn, 1) as a, Holder(dsn, 2) as b:
        (job,) = a.claim()
        a.begin()
        assert a.run(complete([(token(job), Completed())])) == [job.id]  # holds the table as a writer
        b.run(declare([Policy(name="other", keep=30 * 86_400.0)]))
        b.connection.execute("SET lock_timeout = '1s'")
        assert b.run(days()) == 3
        a.commit()
    assert len(partitions(conn)) == 6


@pytest.mark.parametrize("left", ["later", "earlier", "none"])
def test_an_acknowledgement_never_fails_for_want_of_a_partition(
    conn: Connection, dsn: str, left: str
) -> None:
    """oban 1030: rows that had no partition, or moved between two, failed the write."""
    if left != "none":
        kept(conn, 30 * 86_400.0 if left == "later" else 86_400.0, name="other")
    execute(conn, declare([Policy(name="work", keep=WEEK)]))
    enqueue(conn)
    conn.commit()
    finish(dsn, Completed())
    assert seen(conn, "SELECT count(*) FROM pgqueue.job") == [(0,)]
    assert seen(conn, "SELECT count(*) FROM pgqueue.job_history") == [(0 if left == "none" else 1,)]


def test_ten_workers_that_start_at_once_make_each_partition_once(conn: Connection, dsn: str) -> None:
    execute(conn, declare([Policy(name="work", keep=WEEK)]))
    conn.commit()
    made: list[int] = []

    def begin(nonce: int) -> None:
        with Holder(dsn, nonce) as holder:
            made.append(holder.run(days()))

    threads = [threading.Thread(target=begin, args=(n,)) for n in range(1, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(made) == 3
    assert len(partitions(conn)) == 3


def test_the_status_of_an_id_is_found_by_indexes_alone(conn: Connection) -> None:
    kept(conn)
    conn.execute("SET enable_seqscan = off")
    plan = conn.execute(
        "EXPLAIN SELECT h.result FROM pgqueue.job_history h WHERE h.id = 1"
    ).fetchall()  # fmt: skip
    assert not [line for (line,) in plan if "Seq Scan" in str(line)]


def test_the_minute_counters_tell_every_end_of_every_type(conn: Connection, dsn: str) -> None:
    kept(conn)
    enqueue(conn, 3)
    conn.commit()
    with Holder(dsn) as holder:
        jobs = holder.claim()
        holder.run(complete([(token(jobs[0]), Completed()), (token(jobs[1]), Completed())]))
        holder.run(drop([token(jobs[2])]))
    assert seen(conn, "SELECT queue, name, outcome, n FROM pgqueue.tally ORDER BY 3") == [
        ("default", "work", "cancelled", 1),
        ("default", "work", "ok", 2),
    ]
