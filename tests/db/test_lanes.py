"""Lanes: the jobs of one ordering key run one at a time, oldest first."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest

from pgqueue.finish import Failed, ack, bury, release, retry, snooze
from pgqueue.lanes import lane_release
from pgqueue.promote import promote
from pgqueue.pulse import LONG_AGO
from tests.factories import (
    QUEUE,
    Connection,
    Holder,
    buried,
    enqueue,
    fall_due,
    ids,
    retried,
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


def test_a_keyed_job_is_no_fresh_job_and_an_unkeyed_one_has_no_lane(conn: Connection, a: Holder) -> None:
    (keyed,) = enqueue(conn, key="k")
    (plain,) = enqueue(conn)
    conn.commit()
    assert ids(a.lanes()) == [keyed]
    assert ids(a.claim()) == [plain]
    assert [(queue, key) for queue, key, _ in lanes(conn)] == [(QUEUE, "k")]


def test_one_job_of_a_key_is_in_flight_also_in_a_batch(conn: Connection, a: Holder, b: Holder) -> None:
    """graphile/worker#621, procrastinate-org/procrastinate#103: two of one named queue ran at once and lost writes."""
    made = enqueue(conn, 12, key="k")
    conn.commit()
    assert ids(a.lanes(500)) == made[:1]
    assert b.lanes(500) == []
    assert a.lanes(500) == []


def test_the_jobs_handed_out_of_one_lane_are_its_oldest_in_order(
    conn: Connection, a: Holder, b: Holder
) -> None:
    made = enqueue(conn, 12, key="k")
    conn.commit()
    jobs = a.lanes(500, depth=5)
    assert ids(jobs) == made[:5]
    assert {job.lease for job in jobs} == {jobs[0].lease}
    assert b.lanes(500, depth=5) == []
    a.run(ack(jobs))
    assert b.lanes(500, depth=5) == []  # the lane is still in hand
    a.give_back((QUEUE, "k"), jobs[0].lease)
    assert ids(b.lanes(500, depth=5)) == made[5:10]


@pytest.mark.parametrize("limited", [False, True])
def test_a_job_whose_attempts_are_at_the_highest_number_keeps_no_other_lane_from_being_claimed(
    conn: Connection, a: Holder, *, limited: bool
) -> None:
    if limited:
        conn.execute("INSERT INTO pgqueue.job_type (name, key_slots) VALUES ('work', 1)")
    (full,) = enqueue(conn, key="full")
    (other,) = enqueue(conn, key="other")
    conn.execute("UPDATE pgqueue.job SET attempt = 32767 WHERE id = %s", [full])
    conn.commit()
    assert [(job.id, job.attempt) for job in a.lanes()] == [(full, 32767), (other, 1)]


def test_a_claim_of_lanes_hands_out_no_more_jobs_than_asked_for(conn: Connection, a: Holder) -> None:
    for key in "abcd":
        enqueue(conn, 5, key=key)
    conn.commit()
    jobs = a.lanes(10, depth=3, total=7)
    assert len(jobs) == 7
    assert [sum(job.key == key for job in jobs) for key in "abcd"] == [3, 3, 1, 0]
    assert [key for _, key, lease in lanes(conn) if lease == 0] == ["d"]
    assert len(a.lanes(1, depth=9, total=9)) == 5


def test_lanes_come_by_priority_and_in_turn(conn: Connection, a: Holder) -> None:
    """timgit/pg-boss PR#871: the first keys took every fetch."""
    enqueue(conn, 2, key="late", priority=9)
    enqueue(conn, 2, key="first")
    enqueue(conn, 2, key="second")
    conn.commit()
    of = scope(priorities=range(10))
    (job,) = a.lanes(1, of=of)
    assert job.key == "first"
    a.run(ack([job]))
    a.give_back((QUEUE, "first"), job.lease)
    assert [a.lanes(1, of=of)[0].key for _ in range(3)] == ["second", "first", "late"]


def test_an_older_job_that_commits_late_runs_before_the_younger_ones_that_wait(
    conn: Connection, dsn: str, a: Holder
) -> None:
    """kamu-data/kamu-cli#1398: what committed late was passed, or came after its juniors."""
    with psycopg.connect(dsn) as late:
        (older,) = enqueue(late, key="k")
        (younger,) = enqueue(conn, key="k")
        conn.commit()
        a.route()
        late.commit()
        assert ids(a.lanes(depth=5)) == [older, younger]


def test_the_same_key_in_two_queues_is_two_lanes(conn: Connection, a: Holder, b: Holder) -> None:
    """A pdf job went to the mail worker when lanes were told apart by key alone."""
    (mail,) = enqueue(conn, key="k", queue="mail")
    (pdf,) = enqueue(conn, key="k", queue="pdf")
    conn.commit()
    assert ids(a.lanes(of=scope(queues=("mail",)))) == [mail]
    assert ids(b.lanes(of=scope(queues=("pdf",)))) == [pdf]


def test_a_lane_without_jobs_goes_and_comes_back_with_the_next_job(conn: Connection, a: Holder) -> None:
    enqueue(conn, key="k")
    conn.commit()
    jobs = a.lanes()
    a.run(ack(jobs))
    a.give_back((QUEUE, "k"), jobs[0].lease)
    assert lanes(conn) == []
    (again,) = enqueue(conn, key="k")
    conn.commit()
    assert ids(a.lanes()) == [again]


def test_a_retry_of_the_head_holds_its_lane_back_and_no_other(conn: Connection, a: Holder) -> None:
    """timgit/pg-boss PR#849: a blocked head starved all keys."""
    made = enqueue(conn, 3, key="k")
    (other,) = enqueue(conn, key="l")
    conn.commit()
    (head, second) = a.lanes(1, depth=2)
    a.run(release([second]))
    a.run(retry([Failed(claim=token(head), outcome=retried(60.0))], "a"))
    a.give_back((QUEUE, "k"), head.lease, wait=60.0)
    assert ids(a.lanes(depth=2)) == [other]
    conn.execute(
        "UPDATE pgqueue.lane SET wake_at = wake_at - interval '1 h', deadline = clock_timestamp() - interval '1 s' "
        "WHERE key = 'k'"
    )
    conn.commit()
    again = a.lanes(depth=3)
    assert ids(again) == made
    assert [job.attempt for job in again] == [2, 1, 1]


def test_a_snoozed_head_keeps_its_place(conn: Connection, a: Holder) -> None:
    made = enqueue(conn, 2, key="k")
    conn.commit()
    (head,) = a.lanes()
    a.run(snooze([head], [60.0]))
    a.give_back((QUEUE, "k"), head.lease, wait=60.0)
    assert a.lanes() == []
    conn.execute(
        "UPDATE pgqueue.lane SET wake_at = wake_at - interval '1 h', deadline = clock_timestamp() - interval '1 s'"
    )
    conn.commit()
    (again,) = a.lanes()
    assert (again.id, again.attempt) == (made[0], 1)


def test_a_buried_head_lets_the_next_one_run(conn: Connection, a: Holder) -> None:
    made = enqueue(conn, 2, key="k")
    conn.commit()
    (head,) = a.lanes()
    a.run(bury([Failed(claim=token(head), outcome=buried())], "a"))
    a.give_back((QUEUE, "k"), head.lease)
    assert ids(a.lanes()) == [made[1]]


def test_a_delayed_keyed_job_has_no_lane_until_it_is_due(conn: Connection, a: Holder) -> None:
    """A lane kept for delayed jobs was claimed empty a thousand times per second."""
    (later,) = enqueue(conn, key="k", delay=timedelta(hours=1))
    conn.commit()
    assert a.lanes() == []
    assert lanes(conn) == []
    (now,) = enqueue(conn, key="k")
    conn.commit()
    (job,) = a.lanes()
    assert job.id == now
    a.run(ack([job]))
    a.give_back((QUEUE, "k"), job.lease)
    assert lanes(conn) == []
    assert not a.answer(route_floors={QUEUE: job.pos}).keyed
    fall_due(conn, [later])
    conn.commit()
    assert a.run(promote(LONG_AGO, timedelta(0))).count == 1
    assert ids(a.lanes()) == [later]


def test_an_empty_lane_that_was_claimed_is_deleted(conn: Connection, a: Holder) -> None:
    (job_id,) = enqueue(conn, key="k")
    conn.commit()
    a.route()
    conn.execute("DELETE FROM pgqueue.job WHERE id = %s", [job_id])  # cancelled
    conn.commit()
    assert a.lanes() == []
    assert lanes(conn) == []


def test_slots_are_lanes_that_a_name_shares(conn: Connection, a: Holder, b: Holder) -> None:
    conn.execute("INSERT INTO pgqueue.job_type (name, slots) VALUES ('work', 3)")
    made = enqueue(conn, 8)
    conn.commit()
    first = a.lanes(2)
    second = b.lanes(10)
    assert (len(first), len(second)) == (2, 1)
    assert sorted(ids(first) + ids(second)) == made[:3]
    a.run(ack(first[:1]))
    a.run(lane_release([(QUEUE, "@work")], first[0].lease, 0.0))
    assert len(b.lanes(10)) == 2  # slots claimed under one lease are given back together
    assert a.lanes(10) == []


def test_a_failed_job_of_a_limited_type_waits_by_itself_and_gives_its_slot_to_the_next(
    conn: Connection, a: Holder
) -> None:
    """Its lane cannot wait in its place: another slot of the type would take it at once."""
    conn.execute("INSERT INTO pgqueue.job_type (name, slots) VALUES ('work', 2)")
    made = enqueue(conn, 4)
    conn.commit()
    failed, snoozed = a.lanes(2)
    a.run(retry([Failed(claim=token(failed), outcome=retried(60.0))], "a"))
    a.run(snooze([snoozed], [60.0]))
    a.run(lane_release([(QUEUE, "@work")], failed.lease, 0.0))
    assert ids(a.lanes(2)) == made[2:]
    fall_due(conn, made)
    conn.execute("DELETE FROM pgqueue.job WHERE lease <> 0")
    conn.execute("UPDATE pgqueue.lane SET lease = 0, wake_at = NULL, deadline = '-infinity'")
    conn.commit()
    a.run(promote(LONG_AGO, timedelta(0)))
    assert sorted((job.id, job.attempt) for job in a.lanes(2)) == [(made[0], 2), (made[1], 1)]
