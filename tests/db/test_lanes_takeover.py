"""Lanes that change hands: whatever meets on one, no job is lost, run twice at once, or overtaken."""

from __future__ import annotations

import psycopg
import pytest

from pgqueue.finish import Failed, ack, release, retry
from pgqueue.heartbeat import register
from tests.factories import (
    QUEUE,
    Connection,
    Holder,
    enqueue,
    ids,
    lose,
    retried,
    row,
    scope,
    token,
    wipe,
)

#: Every test of lanes runs with both forms of their claim (see conftest).
BOTH_CLAIMS = True


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


def lanes(conn: Connection) -> list[tuple[str, str, int]]:
    """Return (queue, key, lease) of every lane."""
    found = conn.execute("SELECT queue, key, lease FROM pgqueue.lane ORDER BY queue, key, slot").fetchall()
    conn.commit()
    return [(str(q), str(k), int(lease)) for q, k, lease in found]


def test_a_lane_that_is_not_mine_is_not_given_back(conn: Connection, a: Holder, b: Holder) -> None:
    """rails/solid_queue PR#761: the late holder released the slot of the next one."""
    enqueue(conn, 2, key="k")
    conn.commit()
    (job,) = a.lanes()
    b.give_back((QUEUE, "k"), job.lease + 1)
    assert lanes(conn) == [(QUEUE, "k", job.lease)]


@pytest.mark.parametrize("routed_first", [True, False])
def test_a_router_and_a_release_that_meet_lose_no_job(
    conn: Connection, dsn: str, a: Holder, b: Holder, routed_first: bool
) -> None:
    """Judged in one statement, "no job left" stands on a snapshot older than the router's pin."""
    enqueue(conn, key="k")
    conn.commit()
    jobs = a.lanes()
    a.run(ack(jobs))
    with psycopg.connect(dsn) as producer:
        (fresh,) = enqueue(producer, key="k")
        if routed_first:
            producer.commit()
            b.begin()
            b.route()
            a.give_back((QUEUE, "k"), jobs[0].lease)
            b.commit()
        else:
            a.begin()
            a.give_back((QUEUE, "k"), jobs[0].lease)
            producer.commit()
            b.connection.execute("SET lock_timeout = '100ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                b.route()  # it waits for the deletion instead of trusting the lane
            a.commit()
            b.connection.execute("RESET lock_timeout")
            assert lanes(conn) == []
            b.route()
    assert [key for _, key, _ in lanes(conn)] == ["k"]
    assert ids(b.lanes(routing=False)) == [fresh]


@pytest.mark.parametrize("routed_first", [True, False])
def test_a_router_locks_no_lane_at_rest_and_trusts_none_that_is_being_deleted(
    conn: Connection, a: Holder, b: Holder, routed_first: bool
) -> None:
    """Nobody has touched the lane since it was made: who deletes it looks for jobs after he has locked it."""
    (gone,) = enqueue(conn, key="k")
    conn.commit()
    b.route()
    conn.execute("DELETE FROM pgqueue.job WHERE id = %s", [gone])
    conn.commit()
    if routed_first:
        (fresh,) = enqueue(conn, key="k")
        conn.commit()
        b.begin()
        b.route()
        locked = conn.execute("SELECT FROM pgqueue.lane WHERE xmax <> 0").fetchall()
        conn.rollback()
        assert locked == []
        assert ids(a.lanes(routing=False)) == [fresh]
        b.commit()
        return
    a.begin()
    assert a.lanes(routing=False) == []  # no job: it goes with this transaction
    (fresh,) = enqueue(conn, key="k")
    conn.commit()
    b.connection.execute("SET lock_timeout = '100ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        b.route()
    a.commit()
    b.connection.execute("RESET lock_timeout")
    assert ids(b.lanes()) == [fresh]


def test_a_lane_whose_lease_ran_out_is_taken_over_and_the_zombie_changes_nothing(
    conn: Connection, a: Holder, b: Holder
) -> None:
    """dbos-inc/dbos-transact-py#805: a recovered job kept its slot, and its key stood still."""
    made = enqueue(conn, 6, key="k")
    conn.commit()
    stale = a.lanes(depth=4)
    lose(conn, ids(stale))
    conn.commit()
    (head,) = b.lanes(depth=4)  # one at a time until the suspect is through
    assert head.id == made[0]
    before = row(conn, head.id)
    assert a.run(ack(stale)) == []
    assert a.run(retry([Failed(claim=token(job), outcome=retried()) for job in stale], "a")) == []
    assert a.run(release(stale)) == []
    a.give_back((QUEUE, "k"), stale[0].lease)
    assert row(conn, head.id) == before
    assert before
    assert (before["lost"], before["attempt"]) == (1, 2)
    assert [row(conn, job_id)["lost"] for job_id in made[1:]] == [0] * 5  # type: ignore[index]
    b.run(ack([head]))
    b.give_back((QUEUE, "k"), head.lease)
    assert ids(a.lanes(depth=4)) == made[1:5]


def test_the_attempt_that_a_takeover_ends_is_logged(conn: Connection, a: Holder, b: Holder) -> None:
    a.run(
        register(
            nonce=1, host="shop-7", pid=9, version="1", queues=["default"], names=["work"], concurrency=1
        )
    )
    made = enqueue(conn, 3, key="k")
    conn.commit()
    stale = a.lanes(depth=2)
    lose(conn, ids(stale))
    conn.commit()
    b.lanes()
    logged = conn.execute(
        "SELECT job_id, attempt, outcome, lease, worker, started_at <= at FROM pgqueue.attempt_log ORDER BY 1"
    ).fetchall()
    assert logged == [(made[0], 1, "lost", stale[0].lease, "shop-7:9", True)]


def test_a_stamp_that_is_locked_leaves_the_lane_for_the_next_round(
    conn: Connection, a: Holder, b: Holder
) -> None:
    """The zombie's acknowledgement is under way: whether it counts is not known yet."""
    made = enqueue(conn, 3, key="k")
    conn.commit()
    stale = a.lanes(depth=2)
    lose(conn, ids(stale))
    conn.commit()
    a.begin()
    a.run(ack(stale[:1]))
    assert b.lanes() == []
    a.commit()
    assert ids(b.lanes()) == [made[1]]


def test_a_stamp_that_no_lane_stands_for_is_a_lost_attempt(conn: Connection, a: Holder, b: Holder) -> None:
    """Its worker gave the lane back and never wrote the job off: nobody else would ever take it."""
    made = enqueue(conn, 3, key="k")
    conn.commit()
    (head,) = a.lanes()
    a.give_back((QUEUE, "k"), head.lease)
    assert b.lanes() == []  # it may still come back, and nobody overtakes it
    lose(conn, made)
    assert b.lanes() == []  # not by passing its locked row either
    conn.commit()
    jobs = b.lanes(depth=3)
    assert ids(jobs) == [head.id]
    assert (row(conn, head.id) or {})["lost"] == 1
    log = conn.execute("SELECT job_id, outcome, lease FROM pgqueue.attempt_log").fetchall()
    assert log == [(head.id, "lost", head.lease)]
    b.run(ack(jobs))
    b.give_back((QUEUE, "k"), jobs[0].lease)
    assert ids(b.lanes(depth=3)) == made[1:]


def test_a_stamp_in_the_middle_of_a_key_is_not_overtaken(conn: Connection, a: Holder, b: Holder) -> None:
    made = enqueue(conn, 3, key="k")
    conn.commit()
    jobs = a.lanes(depth=2)
    a.run(release(jobs[:1]))
    a.give_back((QUEUE, "k"), jobs[0].lease)
    again = b.lanes(depth=3)
    assert ids(again) == made[:1]
    b.run(ack(again))
    b.give_back((QUEUE, "k"), again[0].lease)
    assert b.lanes(depth=3) == []
    lose(conn, made)
    conn.commit()
    assert ids(b.lanes(depth=3)) == made[1:2]


def test_a_row_that_somebody_locked_is_not_overtaken(conn: Connection, a: Holder) -> None:
    made = enqueue(conn, 4, key="k")
    conn.commit()
    conn.execute("UPDATE pgqueue.job SET headers = '{}' WHERE id = %s", [made[1]])
    jobs = a.lanes(depth=4)
    assert ids(jobs) == made[:1]
    a.run(ack(jobs))
    a.give_back((QUEUE, "k"), jobs[0].lease)
    assert a.lanes(depth=4) == []
    conn.rollback()
    assert ids(a.lanes(depth=4)) == made[1:]


def test_a_head_of_another_name_is_not_overtaken(conn: Connection, a: Holder, b: Holder) -> None:
    enqueue(conn, key="k")
    (foreign,) = enqueue(conn, key="k", name="else")
    enqueue(conn, key="k")
    conn.commit()
    jobs = a.lanes(depth=5)
    assert len(jobs) == 1
    a.run(ack(jobs))
    a.give_back((QUEUE, "k"), jobs[0].lease)
    assert a.lanes(depth=5) == []
    assert ids(b.lanes(depth=5, of=scope(names=("else",)))) == [foreign]


def test_rolled_back_claims_of_lanes_leave_them_as_they_were(conn: Connection, a: Holder, b: Holder) -> None:
    """procrastinate-org/procrastinate#231: a fetch held open let another one in."""
    made = enqueue(conn, 2, key="k")
    conn.commit()
    a.begin()
    assert ids(a.lanes()) == made[:1]
    assert b.lanes(routing=False) == []
    a.rollback()
    assert ids(b.lanes()) == made[:1]
