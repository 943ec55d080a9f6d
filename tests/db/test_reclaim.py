"""Claims that a crash of the server has undone are made again for the jobs that are in hand, and for no others."""

from __future__ import annotations

from datetime import timedelta

import pytest

from pgqueue.finish import ack, release
from pgqueue.job import Claimed
from pgqueue.round import Leases, Rounds
from pgqueue.shelf import LaneHold
from tests.factories import QUEUE, Connection, Holder, enqueue, ids, row


@pytest.fixture
def rounds(a: Holder) -> Rounds:
    return Rounds(a.connection, Leases(1), timedelta(minutes=1), "w")


def undo(conn: Connection, *jobs: Claimed) -> None:
    """Set rows back to what they were before their claim, as a crash of the server does."""
    conn.execute(
        "UPDATE pgqueue.job SET lease = 0, deadline = '-infinity', claimed_at = '-infinity', attempt = attempt - 1"
        " WHERE id = ANY (%s)",
        [ids(jobs)],
    )
    conn.execute("UPDATE pgqueue.lane SET lease = 0, deadline = '-infinity'")
    conn.commit()


def test_a_claim_that_was_undone_is_made_again_under_its_lease(
    conn: Connection, a: Holder, b: Holder, rounds: Rounds
) -> None:
    enqueue(conn, 3)
    conn.commit()
    jobs = a.claim(3)
    undo(conn, *jobs[:2])
    rounds.reclaim(jobs, [])
    assert b.claim(3) == []
    assert [(row(conn, job.id) or {})["attempt"] for job in jobs] == [1, 1, 1]
    conn.commit()
    assert a.run(ack(jobs)) is None  # all of them


def test_what_somebody_else_has_claimed_since_is_theirs(
    conn: Connection, a: Holder, b: Holder, rounds: Rounds
) -> None:
    enqueue(conn, 2)
    conn.commit()
    jobs = a.claim(2)
    undo(conn, *jobs)
    (theirs,) = b.claim(1)
    rounds.reclaim(jobs, [])
    assert (row(conn, theirs.id) or {})["lease"] == theirs.lease
    b.run(release([theirs]))
    (again,) = b.claim(1)
    b.run(ack([again]))
    rounds.reclaim(jobs, [])
    assert a.run(ack(jobs)) == [jobs[1].id]


def test_a_job_that_was_given_back_since_is_not_taken_again(
    conn: Connection, a: Holder, b: Holder, rounds: Rounds
) -> None:
    """Only what was never claimed, as far as its row knows: a later attempt of somebody else counts."""
    enqueue(conn)
    conn.commit()
    (job,) = a.claim()
    conn.execute("UPDATE pgqueue.job SET lease = 0, deadline = '-infinity'")  # lost, taken over, and released
    conn.commit()
    rounds.reclaim([job], [])
    assert ids(b.claim()) == [job.id]


def test_the_lane_of_a_key_is_taken_again_with_its_jobs(
    conn: Connection, a: Holder, b: Holder, rounds: Rounds
) -> None:
    enqueue(conn, 2, key="k")
    conn.commit()
    (job,) = a.lanes()
    found = conn.execute("SELECT pos FROM pgqueue.lane").fetchone()
    assert found
    undo(conn, job)
    rounds.reclaim([job], [LaneHold(QUEUE, "k", job.lease, job.level, int(found[0]))])
    assert b.lanes() == []
    a.run(ack([job]))
    a.give_back((QUEUE, "k"), job.lease)
    assert len(b.lanes()) == 1
