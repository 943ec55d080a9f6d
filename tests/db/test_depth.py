"""Depth: every kind of row is counted in the state it is in, exactly and as sampled."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from pgqueue.depth import Depth, depth, gauge, sample
from pgqueue.finish import Failed, release, retry
from pgqueue.promote import promote
from pgqueue.pulse import LONG_AGO
from tests.factories import (
    QUEUE,
    Connection,
    Holder,
    enqueue,
    fall_due,
    ids,
    lose,
    retried,
    scope,
    token,
    wipe,
)

HOUR = timedelta(hours=1)
STATES = ("ready", "delayed", "in_flight", "blocked")


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


@pytest.fixture
def a(dsn: str, conn: Connection) -> Iterator[Holder]:
    conn.execute("SELECT setval('pgqueue.turn_promote', 0)")
    conn.commit()
    with Holder(dsn, 1) as holder:
        yield holder


def exact(holder: Holder, queue: str = QUEUE) -> Depth | None:
    """Count one queue exactly; check that the state of each job by itself gives the same sum."""
    found = {d.queue: d for d in holder.run(depth())}.get(queue)
    sums = dict(
        holder.connection.execute(
            "SELECT pgqueue.job_state(j.id), count(*) FROM pgqueue.job j WHERE j.queue = %s GROUP BY 1",
            [queue],
        ).fetchall()
    )
    assert {state: sums.get(state, 0) for state in STATES} == {
        state: getattr(found, state) if found else 0 for state in STATES
    }
    return found


def sampled(holder: Holder, queue: str = QUEUE) -> Depth:
    """Sample one queue now and read its gauge."""
    holder.connection.execute("DELETE FROM pgqueue.depth_sample")
    holder.begin()
    holder.run(sample([queue]))
    holder.commit()
    (found,) = holder.run(gauge([queue]))
    return found


def counts(found: Depth | None) -> tuple[int, int, int, int]:
    assert found
    return found.ready, found.delayed, found.in_flight, found.blocked


def age(conn: Connection, jobs: list[int], seconds: int) -> None:
    """Let jobs have been enqueued so long ago."""
    conn.execute(
        "UPDATE pgqueue.job SET enqueued_at = now() - %s * interval '1 s' WHERE id = ANY (%s)",
        [seconds, jobs],
    )
    conn.commit()


def test_each_state_of_unkeyed_jobs(conn: Connection, a: Holder) -> None:
    made = enqueue(conn, 10)
    delayed = enqueue(conn, 2, delay=HOUR)
    due = enqueue(conn, 1, delay=HOUR)
    fall_due(conn, due)
    conn.commit()
    assert delayed
    held = a.claim(4)
    lose(conn, ids(held)[:1])
    conn.commit()
    a.run(release(held[1:2]))
    # 6 never claimed, 1 released, 1 expired, 1 due; 2 delayed; 2 in flight
    assert len(made) == 10
    assert counts(exact(a)) == counts(sampled(a)) == (9, 2, 2, 0)


def test_of_a_key_the_head_is_ready_and_the_rest_is_blocked(conn: Connection, a: Holder) -> None:
    enqueue(conn, 3, key="k")
    enqueue(conn, 2, key="l")
    conn.commit()
    a.route()
    assert counts(exact(a)) == counts(sampled(a)) == (2, 0, 0, 3)
    a.lanes(1)
    assert counts(exact(a)) == counts(sampled(a)) == (1, 0, 1, 3)


def test_a_head_that_waits_out_its_backoff_is_delayed_and_the_rest_blocked(
    conn: Connection, a: Holder
) -> None:
    enqueue(conn, 3, key="k")
    conn.commit()
    (head,) = a.lanes()
    a.run(retry([Failed(claim=token(head), outcome=retried(60.0))], "a"))
    a.give_back((QUEUE, "k"), head.lease, wait=60.0)
    assert counts(exact(a)) == counts(sampled(a)) == (0, 1, 0, 2)


def test_a_delayed_keyed_job_is_delayed_and_no_head(conn: Connection, a: Holder) -> None:
    enqueue(conn, key="k", delay=HOUR)
    enqueue(conn, key="k")
    conn.commit()
    a.route()
    assert counts(exact(a)) == counts(sampled(a)) == (1, 1, 0, 0)


def test_of_a_limited_type_as_many_are_ready_as_there_are_slots(conn: Connection, a: Holder) -> None:
    conn.execute("INSERT INTO pgqueue.job_type (name, slots) VALUES ('work', 3)")
    enqueue(conn, 5)
    conn.commit()
    a.route()
    assert counts(exact(a)) == counts(sampled(a)) == (3, 0, 0, 2)


def test_what_is_paused_is_blocked(conn: Connection, a: Holder) -> None:
    enqueue(conn, 3)
    conn.execute("INSERT INTO pgqueue.queue (name, paused) VALUES (%s, true)", [QUEUE])
    conn.commit()
    assert counts(exact(a)) == counts(sampled(a)) == (0, 0, 0, 3)
    conn.execute("UPDATE pgqueue.queue SET paused = false")
    conn.execute("INSERT INTO pgqueue.job_type (name, paused) VALUES ('work', true)")
    conn.commit()
    assert counts(exact(a)) == (0, 0, 0, 3)


def test_age_counts_from_the_moment_a_job_could_run(conn: Connection, a: Holder) -> None:
    """Counted from the enqueue, each delayed or retried job raises a false alarm when it comes back."""
    (day,) = enqueue(conn, delay=HOUR)
    (failed,) = enqueue(conn)
    conn.commit()
    age(conn, [day, failed], 86_400)
    fall_due(conn, [day])  # a second ago
    conn.commit()
    (job,) = a.claim()
    a.run(retry([Failed(claim=token(job), outcome=retried(0.0))], "a"))
    for found in (exact(a), sampled(a)):
        assert found
        assert found.ready == 2
        assert 0 <= found.oldest_ready_s < 30
    assert a.run(promote(LONG_AGO, timedelta(0))).count == 2
    for found in (exact(a), sampled(a)):
        assert found
        assert 0 <= found.oldest_ready_s < 30


def test_an_expired_lease_counts_from_its_deadline(conn: Connection, a: Holder) -> None:
    made = enqueue(conn)
    conn.commit()
    age(conn, made, 3_600)
    a.claim()
    lose(conn, made)
    conn.commit()
    for found in (exact(a), sampled(a)):
        assert found
        assert (found.ready, found.in_flight) == (1, 0)
        assert 0 < found.oldest_ready_s < 30


def test_a_retried_head_of_a_key_counts_from_the_end_of_its_backoff(conn: Connection, a: Holder) -> None:
    made = enqueue(conn, key="k")
    conn.commit()
    age(conn, made, 3_600)
    (head,) = a.lanes()
    a.run(retry([Failed(claim=token(head), outcome=retried(0.0))], "a"))
    a.give_back((QUEUE, "k"), head.lease, wait=0.0)
    for found in (exact(a), sampled(a)):
        assert found
        assert found.ready == 1
        assert 0 <= found.oldest_ready_s < 30


def test_a_job_that_waits_is_as_old_as_its_wait(conn: Connection, a: Holder) -> None:
    made = enqueue(conn, 3)
    conn.commit()
    age(conn, made[1:2], 100)
    for found in (exact(a), sampled(a)):
        assert found
        assert 99 < found.oldest_ready_s < 130


def test_jobs_that_are_not_ready_have_no_age(conn: Connection, a: Holder) -> None:
    made = enqueue(conn, 2) + enqueue(conn, delay=HOUR)
    conn.commit()
    age(conn, made, 3_600)
    a.claim()
    for found in (exact(a), sampled(a)):
        assert found
        assert found.oldest_ready_s == 0


def test_queues_are_counted_apart_and_an_empty_one_is_sampled_as_nothing(conn: Connection, a: Holder) -> None:
    enqueue(conn, 2, queue="mail")
    enqueue(conn, 3, queue="pdf")
    conn.commit()
    assert counts(exact(a, "mail")) == counts(sampled(a, "mail")) == (2, 0, 0, 0)
    assert counts(exact(a, "pdf")) == counts(sampled(a, "pdf")) == (3, 0, 0, 0)
    assert exact(a, "empty") is None
    assert counts(sampled(a, "empty")) == (0, 0, 0, 0)
    assert a.claim(of=scope(queues=("empty",))) == []


def test_a_sample_is_taken_once_in_five_seconds_by_one_process(conn: Connection, a: Holder, dsn: str) -> None:
    enqueue(conn, 2)
    conn.commit()
    with Holder(dsn, 2) as b:
        a.begin()
        a.run(sample([QUEUE]))
        b.connection.execute("SET statement_timeout = '40s'")
        b.begin()
        b.run(sample([QUEUE]))  # somebody else is at it: neither waits nor counts
        b.commit()
        assert b.run(gauge()) == []
        a.commit()
        (first,) = b.run(gauge())
        assert (first.ready, first.capped) == (2, False)
        assert 0 <= first.age < 40
        enqueue(conn, 5)
        conn.execute("UPDATE pgqueue.depth_sample SET at = clock_timestamp() + interval '1 min'")
        conn.commit()
        b.begin()
        b.run(sample([QUEUE]))
        b.commit()
        assert b.run(gauge())[0].ready == 2
        conn.execute("UPDATE pgqueue.depth_sample SET at = clock_timestamp() - interval '6 s'")
        conn.commit()
        b.begin()
        b.run(sample([QUEUE]))
        b.commit()
        assert b.run(gauge())[0].ready == 7
