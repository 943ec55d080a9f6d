"""Heartbeats extend what this process holds, and nothing else."""

from __future__ import annotations

from datetime import timedelta

import pytest

from pgqueue.finish import ack
from pgqueue.heartbeat import beat, heartbeat, lane_heartbeat, register, signals, unregister
from pgqueue.job import Claimed
from tests.factories import QUEUE, Connection, Holder, enqueue, lose, row, token, wipe

VISIBILITY = timedelta(seconds=30)


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


def left(conn: Connection, job_id: int) -> float:
    """Return the seconds until a job's deadline."""
    found = conn.execute(
        "SELECT extract(epoch FROM deadline - clock_timestamp()) FROM pgqueue.job WHERE id = %s", [job_id]
    ).fetchone()
    conn.commit()
    assert found
    return float(found[0])


def version(conn: Connection, job_id: int) -> object:
    """Return where the row's current version stands."""
    found = conn.execute("SELECT ctid::text, xmin::text FROM pgqueue.job WHERE id = %s", [job_id]).fetchone()
    conn.commit()
    return found


def age(conn: Connection, job_id: int, seconds: int, remaining: int) -> None:
    """Make a claim so old, with so many seconds of its lease left."""
    conn.execute(
        "UPDATE pgqueue.job SET claimed_at = clock_timestamp() - %s * interval '1 s',"
        " deadline = clock_timestamp() + %s * interval '1 s' WHERE id = %s",
        [seconds, remaining, job_id],
    )
    conn.commit()


def held(conn: Connection, a: Holder, n: int = 1) -> list[Claimed]:
    enqueue(conn, n)
    conn.commit()
    return a.claim(visibility=VISIBILITY)


def test_a_lease_with_more_than_half_left_is_not_written(conn: Connection, a: Holder) -> None:
    (job,) = held(conn, a)
    before = version(conn, job.id)
    assert a.run(heartbeat([token(job)], VISIBILITY)) == [job.id]
    assert version(conn, job.id) == before


def test_a_lease_with_less_than_half_left_is_extended_from_now(conn: Connection, a: Holder) -> None:
    (job,) = held(conn, a)
    age(conn, job.id, seconds=20, remaining=14)
    assert a.run(heartbeat([token(job)], VISIBILITY)) == [job.id]
    assert 18 < left(conn, job.id) <= 30


@pytest.mark.parametrize(
    ("seconds", "lease"), [(10, 30), (120, 30), (240, 60), (1000, 250), (7200, 300), (90_000, 300)]
)
def test_the_lease_grows_with_the_age_of_the_job_to_five_minutes(
    conn: Connection, a: Holder, seconds: int, lease: int
) -> None:
    (job,) = held(conn, a)
    age(conn, job.id, seconds=seconds, remaining=1)
    a.run(heartbeat([token(job)], VISIBILITY))
    assert lease - 12 < left(conn, job.id) <= lease + 3


def test_a_heartbeat_after_the_ack_brings_no_job_back(conn: Connection, a: Holder) -> None:
    (job,) = held(conn, a)
    a.run(ack([job]))
    assert a.run(heartbeat([token(job)], VISIBILITY)) == []
    assert row(conn, job.id) is None


def test_a_heartbeat_after_the_job_was_taken_over_neither_extends_nor_takes_it_back(
    conn: Connection, a: Holder, b: Holder
) -> None:
    (job,) = held(conn, a)
    lose(conn, [job.id])
    conn.commit()
    (taken,) = b.suspects()
    age(conn, job.id, seconds=20, remaining=3)
    assert a.run(heartbeat([token(job)], VISIBILITY)) == []
    assert left(conn, job.id) <= 3
    assert row(conn, job.id)["lease"] == taken.lease  # type: ignore[index]


def test_a_heartbeat_that_comes_late_but_first_keeps_the_job(conn: Connection, a: Holder, b: Holder) -> None:
    (job,) = held(conn, a)
    lose(conn, [job.id])
    conn.commit()
    assert a.run(heartbeat([token(job)], VISIBILITY)) == [job.id]
    assert b.suspects() == []
    assert a.run(ack([job])) is None


def test_a_row_locked_by_somebody_else_is_passed_and_not_taken_for_lost(conn: Connection, a: Holder) -> None:
    jobs = held(conn, a, 500)
    conn.execute("UPDATE pgqueue.job SET deadline = clock_timestamp() + interval '3 s'")
    conn.commit()
    conn.execute(
        "UPDATE pgqueue.job SET headers = '{}' WHERE id = %s", [jobs[2].id]
    )  # a transaction of the shop
    a.connection.execute("SET statement_timeout = '40s'")
    standing = a.run(heartbeat([token(job) for job in jobs], VISIBILITY))
    assert sorted(standing) == [job.id for job in jobs]
    conn.rollback()
    extended = conn.execute(
        "SELECT count(*) FROM pgqueue.job WHERE deadline > clock_timestamp() + interval '10 s'"
    ).fetchone()
    assert extended == (499,)


def test_a_lane_is_extended_by_its_holder_and_never_ends_before_its_jobs(
    conn: Connection, a: Holder, b: Holder
) -> None:
    enqueue(conn, 2, key="k")
    conn.commit()
    (job,) = a.lanes(visibility=VISIBILITY)
    age(conn, job.id, seconds=2000, remaining=1)
    a.run(heartbeat([token(job)], VISIBILITY))
    conn.execute("UPDATE pgqueue.lane SET deadline = clock_timestamp() + interval '1 s'")
    conn.commit()
    b.run(lane_heartbeat([(QUEUE, "k", 12345)], VISIBILITY))
    a.run(lane_heartbeat([(QUEUE, "k", job.lease)], VISIBILITY))
    found = conn.execute(
        "SELECT l.deadline >= j.deadline, l.lease FROM pgqueue.lane l, pgqueue.job j WHERE j.id = %s",
        [job.id],
    ).fetchone()
    assert found == (True, job.lease)


def test_cancel_requests_are_told_for_the_jobs_asked_about(conn: Connection, a: Holder) -> None:
    conn.execute("INSERT INTO pgqueue.job_signal (job_id) VALUES (1), (2)")
    conn.commit()
    assert a.run(signals([2, 3])) == [2]


def test_a_process_start_is_entered_once_and_taken_off(conn: Connection, a: Holder) -> None:
    entry = register(nonce=5, host="h", pid=1, version="1", queues=["q"], names=["n"], concurrency=2)
    assert a.run(entry) == 5
    assert a.run(entry) is None
    a.run(beat(5, 3, 2, draining=True))
    seen = conn.execute("SELECT in_flight, overrun, draining, alive FROM pgqueue.workers").fetchall()
    assert seen == [(3, 2, True, True)]
    a.run(unregister(5))
    conn.commit()
    assert conn.execute("SELECT count(*) FROM pgqueue.worker").fetchone() == (0,)
