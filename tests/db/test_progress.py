"""Progress and checkpoints stand beside the job, fenced by its lease, and cost its row nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from pgqueue import App, Backoff, Job, LeaseLost, Permanent
from pgqueue.config import WorkerSettings
from pgqueue.connection import execute
from pgqueue.dead import Filter, replay
from pgqueue.job import Claim
from pgqueue.progress import Note, checkpoint, progress, prune, state
from pgqueue.worker import Worker
from tests.factories import Holder, enqueue, lose, token
from tests.server import Connection
from tests.waiting import eventually

Start = Callable[..., Worker]
LOCK_WAITER = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


@pytest.fixture
def start(dsn: str) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(app: App, **settings: Any) -> Worker:
            worker = Worker(app, dsn, WorkerSettings(**{"visibility": 30.0, "grace": 5.0, **settings}))
            worker.start()
            stack.callback(worker.stop)
            return worker

        yield begin


def seen(conn: Connection, query: str) -> list[tuple[Any, ...]]:
    rows = conn.execute(query.encode()).fetchall()
    conn.rollback()
    return rows


def test_a_worker_that_lost_the_job_writes_no_checkpoint_over_its_successor_s(
    conn: Connection, dsn: str
) -> None:
    """oban 532, semaprax 192: a stale attempt wrote over its successor."""
    (job_id,) = enqueue(conn)
    conn.commit()
    with Holder(dsn, 1) as old, Holder(dsn, 2) as new:
        (mine,) = old.claim()
        assert old.run(checkpoint(token(mine), '{"page": 1}'))
        lose(conn, [job_id])
        conn.commit()
        (theirs,) = new.suspects()
        assert new.run(state(job_id)) == '{"page": 1}'
        assert new.run(checkpoint(token(theirs), '{"page": 2}'))
        assert not old.run(checkpoint(token(mine), '{"page": 9}'))
        old.run(progress([Note(token(mine), 0.9, "stale")]))
        assert new.run(state(job_id)) == '{"page": 2}'
    assert seen(conn, "SELECT fraction, note FROM pgqueue.progress") == [(None, None)]


def test_a_late_checkpoint_that_waited_for_its_successor_s_is_refused(conn: Connection, dsn: str) -> None:
    """In one statement it would judge its lease on a snapshot from before the wait."""
    (job_id,) = enqueue(conn)
    conn.commit()
    with Holder(dsn, 1) as old, Holder(dsn, 2) as new:
        (mine,) = old.claim()
        lose(conn, [job_id])
        conn.commit()
        new.begin()
        (theirs,) = new.suspects()
        assert new.run(checkpoint(token(theirs), '"new"'))  # holds the row, and its claim is not committed
        answer: list[bool] = []
        late = threading.Thread(target=lambda: answer.append(old.run(checkpoint(token(mine), '"old"'))))
        late.start()
        eventually(lambda: seen(conn, LOCK_WAITER) != [])
        new.commit()
        late.join(60)
        assert answer == [False]
        assert new.run(state(job_id)) == '"new"'


def test_progress_and_checkpoints_do_not_touch_the_job(conn: Connection, dsn: str) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    with Holder(dsn) as holder:
        (job,) = holder.claim()
        before = seen(conn, "SELECT xmin, xmax, ctid FROM pgqueue.job")
        holder.run(checkpoint(token(job), "1"))
        holder.run(progress([Note(token(job), 0.5, "half")]))
        assert seen(conn, "SELECT xmin, xmax, ctid FROM pgqueue.job") == before
        with psycopg.connect(dsn) as other:  # and a lock on it holds up neither
            other.execute("SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE", [job_id])
            assert holder.run(checkpoint(token(job), "2"))
            holder.run(progress([Note(token(job), 0.6, "more")]))


def test_the_state_of_a_job_goes_when_it_is_done_and_stays_with_a_dead_letter(
    conn: Connection, dsn: str
) -> None:
    enqueue(conn, 3)
    conn.commit()
    with Holder(dsn) as holder:
        jobs = holder.claim()
        for job in jobs:
            assert holder.run(checkpoint(token(job), str(job.id)))
    conn.execute("DELETE FROM pgqueue.job WHERE id = 1")
    conn.execute(
        "WITH d AS (DELETE FROM pgqueue.job WHERE id = 2 RETURNING *) INSERT INTO pgqueue.dead_job"
        " (id, queue, name, priority, attempt, lost, payload, enqueued_at, reason)"
        " SELECT id, queue, name, priority, attempt, lost, payload, enqueued_at, 'permanent' FROM d"
    )
    execute(conn, prune())
    conn.commit()
    assert seen(conn, "SELECT job_id FROM pgqueue.progress ORDER BY 1") == [(2,), (3,)]


def test_a_replayed_job_goes_on_from_its_checkpoint(conn: Connection, start: Start) -> None:
    app, found = App(), []

    @app.job("report")
    def report(job: Job) -> None:
        found.append((job.attempt, job.state))
        if job.state is None:
            job.progress(0.25, "a quarter\0")
            job.checkpoint({"page": 12})
            raise Permanent("the partner closed the account")

    ref = report.enqueue(conn)
    conn.commit()
    start(app)
    eventually(lambda: seen(conn, "SELECT 1 FROM pgqueue.dead_job"))
    execute(conn, replay(Filter(ids=(ref.id,))))
    conn.commit()
    eventually(lambda: seen(conn, "SELECT count(*) FROM pgqueue.job") == [(0,)])
    assert found == [(1, None), (1, {"page": 12})]


def test_people_see_how_far_a_running_job_is(conn: Connection, start: Start) -> None:
    app, go = App(), threading.Event()

    @app.job("report")
    def report(job: Job) -> None:
        for page in range(100):
            job.progress(page / 200, f"page {page}")
        go.wait(100)

    ref = report.enqueue(conn)
    conn.commit()
    start(app)

    def told() -> bool:
        status = app.status(conn, ref)
        conn.rollback()
        assert status is not None
        return (status.state, status.note) == ("in_flight", "page 99") and round(
            status.progress or 0, 3
        ) == 0.495

    eventually(told)
    go.set()
    eventually(lambda: seen(conn, "SELECT count(*) FROM pgqueue.job") == [(0,)])


def test_the_handler_learns_at_its_checkpoint_that_its_lease_is_lost(
    conn: Connection, dsn: str, start: Start
) -> None:
    """agno 9512, hexpm 1825: a run that was taken over went on to its end."""
    app, reached, go, told = App(), threading.Event(), threading.Event(), []

    @app.job("report", backoff=Backoff(base=0.01, cap=0.05))
    def report(job: Job) -> None:
        if job.attempt > 1:
            return
        reached.set()
        go.wait(100)
        try:
            job.checkpoint(1)
        except LeaseLost as error:
            told.append(error.job_id)
            raise

    ref = report.enqueue(conn)
    conn.commit()
    start(app)
    assert reached.wait(60)
    with psycopg.connect(dsn, autocommit=True) as other:
        other.execute("UPDATE pgqueue.job SET lease = lease + 1, deadline = now() - interval '1 s'")
    go.set()
    eventually(lambda: seen(conn, "SELECT count(*) FROM pgqueue.job") == [(0,)])
    eventually(lambda: told)  # the second attempt may end before the first goes on
    assert told == [ref.id]


def test_a_checkpoint_waits_for_a_database_that_comes_back(conn: Connection, dsn: str, start: Start) -> None:
    app, kept = App(), []

    @app.job("report")
    def report(job: Job) -> None:
        with psycopg.connect(dsn, autocommit=True) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name LIKE 'pgqueue-worker%' AND datname = current_database()"
            )
        job.checkpoint("kept")
        kept.append(job.state)

    report.enqueue(conn)
    conn.commit()
    start(app)
    eventually(lambda: seen(conn, "SELECT count(*) FROM pgqueue.job") == [(0,)], timeout=20)
    assert kept == ["kept"]


def test_the_lease_of_another_job_writes_nothing(conn: Connection, dsn: str) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    with Holder(dsn) as holder:
        holder.claim()
        assert not holder.run(checkpoint(Claim(job_id, 12345), "1"))
        assert not holder.run(checkpoint(Claim(job_id + 1, 12345), "1"))
        assert holder.run(state(job_id)) is None
