"""Nobody else's lock stops an acknowledgement or a heartbeat, and a locked row is not a lost lease."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from pgqueue.job import Claimed
from pgqueue.ledger import Keyed, hold
from pgqueue.plan import Plan, Wish
from pgqueue.results import Results
from pgqueue.round import Leases, Rounds
from tests.factories import Connection, Holder, buried, enqueue, ids, lose, retried, row, scope, token, wipe


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


@pytest.fixture
def rounds(a: Holder) -> Rounds:
    return Rounds(a.connection, Leases(1), timedelta(minutes=1), "w")


def held(conn: Connection, a: Holder, n: int) -> list[Claimed]:
    enqueue(conn, n)
    conn.commit()
    return a.claim(n)


def lock(conn: Connection, job_id: int) -> None:
    """Lock one row in a transaction that stays open, as a shop's upsert or reprioritise does."""
    conn.execute("UPDATE pgqueue.job SET headers = '{}' WHERE id = %s", [job_id])


def test_one_locked_row_keeps_one_job_from_being_acknowledged_and_no_other(
    conn: Connection, a: Holder, rounds: Rounds
) -> None:
    jobs = held(conn, a, 500)
    lock(conn, jobs[2].id)
    began = time.monotonic()
    out = rounds.run(Plan(results=Results(done=jobs)))
    assert 0.2 < time.monotonic() - began < 40  # five hundred waits would be 125 s
    assert out.finished == set(ids(jobs)) - {jobs[2].id}
    assert (out.lost, out.locked) == (set(), {jobs[2].id})
    again = rounds.run(Plan(results=Results(done=[jobs[2]])))
    assert (again.lost, again.locked, again.finished) == (set(), {jobs[2].id}, set())
    conn.rollback()
    last = rounds.run(Plan(results=Results(done=[jobs[2]])))
    assert (last.finished, last.lost, last.locked) == ({jobs[2].id}, set(), set())
    assert conn.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (0,)
    assert conn.execute("SELECT sum(n) FROM pgqueue.tally WHERE outcome = 'ok'").fetchone() == (500,)


def test_a_round_that_met_a_lock_hands_out_nothing(conn: Connection, a: Holder, rounds: Rounds) -> None:
    (job,) = held(conn, a, 1)
    (fresh,) = enqueue(conn)
    conn.commit()
    lock(conn, job.id)
    before = row(conn, fresh)
    wish = Wish(levels=[0], scope=scope(), starts=[0], n=10)
    out = rounds.run(Plan(results=Results(done=[job]), wishes=[wish]))
    assert out.answers == []
    assert not out.lanes_back
    assert row(conn, fresh) == before
    conn.rollback()


def test_failed_and_lost_jobs_are_told_apart_from_locked_ones(
    conn: Connection, a: Holder, rounds: Rounds, dsn: str
) -> None:
    jobs = held(conn, a, 6)
    lose(conn, [jobs[1].id, jobs[4].id])
    conn.commit()
    with Holder(dsn, 2) as b:
        b.suspects()
    lock(conn, jobs[0].id)
    lock(conn, jobs[3].id)
    results = Results(done=jobs[:3], ended=[(jobs[3], retried()), (jobs[4], buried()), (jobs[5], retried())])
    out = rounds.run(Plan(results=results))
    assert out.finished == {jobs[2].id, jobs[5].id}
    assert out.lost == {jobs[1].id, jobs[4].id}
    assert out.locked == {jobs[0].id, jobs[3].id}
    conn.rollback()
    out = rounds.run(Plan(results=Results(done=[jobs[0]], ended=[(jobs[3], retried())])))
    assert out.finished == {jobs[0].id, jobs[3].id}


def test_a_claim_passes_a_locked_row_and_takes_the_next(conn: Connection, a: Holder) -> None:
    first, second = enqueue(conn, 2)
    conn.commit()
    lock(conn, first)
    a.connection.execute("SET statement_timeout = '40s'")
    assert ids(a.claim()) == [second]
    conn.rollback()
    assert ids(a.claim()) == [first]


def test_a_suspect_locked_by_somebody_is_passed(conn: Connection, a: Holder, dsn: str) -> None:
    jobs = held(conn, a, 2)
    lose(conn, ids(jobs))
    conn.commit()
    lock(conn, jobs[0].id)
    with Holder(dsn, 2) as b:
        b.connection.execute("SET statement_timeout = '40s'")
        assert ids(b.suspects()) == [jobs[1].id]
        conn.rollback()
        assert ids(b.suspects()) == [jobs[0].id]


def test_a_result_whose_commit_was_unsure_and_whose_row_is_gone_is_no_lost_lease(
    conn: Connection, a: Holder, rounds: Rounds
) -> None:
    """The connection broke between COMMIT and its answer: the first acknowledgement may have worked."""
    jobs = held(conn, a, 2)
    assert rounds.run(Plan(results=Results(done=jobs))).finished == set(ids(jobs))
    rounds.unsure = {jobs[0].id}
    out = rounds.run(Plan(results=Results(done=jobs)))
    assert out.finished == {jobs[0].id}
    assert out.lost == {jobs[1].id}


def test_a_lock_that_cannot_be_passed_keeps_one_result_and_no_other(
    conn: Connection, a: Holder, rounds: Rounds
) -> None:
    """timgit/pg-boss#323: one wait without an end holds up everything behind it."""
    first, second, third = held(conn, a, 3)
    conn.execute("UPDATE pgqueue.job SET idempotency_key = 'k' || id")
    conn.commit()
    a.run(hold([Keyed(claim=token(j), name=j.name, key=f"k{j.id}") for j in (first, second)]))
    conn.execute("SELECT FROM pgqueue.effect WHERE job_id = %s FOR UPDATE", [first.id])
    results = Results(done=[third], applied=[first, second])
    out = rounds.run(Plan(results=results))
    assert (out.finished, out.lost, out.locked) == ({second.id, third.id}, set(), {first.id})
    conn.rollback()
    out = rounds.run(Plan(results=Results(applied=[first])))
    assert out.finished == {first.id}


def test_a_locked_table_is_not_waited_for_result_by_result(
    conn: Connection, a: Holder, rounds: Rounds
) -> None:
    jobs = held(conn, a, 200)
    conn.execute("LOCK TABLE pgqueue.tally IN EXCLUSIVE MODE")
    began = time.monotonic()
    out = rounds.run(Plan(results=Results(done=jobs)))
    # Two hundred waits would be 50 s, one without an end all the time there is.
    assert time.monotonic() - began < 40
    assert (out.finished, out.lost, out.locked) == (set(), set(), set(ids(jobs)))
    conn.rollback()
    assert rounds.run(Plan(results=Results(done=jobs))).finished == set(ids(jobs))
