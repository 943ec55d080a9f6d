"""A batch completes once, when all of its members are done, and no member waits for another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg import errors as pg
from psycopg.rows import tuple_row
from sqlalchemy.orm import Session

from pgqueue import App, Backoff, Job, NotInTransaction, Permanent, QueueFull
from pgqueue.batch import fold, prune
from pgqueue.cancel import cancel
from pgqueue.config import WorkerSettings
from pgqueue.connection import execute
from pgqueue.dead import Filter, discard, replay
from pgqueue.finish import complete, drop
from pgqueue.job import Completed
from pgqueue.worker import Worker
from tests.factories import Holder, scope, token
from tests.server import Connection
from tests.waiting import eventually

Start = Callable[..., Worker]
SOON = Backoff(base=0.01, cap=0.05)

#: The one that dies may do so after the others are counted.
ALL_BUT_ONE = "SELECT unfinished, (SELECT count(*) FROM pgqueue.dead_job) FROM pgqueue.batch_status"

app = App()
RAN: list[tuple[str, Any]] = []
MENDED = threading.Event()


@app.job("part", backoff=SOON)
def part(n: int, job: Job) -> None:
    if n == 13 and not MENDED.is_set():
        raise Permanent("13")
    RAN.append(("part", n))


@app.job("merge")
def merge(what: str) -> None:
    RAN.append(("merge", what))


@app.job("split", transactional=True)
def split(parts: int, own: psycopg.Connection, job: Job) -> None:
    app.batch(own, [part.with_payload(n) for n in range(parts)], then=merge.with_payload("split"))


@pytest.fixture(autouse=True)
def clean() -> None:
    RAN.clear()
    MENDED.clear()


@pytest.fixture
def start(dsn: str) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(**settings: Any) -> Worker:
            worker = Worker(app, dsn, WorkerSettings(**{"visibility": 60.0, "grace": 5.0, **settings}))
            worker.start()
            stack.callback(worker.stop)
            return worker

        yield begin


def seen(conn: Connection, query: str) -> list[tuple[Any, ...]]:
    with conn.cursor(row_factory=tuple_row) as cursor:
        rows = cursor.execute(query.encode()).fetchall()
    conn.rollback()
    return rows


def merges(conn: Connection) -> int:
    return int(seen(conn, "SELECT count(*) FROM pgqueue.job WHERE name = 'merge'")[0][0])


def members(conn: Connection, n: int) -> int:
    """Enqueue a batch of n and commit it; return its id."""
    ref = app.batch(conn, [part.with_payload(i) for i in range(n)], then=merge.with_payload("all"))
    conn.commit()
    assert len(ref.jobs) == n
    return ref.id


def test_the_completion_job_runs_once_when_all_members_are_done(conn: Connection, start: Start) -> None:
    MENDED.set()
    start()
    start()
    batch_id = members(conn, 200)
    eventually(lambda: ("merge", "all") in RAN, timeout=20)
    assert RAN[-1] == ("merge", "all")
    assert sorted(n for name, n in RAN if name == "part") == list(range(200))
    status = app.batch_status(conn, batch_id)
    assert status is not None
    assert (status.size, status.done, status.unfinished) == (200, 200, 0)


def test_a_batch_and_its_members_roll_back_together(conn: Connection) -> None:
    app.batch(conn, [part.with_payload(1)], then=merge.with_payload("all"))
    conn.rollback()
    assert seen(conn, "SELECT count(*) FROM pgqueue.job") == [(0,)]
    assert seen(conn, "SELECT count(*) FROM pgqueue.batch") == [(0,)]


def test_a_handle_that_would_commit_at_once_is_refused(dsn: str) -> None:
    with (
        psycopg.connect(dsn, autocommit=True) as handle,
        pytest.raises(NotInTransaction),
    ):
        app.batch(handle, [part.with_payload(1)])


def test_a_batch_without_members_completes_at_once(conn: Connection) -> None:
    ref = app.batch(conn, [], then=merge.with_payload("none"))
    assert ref.jobs == ()
    conn.commit()
    assert merges(conn) == 1
    status = app.batch_status(conn, ref)
    assert status is not None
    assert (status.size, status.unfinished, status.job_id is None) == (0, 0, False)


def test_ids_come_back_in_the_order_of_the_steps(session: Session) -> None:
    steps = [part.with_payload(1), merge.with_payload("m"), part.using(key="k").with_payload(2)]
    ref = app.batch(session, steps)
    session.commit()
    connection = session.connection()
    rows = connection.exec_driver_sql(
        "SELECT id, name, payload::text FROM pgqueue.job ORDER BY id"
    ).fetchall()
    assert [tuple(r) for r in rows] == [
        (ref.jobs[0], "part", "1"),
        (ref.jobs[1], "merge", '"m"'),
        (ref.jobs[2], "part", "2"),
    ]


def test_members_end_without_waiting_for_each_other(conn: Connection, dsn: str) -> None:
    """A shared counter row in the acknowledgement would make the second one wait for the first transaction."""
    members(conn, 2)
    with Holder(dsn, 1) as a, Holder(dsn, 2) as b:
        (one,), (two,) = a.claim(1, of=scope(names=["part"])), b.claim(1, of=scope(names=["part"]))
        a.begin()
        assert a.run(complete([(token(one), Completed(batched=True))])) == [one.id]
        b.connection.execute("SET lock_timeout = '10s'")
        assert b.run(complete([(token(two), Completed(batched=True))])) == [two.id]
        b.run(fold())
        assert merges(conn) == 0
        a.commit()
        a.run(fold())
        assert merges(conn) == 1
        a.run(fold())
        b.run(fold())
        assert merges(conn) == 1


def test_of_two_folders_at_once_the_later_one_sees_what_both_have(conn: Connection, dsn: str) -> None:
    """absurd 0.0.7: a wake-up was lost between the check and the wait; here the last member."""
    batch_id = members(conn, 2)
    with Holder(dsn, 1) as a, Holder(dsn, 2) as b:
        (one,), (two,) = a.claim(1, of=scope(names=["part"])), b.claim(1, of=scope(names=["part"]))
        a.run(complete([(token(one), Completed())]))
        a.begin()
        a.run(fold())  # counts one, and holds the batch
        b.run(complete([(token(two), Completed())]))
        found: list[list[int]] = []
        other = threading.Thread(target=lambda: found.append(b.run(fold())))
        other.start()
        pid = b.connection.info.backend_pid
        waits = f"SELECT FROM pg_stat_activity WHERE pid = {pid} AND wait_event_type = 'Lock'"
        eventually(lambda: seen(conn, waits))
        a.commit()
        other.join(60)
        assert found == [[batch_id]]
    assert merges(conn) == 1


def test_a_fold_that_is_rolled_back_counts_nothing_twice(conn: Connection, dsn: str) -> None:
    batch_id = members(conn, 1)
    with Holder(dsn) as holder:
        (job,) = holder.claim(of=scope(names=["part"]))
        holder.run(complete([(token(job), Completed())]))
        holder.begin()
        assert holder.run(fold()) == [batch_id]
        holder.rollback()
        assert merges(conn) == 0
        assert holder.run(fold()) == [batch_id]
    assert merges(conn) == 1


def test_a_dead_member_holds_the_batch_until_it_is_replayed(conn: Connection, start: Start) -> None:
    batch_id = members(conn, 20)
    start()
    eventually(lambda: seen(conn, ALL_BUT_ONE) == [(1, 1)])
    assert merges(conn) == 0
    MENDED.set()
    execute(conn, replay(Filter(name="part")))
    conn.commit()
    eventually(lambda: ("merge", "all") in RAN)
    status = app.batch_status(conn, batch_id)
    assert status is not None
    assert (status.size, status.done, status.gone, status.unfinished) == (20, 20, 0, 0)


def test_a_dead_member_that_is_discarded_has_ended(conn: Connection, start: Start) -> None:
    batch_id = members(conn, 20)
    start()
    eventually(lambda: seen(conn, ALL_BUT_ONE) == [(1, 1)])
    execute(conn, discard(Filter(name="part")))
    conn.commit()
    eventually(lambda: ("merge", "all") in RAN)
    status = app.batch_status(conn, batch_id)
    assert status is not None
    assert (status.done, status.gone) == (19, 1)


@pytest.mark.parametrize("running", [False, True])
def test_a_cancelled_member_has_ended(conn: Connection, dsn: str, *, running: bool) -> None:
    members(conn, 2)
    with Holder(dsn) as holder:
        one, two = holder.claim(of=scope(names=["part"])) if running else (None, None)
        if one and two:
            assert holder.run(drop([token(one)])) == [one.id]
            assert holder.run(complete([(token(two), Completed())])) == [two.id]
        else:
            execute(conn, cancel([1, 2]))
            conn.commit()
        holder.run(fold())
    assert merges(conn) == 1
    assert seen(conn, "SELECT done, gone FROM pgqueue.batch_status") == [(1, 1) if running else (0, 2)]


def test_a_handler_splits_its_work_in_the_transaction_of_its_own_end(conn: Connection, start: Start) -> None:
    split.enqueue(conn, 12)
    conn.commit()
    start()
    eventually(lambda: ("merge", "split") in RAN)
    assert sorted(RAN)[1:] == [("part", n) for n in range(12)]


def test_a_batch_whose_last_worker_died_right_after_its_ack_is_completed_by_another(
    conn: Connection, dsn: str, start: Start
) -> None:
    """procrastinate 1518: what a dead worker was to do next stayed undone."""
    members(conn, 1)
    with Holder(dsn) as holder:
        (job,) = holder.claim(of=scope(names=["part"]))
        holder.run(complete([(token(job), Completed(batched=True))]))
    start()
    eventually(lambda: ("merge", "all") in RAN)


def test_sql_enqueues_batches_and_chains_as_python_does(conn: Connection, start: Start) -> None:
    rows = conn.execute(
        """SELECT job FROM pgqueue.enqueue_batch(
             '[{"name": "part", "payloads": [1, 2], "then": [{"name": "merge", "payloads": ["after each"]}]}]',
             '{"name": "merge", "payloads": ["after all"]}')"""
    ).fetchall()
    assert len(rows) == 3
    conn.execute(
        """SELECT pgqueue.enqueue('part', '3', headers =>
             '{"pgqueue": {"then": [{"name": "merge", "payloads": ["x"]}]}}')"""
    )
    conn.commit()
    start()
    eventually(lambda: len(RAN) == 7)
    assert sorted(RAN) == sorted(
        [("part", n) for n in (1, 2, 3)]
        + [("merge", w) for w in ("after each", "after each", "after all", "x")]
    )


def test_many_batches_on_many_connections_each_complete_once(conn: Connection, dsn: str) -> None:
    """Eight connections end members of forty batches and fold at once: no deadlock, no batch missed or doubled."""
    for _ in range(40):
        members(conn, 10)
    failures: list[psycopg.Error] = []

    def work(nonce: int) -> None:
        try:
            with Holder(dsn, nonce) as holder:
                while jobs := holder.claim(7, of=scope(names=["part"])):
                    while jobs:  # a claim of somebody else may hold a lock on one for a moment
                        done = holder.run(complete([(token(job), Completed(batched=True)) for job in jobs]))
                        jobs = [job for job in jobs if job.id not in done]
                    holder.run(fold())
        except psycopg.Error as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert merges(conn) == 40
    assert seen(conn, "SELECT count(*) FROM pgqueue.batch WHERE completed_at IS NULL") == [(0,)]


def test_batches_that_completed_long_ago_are_pruned(conn: Connection) -> None:
    app.batch(conn, [])
    app.batch(conn, [])
    app.batch(conn, [part.with_payload(1)])
    conn.execute("UPDATE pgqueue.batch SET completed_at = now() - interval '8 days' WHERE id = 1")
    execute(conn, prune())
    conn.commit()
    assert seen(conn, "SELECT id FROM pgqueue.batch ORDER BY 1") == [(2,), (3,)]


def test_a_full_queue_refuses_a_batch_as_a_whole_and_leaves_the_transaction_usable(conn: Connection) -> None:
    conn.execute("INSERT INTO pgqueue.queue (name, max_depth) VALUES ('slow', 1)")
    conn.execute("INSERT INTO pgqueue.depth_sample VALUES ('slow', clock_timestamp(), 9, 0, 0, 0, 0, false)")
    steps = [part.with_payload(1), part.using(queue="slow").with_payload(2)]
    with pytest.raises(QueueFull, match="queue 'slow' is full"):
        app.batch(conn, steps, merge.with_payload("all"))
    assert len(app.batch(conn, steps[:1]).jobs) == 1
    conn.commit()
    assert seen(conn, "SELECT count(*) FROM pgqueue.job") == [(1,)]
    with pytest.raises(pg.ConfigurationLimitExceeded, match="queue slow is full"):
        conn.execute(
            """SELECT pgqueue.enqueue_batch('[{"name": "part", "payloads": [1], "queue": "slow"}]')"""
        )


def test_a_step_of_sql_that_makes_no_sense_is_refused(conn: Connection) -> None:
    with pytest.raises(pg.InvalidParameterValue, match="a job needs a name"):
        conn.execute("""SELECT * FROM pgqueue.enqueue_batch('[{"payloads": [1]}]')""")


def test_a_completion_that_cannot_be_enqueued_holds_up_its_own_batch_alone(
    conn: Connection, dsn: str
) -> None:
    """Its type got a limit meanwhile, which takes no ordering key; it completes when that is lifted."""
    steps = [part.with_payload(1)]
    broken = app.batch(conn, steps, then=merge.using(key="k").with_payload("broken"))
    sound = app.batch(conn, steps, then=part.with_payload(2))
    conn.execute("INSERT INTO pgqueue.job_type (name, queue, slots) VALUES ('merge', 'default', 3)")
    conn.commit()
    with Holder(dsn) as holder:
        jobs = holder.claim(of=scope(names=["part"]))
        holder.run(complete([(token(job), Completed(batched=True)) for job in jobs]))
        assert holder.run(fold()) == [sound.id]
        status = app.batch_status(conn, broken)
        assert status is not None
        assert (status.unfinished, status.job_id) == (0, None)
        assert "so it takes no ordering key" in str(status.problem)
        assert holder.run(fold()) == []
        conn.execute("UPDATE pgqueue.job_type SET slots = NULL")
        conn.execute("UPDATE pgqueue.batch SET retry_at = now() WHERE retry_at IS NOT NULL")
        conn.commit()
        assert holder.run(fold()) == [broken.id]
        status = app.batch_status(conn, broken)
        assert status is not None
        assert (status.job_id is not None, status.problem) == (True, None)
        conn.rollback()
        assert holder.run(fold()) == []
    assert merges(conn) == 1


@pytest.mark.parametrize(
    ("completion", "why"),
    [
        ('{"payloads": [1]}', "a job needs a name"),
        ('{"name": "  ", "payloads": [1]}', "a job needs a name"),
        ('{"name": "merge"}', "payloads of the completion must be a JSON array"),
        ('{"name": "merge", "payloads": [1], "queue": " "}', "queue is blank"),
        ('{"name": "merge", "payloads": [1], "priority": 10}', "priority is 10"),
        ('{"name": "merge", "payloads": [1], "keys": []}', "one key for each payload"),
        ('{"name": "merge", "payloads": [1], "keys": [" "]}', "one key for each payload"),
        ('{"name": "limited", "payloads": [1], "keys": ["k"]}', "takes no ordering key"),
    ],
)
def test_a_completion_that_makes_no_sense_is_refused_with_the_batch(
    conn: Connection, completion: str, why: str
) -> None:
    conn.execute("INSERT INTO pgqueue.job_type (name, queue, slots) VALUES ('limited', 'default', 1)")
    with pytest.raises(pg.InvalidParameterValue, match=why):
        conn.execute(
            'SELECT pgqueue.enqueue_batch(\'[{"name": "part", "payloads": [1]}]\', %s)', (completion,)
        )


def test_a_completion_with_keys_for_its_payloads_is_let_in(conn: Connection) -> None:
    conn.execute(
        """SELECT pgqueue.enqueue_batch('[{"name": "part", "payloads": [1]}]', '{"name": "merge",
             "payloads": ["a", "b"], "keys": ["k", null], "idempotency_keys": null, "delay": 1}')"""
    )
    assert seen(conn, "SELECT count(*) FROM pgqueue.job") == [(1,)]
