"""Promote: a delayed job gets a place in the queue when its time has come, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from pgqueue.finish import Failed, retry
from pgqueue.promote import Promoted, notify, promote
from pgqueue.pulse import LONG_AGO
from tests.factories import Connection, Holder, enqueue, fall_due, ids, retried, row, token, wipe

HOUR = timedelta(hours=1)
PERIOD = timedelta(seconds=0.25)


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


@pytest.fixture
def a(dsn: str, conn: Connection) -> Iterator[Holder]:
    conn.execute("SELECT setval('pgqueue.turn_promote', 0)")
    conn.commit()
    with Holder(dsn, 1) as holder:
        yield holder


def now(holder: Holder, floor: datetime = LONG_AGO) -> Promoted:
    """Promote out of turn."""
    return holder.run(promote(floor, timedelta(0)))


def test_due_jobs_get_a_place_in_the_order_of_their_times(conn: Connection, a: Holder) -> None:
    (waiting,) = enqueue(conn)
    late, early = enqueue(conn, 2, delay=HOUR)
    conn.execute("UPDATE pgqueue.job SET run_at = clock_timestamp() - interval '1 s' WHERE id = %s", [late])
    conn.execute("UPDATE pgqueue.job SET run_at = clock_timestamp() - interval '9 s' WHERE id = %s", [early])
    conn.commit()
    assert ids(a.claim(1)) == [waiting]
    promoted = now(a)
    assert (promoted.count, promoted.queues) == (2, ["default"])
    assert ids(a.claim()) == [early, late]


def test_a_promoted_job_is_ready_since_its_time_and_not_since_its_enqueue(
    conn: Connection, a: Holder
) -> None:
    (job_id,) = enqueue(conn, delay=HOUR)
    fall_due(conn, [job_id])
    conn.commit()
    before = row(conn, job_id)
    now(a)
    after = row(conn, job_id)
    assert before
    assert after
    assert (after["run_at"], after["ready_at"]) == (None, before["run_at"])
    assert after["pos"] is not None


def test_a_job_that_is_not_due_waits(conn: Connection, a: Holder) -> None:
    (job_id,) = enqueue(conn, delay=HOUR)
    conn.commit()
    before = row(conn, job_id)
    assert now(a) == Promoted(count=0, latest=None, queues=[])
    assert row(conn, job_id) == before
    assert a.claim() == []


def test_nothing_is_looked_for_below_the_floor(conn: Connection, a: Holder) -> None:
    (job_id,) = enqueue(conn, delay=HOUR)
    fall_due(conn, [job_id])
    conn.commit()
    assert now(a, floor=datetime.now(UTC) + HOUR).count == 0
    assert now(a).count == 1


def test_a_locked_job_is_passed(conn: Connection, a: Holder) -> None:
    made = enqueue(conn, 3, delay=HOUR)
    fall_due(conn, made)
    conn.commit()
    conn.execute("UPDATE pgqueue.job SET headers = '{}' WHERE id = %s", [made[1]])
    a.connection.execute("SET statement_timeout = '60s'")
    assert now(a).count == 2
    conn.rollback()
    assert now(a).count == 1


def test_a_retried_job_comes_back_with_its_attempts(conn: Connection, a: Holder) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    (job,) = a.claim()
    a.run(retry([Failed(claim=token(job), outcome=retried(0.0))], "w"))
    assert now(a).count == 1
    (again,) = a.claim()
    assert (again.id, again.attempt) == (job_id, 2)


def test_a_thousand_go_at_a_time_and_the_rest_need_not_wait_for_the_next_turn(
    conn: Connection, a: Holder
) -> None:
    """One page per turn would be 4,000 a second in the whole database, however many jobs fall due at midnight."""
    made = enqueue(conn, 2_500, delay=HOUR)
    fall_due(conn, made)
    conn.commit()
    pages = [a.run(promote(LONG_AGO, PERIOD)).count for _ in range(3)]
    assert pages == [1000, 1000, 500]
    assert sorted(ids(a.claim(5000))) == made


def test_of_many_processes_one_promotes_in_a_period(conn: Connection, a: Holder, dsn: str) -> None:
    made = enqueue(conn, 10, delay=HOUR)
    fall_due(conn, made[:5])
    conn.commit()
    period = timedelta(seconds=60)
    assert a.run(promote(LONG_AGO, period)).count == 5
    fall_due(conn, made)
    conn.commit()
    with Holder(dsn, 2) as b:
        assert b.run(promote(LONG_AGO, period)).count == 0


def test_who_waits_for_promoted_jobs_is_told(conn: Connection, a: Holder) -> None:
    channel = conn.execute("SELECT 'pgqueue_' || pgqueue.bucket('default')").fetchone()
    assert channel
    conn.execute(f'LISTEN "{channel[0]}"'.encode())
    conn.commit()
    a.run(notify(["default", "default"]))
    told = list(conn.notifies(timeout=60, stop_after=1))
    assert [(note.channel, note.payload) for note in told] == [(channel[0], "")]
