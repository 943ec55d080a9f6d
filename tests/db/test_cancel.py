"""A cancelled job never runs again, whoever holds it and whatever dies on the way."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pgqueue.cancel import cancel, count_waiting, waiting
from pgqueue.claim import claim
from pgqueue.connection import execute
from pgqueue.finish import Failed, ack, bury, drop, release, retry, snooze
from pgqueue.heartbeat import heartbeat
from pgqueue.job import Claimed
from pgqueue.prune import chores
from pgqueue.run import cancelled
from tests.factories import (
    MINUTE,
    Holder,
    buffers,
    buried,
    enqueue,
    explain,
    ids,
    lose,
    nodes,
    retried,
    row,
    scope,
    token,
    wipe,
)
from tests.server import Connection


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


@pytest.fixture
def holder(dsn: str) -> Iterator[Holder]:
    with Holder(dsn) as opened:
        yield opened


def states(conn: Connection, *job_ids: int) -> list[str]:
    """Cancel jobs and commit; return what became of each."""
    answers = execute(conn, cancel(job_ids))
    conn.commit()
    assert [a.id for a in answers] == list(job_ids)
    return [a.state for a in answers]


def count(conn: Connection, table: str) -> int:
    found = conn.execute(f"SELECT count(*) FROM pgqueue.{table}".encode()).fetchone()
    conn.commit()
    return int(str(found[0])) if found else -1


def doomed(jobs: list[Claimed]) -> list[bool]:
    """Tell which of these claims the worker drops unrun."""
    return [cancelled(job) for job in jobs]


def test_a_waiting_job_is_gone_at_once(conn: Connection, holder: Holder) -> None:
    (ready,) = enqueue(conn)
    (delayed,) = enqueue(conn, delay=MINUTE)
    keyed = enqueue(conn, 2, key="k")
    (other,) = enqueue(conn)
    conn.commit()
    assert states(conn, ready, delayed, keyed[0]) == ["cancelled"] * 3
    assert ids(holder.claim()) == [other]
    assert ids(holder.lanes()) == [keyed[1]]
    tally = conn.execute("SELECT sum(n) FROM pgqueue.tally WHERE outcome = 'cancelled'").fetchone()
    assert tally == (3,)
    conn.commit()


def test_the_lane_of_a_cancelled_job_is_taken_by_whoever_knows_the_next(
    conn: Connection, holder: Holder
) -> None:
    (job_id,) = enqueue(conn, key="k")
    other = enqueue(conn, name="other", key="k")
    conn.commit()
    holder.route()
    assert states(conn, job_id) == ["cancelled"]
    assert ids(holder.lanes(of=scope(names=["other"]), routing=False)) == other


def test_the_log_and_the_request_go_with_the_job(conn: Connection, holder: Holder) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    (job,) = holder.claim()
    assert states(conn, job_id) == ["requested"]
    holder.run(retry([Failed(claim=token(job), outcome=retried())], "host:1"))
    assert states(conn, job_id) == ["cancelled"]
    assert [count(conn, t) for t in ("job", "attempt_log", "job_signal", "dead_job")] == [0, 0, 0, 0]


def test_what_is_done_or_dead_or_never_was_is_said(conn: Connection, holder: Holder) -> None:
    one, two = enqueue(conn, 2)
    conn.commit()
    first, second = holder.claim()
    holder.run(ack([first]))
    holder.run(bury([Failed(claim=token(second), outcome=buried())], "host:1"))
    assert states(conn, two, one, 2**60) == ["dead", "gone", "gone"]
    assert count(conn, "job_signal") == 0


def test_a_running_job_is_asked_and_never_locked(conn: Connection, holder: Holder) -> None:
    """absurd 0.1.0: cancel and complete waited for each other."""
    (job_id,) = enqueue(conn)
    conn.commit()
    (job,) = holder.claim()
    before = row(conn, job_id)
    conn.commit()
    assert [a.state for a in execute(conn, cancel([job_id]))] == ["requested"]
    # The transaction of whoever cancels is open: neither a heartbeat nor an ack waits for it.
    assert holder.run(heartbeat([token(job)], MINUTE)) == [job_id]
    assert row(conn, job_id) == before
    assert holder.run(ack([job])) is None
    conn.commit()
    assert states(conn, job_id) == ["gone"]


def test_a_cancel_that_is_rolled_back_did_not_happen(conn: Connection, holder: Holder) -> None:
    one, two = enqueue(conn, 2)
    conn.commit()
    (job,) = holder.claim(1)
    assert [a.state for a in execute(conn, cancel([one, two]))] == ["requested", "cancelled"]
    conn.rollback()
    holder.run(release([token(job)]))
    assert doomed(holder.claim()) == [False, False]


def test_a_job_cancelled_while_its_dead_worker_is_not_yet_found_never_runs(
    conn: Connection, holder: Holder
) -> None:
    """river discussion 1603: a rescue that overlooked the cancel ran the job again, ten times of ten."""
    (job_id,) = enqueue(conn)
    conn.commit()
    holder.claim()
    assert states(conn, job_id) == ["requested"]
    lose(conn, [job_id])
    conn.commit()
    (suspect,) = holder.suspects()
    assert doomed([suspect]) == [True]
    assert holder.run(drop([suspect])) == [job_id]
    assert [count(conn, t) for t in ("job", "attempt_log", "job_signal", "dead_job")] == [0, 0, 0, 0]


def test_a_cancel_after_the_lease_ran_out_counts_too(conn: Connection, holder: Holder) -> None:
    """river discussion 1603, on the other side of the deadline."""
    (job_id,) = enqueue(conn)
    conn.commit()
    holder.claim()
    lose(conn, [job_id])
    conn.commit()
    assert states(conn, job_id) == ["requested"]
    assert doomed(holder.suspects()) == [True]


@pytest.mark.parametrize("end", ["retry", "snooze", "release"])
def test_a_job_that_is_given_back_before_the_request_arrives_never_runs(
    conn: Connection, holder: Holder, end: str
) -> None:
    (job_id,) = enqueue(conn)
    (other,) = enqueue(conn)
    conn.commit()
    job, _ = holder.claim()
    assert states(conn, job_id) == ["requested"]
    holder.run(
        {
            "retry": retry([Failed(claim=token(job), outcome=retried(0.0))], "host:1"),
            "snooze": snooze([job], [0.0]),
            "release": release([token(job)]),
        }[end]
    )
    conn.execute("UPDATE pgqueue.job SET run_at = NULL, pos = 1 WHERE id = %s", [job_id])
    conn.commit()
    found = holder.claim()
    assert ids(found) == [job_id]
    assert doomed(found) == [True]
    assert row(conn, other) is not None
    conn.commit()


def test_a_keyed_job_whose_worker_died_is_dropped_and_the_next_one_runs(
    conn: Connection, holder: Holder
) -> None:
    """river discussion 1603, behind an ordering key."""
    first, second, third = enqueue(conn, 3, key="k")
    conn.commit()
    assert ids(holder.lanes(depth=2)) == [first, second]
    assert states(conn, second, first) == ["requested", "requested"]
    lose(conn, [first, second])
    conn.commit()
    (head,) = holder.lanes(depth=3)
    assert (head.id, doomed([head])) == (first, [True])
    holder.run(drop([head]))
    holder.give_back(("default", "k"), head.lease)
    ran = holder.lanes(depth=3)
    assert ids(ran) == [second, third]
    assert doomed(ran) == [True, False]


def test_a_job_that_is_being_claimed_is_dropped_by_whoever_gets_it(
    dsn: str, conn: Connection, holder: Holder
) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    holder.begin()
    assert ids(holder.claim()) == [job_id]
    # The claim is not committed: to everybody else the job waits, but its row is locked.
    assert states(conn, job_id) == ["requested"]
    holder.rollback()
    assert doomed(holder.claim()) == [True]


def test_a_cancel_takes_whoever_else_is_named_while_one_is_locked(dsn: str, conn: Connection) -> None:
    one, two = enqueue(conn, 2)
    conn.commit()
    with psycopg.connect(dsn) as business:
        business.execute("SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE", [one])
        assert states(conn, one, two) == ["requested", "cancelled"]
    assert states(conn, one) == ["cancelled"]


def test_the_request_is_kept_as_long_as_the_job_and_no_longer(conn: Connection, holder: Holder) -> None:
    enqueue(conn, 2)
    conn.commit()
    one, two = holder.claim()
    assert states(conn, one.id, two.id) == ["requested", "requested"]
    holder.run(ack([one]))
    conn.execute("UPDATE pgqueue.job_signal SET sent_at = now() - interval '1 hour'")
    for chore in chores(MINUTE):
        execute(conn, chore)
    conn.commit()
    left = conn.execute("SELECT job_id FROM pgqueue.job_signal").fetchall()
    conn.commit()
    assert left == [(two.id,)]


def test_waiting_jobs_of_a_name_are_listed_in_pages(conn: Connection, holder: Holder) -> None:
    made = enqueue(conn, 3, name="odd")
    enqueue(conn, 2)
    enqueue(conn, 1, name="odd", queue="other")
    conn.commit()
    holder.claim(of=scope(names=["odd"]), n=1)
    assert execute(conn, waiting(name="odd", queue="default", n=1)) == [made[1]]
    assert execute(conn, waiting(name="odd", queue="default", after=made[1])) == [made[2]]
    assert execute(conn, count_waiting(name="odd")) == 3
    assert execute(conn, count_waiting(queue="default")) == 4
    conn.commit()


def test_a_claim_looks_for_requests_once_and_not_once_a_job(conn: Connection, holder: Holder) -> None:
    enqueue(conn, 200)
    enqueue(conn, 200, headers={"a": 1})
    conn.commit()
    statement = claim(scope(), [0], 500, holder.leases.new(), MINUTE, {"default": 0})
    plan = explain(holder.connection, statement)
    looks = [n for n in nodes(plan) if n.get("Relation Name") == "job_signal" and n["Actual Loops"]]
    assert [n["Actual Loops"] for n in looks] == [1] * len(looks)
    assert sum(buffers(n) for n in looks) <= 4
