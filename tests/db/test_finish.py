"""The fence: whoever finishes or extends a job shows its claim, and one that came late changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pgqueue import App
from pgqueue.finish import Failed, ack, bury, drop, release, retry, snooze, still_mine
from pgqueue.heartbeat import heartbeat
from pgqueue.job import Buried, Claimed
from pgqueue.run import Runner
from pgqueue.statement import Statement
from tests.factories import (
    MINUTE,
    Connection,
    Holder,
    buried,
    enqueue,
    ids,
    lose,
    retried,
    row,
    state,
    token,
    wipe,
)

Verb = Callable[[Claimed], Statement[Any]]

VERBS: dict[str, Verb] = {
    "ack": lambda c: ack([c]),
    "ack that passes locked rows": lambda c: ack([c], skip=True),
    "retry": lambda c: retry([Failed(claim=token(c), outcome=retried())], "w"),
    "bury": lambda c: bury([Failed(claim=token(c), outcome=buried())], "w"),
    "snooze": lambda c: snooze([c], [60.0]),
    "release": lambda c: release([c]),
    "drop": lambda c: drop([c]),
}
FENCED: dict[str, Verb] = {**VERBS, "heartbeat": lambda c: heartbeat([token(c)], MINUTE)}


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


def one(conn: Connection, query: str, *params: object) -> Any:
    found = conn.execute(query, params).fetchone()
    conn.commit()
    return found[0] if found else None


@pytest.mark.parametrize("verb", FENCED.values(), ids=FENCED)
def test_a_claim_that_was_lost_changes_nothing_whatever_became_of_the_job(
    conn: Connection, a: Holder, b: Holder, verb: Verb
) -> None:
    """Peer reports: a stale attempt discarded, revived or acknowledged a job that somebody else held or had ended."""
    taken, acked, released, waiting, dead = enqueue(conn, 5)
    conn.commit()
    stale = {job.id: job for job in a.claim()}
    lose(conn, list(stale))
    conn.commit()
    again = {job.id: job for job in b.suspects()}
    assert again.keys() == stale.keys()
    assert all(again[i].lease != stale[i].lease for i in again)
    b.run(ack([again[acked]]))
    b.run(release([again[released]]))
    b.run(retry([Failed(claim=token(again[waiting]), outcome=retried())], "b"))
    b.run(bury([Failed(claim=token(again[dead]), outcome=buried())], "b"))
    before = state(conn)
    for job_id in (taken, acked, released, waiting, dead):
        assert not a.run(verb(stale[job_id]))
    assert state(conn) == before
    assert a.run(still_mine(list(stale.values()))) == []


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_a_claim_ends_once(conn: Connection, a: Holder, verb: Verb) -> None:
    enqueue(conn)
    conn.commit()
    (job,) = a.claim()
    a.run(verb(job))
    before = state(conn)
    for other in FENCED.values():
        assert not a.run(other(job))
    assert state(conn) == before


def test_ack_deletes_the_rows_it_holds_and_names_them_if_some_were_lost(
    conn: Connection, a: Holder, b: Holder
) -> None:
    first, second, third = enqueue(conn, 3)
    conn.commit()
    jobs = a.claim()
    lose(conn, [second])
    conn.commit()
    b.suspects()
    assert a.run(ack(jobs)) is not None
    assert row(conn, first) is row(conn, third) is None
    assert row(conn, second) is not None
    assert one(conn, "SELECT sum(n) FROM pgqueue.tally WHERE outcome = 'ok'") == 2
    assert a.run(ack(jobs)) == []


def test_an_expired_claim_that_nobody_took_still_counts(conn: Connection, a: Holder) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    jobs = a.claim()
    lose(conn, [job_id])
    conn.commit()
    assert a.run(still_mine(jobs)) == [job_id]
    assert a.run(ack(jobs)) is None
    assert row(conn, job_id) is None


def test_release_keeps_the_place_and_gives_the_attempt_back(conn: Connection, a: Holder) -> None:
    first, second = enqueue(conn, 2)
    conn.commit()
    before = row(conn, first)
    assert before
    jobs = a.claim()
    assert a.run(release(jobs)) == [first, second]
    after = row(conn, first)
    assert after
    assert {name: after[name] for name in after if name != "claimed_at"} == {
        name: before[name] for name in before if name != "claimed_at"
    }
    again = a.claim()
    assert ids(again) == [first, second]
    assert [job.attempt for job in again] == [1, 1]


def test_snooze_waits_and_gives_the_attempt_back(conn: Connection, a: Holder) -> None:
    soon, late = enqueue(conn, 2)
    conn.commit()
    jobs = a.claim()
    assert a.run(snooze(jobs, [100.0, 1000.0])) == [soon, late]
    waits = conn.execute(
        "SELECT extract(epoch FROM run_at - now())::int, attempt, pos FROM pgqueue.job ORDER BY id"
    ).fetchall()
    assert [(60 < wait <= 1000, attempt, pos) for wait, attempt, pos in waits] == [(True, 0, None)] * 2
    assert waits[0][0] <= 100
    assert waits[1][0] > 960
    assert a.claim() == []


def test_a_snooze_proves_that_the_job_does_not_kill_its_worker(conn: Connection, a: Holder) -> None:
    """Else a job that polls by Snooze and once lost its worker would for ever run with nothing beside it."""
    (job_id,) = enqueue(conn)
    conn.commit()
    a.claim()
    lose(conn, [job_id])
    conn.commit()
    a.run(snooze(a.suspects(), [60.0]))
    found = row(conn, job_id)
    assert found
    assert found["lost"] == 0


def test_a_job_that_kills_its_worker_and_snoozes_by_turns_is_a_suspect_when_its_attempts_are_used_up(
    conn: Connection, a: Holder
) -> None:
    """contribsys/faktory#99, vectorize-io/hindsight#2675: washed by a snooze after each crash, it kills for ever."""
    (job_id,) = enqueue(conn, max_attempts=2)
    conn.commit()
    runner = Runner(App().job("work", max_attempts=2)(lambda: None))
    seen = []
    (job,) = a.claim()
    for _ in range(8):
        lose(conn, [job_id])
        conn.commit()
        (job,) = a.suspects(low=0, high=9)
        if (verdict := runner.lost(job)) is not None:
            break
        a.run(snooze([job], [60.0]))
        found = row(conn, job_id)
        assert found
        seen.append((found["attempt"], found["lost"]))
        conn.execute("UPDATE pgqueue.job SET pos = 1, run_at = NULL")
        conn.commit()
        (job,) = a.claim() or a.suspects(low=1, high=9)
    assert isinstance(verdict, Buried)
    assert verdict.reason == "worker lost"
    assert seen == [(1, 0), (2, 1), (3, 2)]


def test_a_job_that_polls_in_peace_is_no_suspect_though_its_attempts_are_used_up(
    conn: Connection, a: Holder
) -> None:
    (job_id,) = enqueue(conn, max_attempts=1)
    conn.commit()
    a.claim()
    lose(conn, [job_id])
    conn.commit()
    for lost in (1, 0):  # right after the loss, and a snooze later
        a.run(snooze(a.suspects(low=0, high=9), [60.0]))
        found = row(conn, job_id)
        assert found
        assert found["lost"] == lost
        conn.execute("UPDATE pgqueue.job SET pos = 1, run_at = NULL")
        conn.commit()


def test_retry_logs_the_attempt_and_waits(conn: Connection, a: Holder) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    (job,) = a.claim()
    assert a.run(retry([Failed(claim=token(job), outcome=retried(300.0))], "host:7")) == [job_id]
    found = row(conn, job_id)
    assert found
    assert (found["lease"], found["attempt"], found["pos"]) == (0, 1, None)
    assert 260 < one(conn, "SELECT extract(epoch FROM run_at - now()) FROM pgqueue.job") <= 300
    logged = conn.execute(
        "SELECT attempt, outcome, lease, started_at IS NOT NULL, worker, error_type, error, traceback"
        " FROM pgqueue.attempt_log"
    ).fetchall()
    assert logged == [(1, "retry", job.lease, True, "host:7", "ValueError", "broken", "Traceback: broken")]
    assert one(conn, "SELECT n FROM pgqueue.tally WHERE outcome = 'retry'") == 1


def test_the_log_of_attempts_keeps_the_last_fifty(conn: Connection, a: Holder) -> None:
    (job_id,) = enqueue(conn, max_attempts=1000)
    conn.commit()
    for _ in range(60):
        conn.execute(
            "UPDATE pgqueue.job SET run_at = NULL, pos = nextval('pgqueue.pos_seq') WHERE pos IS NULL"
        )
        conn.commit()
        (job,) = a.claim()
        a.run(retry([Failed(claim=token(job), outcome=retried())], "w"))
    kept = [
        r[0]
        for r in conn.execute(
            "SELECT attempt FROM pgqueue.attempt_log WHERE job_id = %s ORDER BY 1", [job_id]
        )
    ]
    assert kept == list(range(11, 61))


def test_a_failed_handler_clears_a_suspect(conn: Connection, a: Holder) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    a.claim()
    lose(conn, [job_id])
    conn.commit()
    (job,) = a.suspects()
    a.run(retry([Failed(claim=token(job), outcome=retried())], "w"))
    found = row(conn, job_id)
    assert found
    assert found["lost"] == 0


def test_a_batch_of_many_kinds_is_written_row_by_row_as_told(conn: Connection, a: Holder, b: Holder) -> None:
    made = enqueue(conn, 6)
    conn.commit()
    jobs = a.claim()
    lose(conn, [made[1], made[4]])
    conn.commit()
    b.suspects()
    done = a.run(
        retry(
            [Failed(claim=token(job), outcome=retried(100.0 * i)) for i, job in enumerate(jobs[:3], 1)], "w"
        )
    )
    assert done == [made[0], made[2]]
    done = a.run(bury([Failed(claim=token(job), outcome=buried()) for job in jobs[3:]], "w"))
    assert sorted(done) == [made[3], made[5]]
    waits = conn.execute(
        "SELECT round(extract(epoch FROM run_at - now()) / 100) FROM pgqueue.job WHERE run_at IS NOT NULL ORDER BY id"
    ).fetchall()
    assert [int(wait) for (wait,) in waits] == [1, 3]


def test_drop_takes_the_signal_and_the_log_along(conn: Connection, a: Holder) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    (job,) = a.claim()
    a.run(retry([Failed(claim=token(job), outcome=retried())], "w"))
    conn.execute("UPDATE pgqueue.job SET run_at = NULL, pos = nextval('pgqueue.pos_seq')")
    conn.execute("INSERT INTO pgqueue.job_signal (job_id) VALUES (%s)", [job_id])
    conn.commit()
    assert a.run(drop(a.claim())) == [job_id]
    for table in ("job", "job_signal", "attempt_log", "dead_job"):
        assert one(conn, f"SELECT count(*) FROM pgqueue.{table}") == 0
    assert one(conn, "SELECT n FROM pgqueue.tally WHERE outcome = 'cancelled'") == 1
