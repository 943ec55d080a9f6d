"""Suspects: jobs whose worker was lost come back few at a time, then alone, and one that kills is found out."""

from __future__ import annotations

import pytest

from pgqueue.app import App
from pgqueue.claim import suspects_alone
from pgqueue.finish import Failed, ack, bury, retry
from pgqueue.heartbeat import register
from pgqueue.job import Buried, Claimed
from pgqueue.run import Runner
from tests.factories import (
    EVERYTHING,
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


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


def runner(max_attempts: int) -> Runner:
    """Make the runner of a job type that is never run here."""

    def work() -> None: ...

    return Runner(App().job("work", max_attempts=max_attempts)(work))


def test_an_expired_lease_is_taken_over_only_by_the_claim_of_suspects(
    conn: Connection, a: Holder, b: Holder
) -> None:
    made = enqueue(conn, 2)
    conn.commit()
    a.claim()
    assert b.suspects() == []
    lose(conn, made[:1])
    conn.commit()
    assert b.claim() == []
    (job,) = b.suspects()
    assert (job.id, job.attempt) == (made[0], 2)
    assert b.suspects() == []
    found = row(conn, made[0])
    assert found
    assert (found["lost"], found["lease"]) == (1, job.lease)


def test_two_rescuers_take_over_an_expired_job_once(conn: Connection, a: Holder, b: Holder) -> None:
    """Two reapers failed the same job twice."""
    made = enqueue(conn, 3)
    conn.commit()
    a.claim()
    lose(conn, made)
    conn.commit()
    a.begin()
    first = a.suspects(2)
    second = b.suspects()
    a.commit()
    assert sorted(ids(first) + ids(second)) == made
    assert b.suspects() == a.suspects() == []
    losses = conn.execute("SELECT array_agg(DISTINCT lost) FROM pgqueue.job").fetchone()
    assert losses == ([1],)


def test_a_rescue_that_looked_before_the_ack_changes_nothing_after_it(
    conn: Connection, a: Holder, b: Holder
) -> None:
    """Peers read stuck jobs, decide in code and write by id: a job that completed in between ran again."""
    (job_id,) = enqueue(conn)
    conn.commit()
    jobs = a.claim()
    lose(conn, [job_id])
    conn.commit()
    a.begin()
    a.run(ack(jobs))
    assert b.suspects() == []  # the row is locked by the ack
    a.commit()
    assert b.suspects() == []
    logged = conn.execute("SELECT count(*) FROM pgqueue.attempt_log").fetchone()
    assert logged == (0,)


def test_the_lost_attempt_is_logged_with_the_worker_that_vanished(
    conn: Connection, a: Holder, b: Holder
) -> None:
    a.run(
        register(
            nonce=1, host="shop-7", pid=99, version="1", queues=["default"], names=["work"], concurrency=8
        )
    )
    (job_id,) = enqueue(conn)
    conn.commit()
    (first,) = a.claim()
    lose(conn, [job_id])
    conn.commit()
    b.suspects()
    logged = conn.execute(
        "SELECT job_id, attempt, outcome, lease, worker, error_type, started_at <= at FROM pgqueue.attempt_log"
    ).fetchall()
    assert logged == [(job_id, 1, "lost", first.lease, "shop-7:99", "WorkerLost", True)]


def test_a_rescue_does_not_depend_on_the_registry_of_workers(conn: Connection, a: Holder, b: Holder) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    a.claim()
    lose(conn, [job_id])
    conn.execute("TRUNCATE pgqueue.worker")
    conn.commit()
    assert ids(b.suspects()) == [job_id]


def test_first_losses_come_at_most_eight_together_and_later_ones_alone(
    conn: Connection, a: Holder, b: Holder
) -> None:
    made = enqueue(conn, 20)
    conn.commit()
    a.claim()
    lose(conn, made)
    conn.commit()
    assert not b.run(suspects_alone(scope(), [EVERYTHING]))
    together = b.suspects(8)
    assert ids(together) == made[:8]
    lose(conn, made[:8])
    conn.commit()
    assert b.run(suspects_alone(scope(), [EVERYTHING]))
    assert ids(b.suspects(8)) == made[8:16]
    (alone,) = b.suspects(1, low=1, high=32_767)
    assert alone.id == made[0]
    assert row(conn, made[0])["lost"] == 2  # type: ignore[index]


def test_a_ceiling_keeps_the_scan_for_suspects_off_the_backlog(
    conn: Connection, a: Holder, b: Holder
) -> None:
    made = enqueue(conn, 3)
    conn.commit()
    a.claim()
    lose(conn, made)
    places = [p for (p,) in conn.execute("SELECT pos FROM pgqueue.job ORDER BY pos")]
    conn.commit()
    assert b.suspects(ceilings=[places[0] - 1]) == []
    assert not b.run(suspects_alone(scope(), [places[0] - 1]))
    assert ids(b.suspects(ceilings=[places[1]])) == made[:2]


def test_a_suspect_of_another_name_or_queue_is_left_alone(conn: Connection, a: Holder, b: Holder) -> None:
    made = enqueue(conn, name="else") + enqueue(conn, queue="other")
    conn.commit()
    a.claim(of=scope(queues=("default", "other"), names=("work", "else")))
    lose(conn, made)
    conn.commit()
    assert b.suspects() == []


@pytest.mark.parametrize(("max_attempts", "runs"), [(1, 3), (2, 3), (3, 3), (5, 5)])
@pytest.mark.parametrize("place", [1, 3, 500])
def test_one_job_that_kills_its_worker_buries_itself_and_nobody_else(
    conn: Connection, a: Holder, place: int, max_attempts: int, runs: int
) -> None:
    """With attempts counted at claim, one poison job of a batch of 500 took all 500 into the dead letters."""
    made = enqueue(conn, 500)
    conn.commit()
    poison = made[place - 1]
    judge = runner(max_attempts)
    ran: list[int] = []

    def run(jobs: list[Claimed]) -> bool:
        """Run jobs in order; the poison one kills the worker, whatever it has done is not acknowledged."""
        for job in jobs:
            verdict = judge.lost(job)
            if verdict is not None:
                assert isinstance(verdict, Buried)
                a.run(bury([Failed(claim=token(job), outcome=verdict)], "w"))
                return True
            ran.append(job.id)
            if job.id == poison:
                lose(conn, ids(jobs))
                conn.commit()
                return False
        a.run(ack(jobs))
        return True

    run(a.claim(500))
    for _ in range(200):
        if alone := a.suspects(1, low=1, high=32_767):
            run(alone)
        elif few := a.suspects(8):
            run(few)
        else:
            break
    dead = conn.execute("SELECT id, reason, attempt, error_type FROM pgqueue.dead_job").fetchall()
    assert dead == [(poison, "worker lost", runs + 1, "WorkerLost")]
    assert ran.count(poison) == runs
    assert all(1 <= ran.count(job_id) <= 3 for job_id in made if job_id != poison)
    assert conn.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (0,)


def test_a_job_that_failed_by_itself_is_no_suspect_any_more(conn: Connection, a: Holder, b: Holder) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    a.claim()
    lose(conn, [job_id])
    conn.commit()
    (job,) = b.suspects()
    b.run(retry([Failed(claim=token(job), outcome=retried())], "b"))
    conn.execute("UPDATE pgqueue.job SET run_at = NULL, pos = nextval('pgqueue.pos_seq')")
    conn.commit()
    assert ids(b.claim()) == [job_id]


def test_an_expired_lease_behind_ten_thousand_live_ones_is_found_at_once(
    conn: Connection, a: Holder, b: Holder
) -> None:
    """A rescuer that read pages of running jobs never came to the last page."""
    made = enqueue(conn, 10_001)
    conn.commit()
    while a.claim(5_000):
        pass
    lose(conn, made[-1:])
    conn.commit()
    assert ids(b.suspects()) == made[-1:]
