"""The idempotency ledger: one effect per (job name, key), and no marker that could swallow a later run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from pgqueue.connection import execute
from pgqueue.finish import Failed, bury, drop
from pgqueue.job import Claim
from pgqueue.ledger import Keyed, applied, apply, hold, take
from tests import factories
from tests.factories import buried
from tests.server import Connection
from tests.waiting import eventually

BLOCKED_BY_ME = """
SELECT 1 FROM pg_catalog.pg_stat_activity a WHERE pg_catalog.pg_backend_pid() = ANY (pg_catalog.pg_blocking_pids(a.pid))
"""


def taken(conn: Connection, jobs: list[Keyed]) -> list[int]:
    """Take keys in the transaction of a connection, as a worker does."""
    execute(conn, hold(jobs))
    return execute(conn, take(jobs))


def claimed(conn: Connection, count: int) -> list[Keyed]:
    """Enqueue jobs with one key and give each a lease."""
    ids = factories.enqueue(conn, count)
    conn.execute("UPDATE pgqueue.job SET idempotency_key = 'order-1'")
    conn.execute(
        "UPDATE pgqueue.job SET lease = 1000 + id, deadline = now() + interval '1 min', attempt = 1, claimed_at = now()"
    )
    conn.commit()
    return [Keyed(claim=Claim(i, 1000 + i), name=factories.NAME, key="order-1") for i in ids]


def test_one_of_two_jobs_of_a_key_runs_and_the_other_waits(conn: Connection) -> None:
    first, second = claimed(conn, 2)
    assert taken(conn, [first, second]) == [first.claim.id]
    assert taken(conn, [second]) == []
    assert execute(conn, applied([second])) == {}


def test_twenty_at_once_have_one_winner(conn: Connection, dsn: str) -> None:
    jobs = claimed(conn, 20)

    def contend(job: Keyed) -> list[int]:
        with psycopg.connect(dsn) as own:
            return taken(own, [job])

    with ThreadPoolExecutor(20) as pool:
        winners = [won for won in pool.map(contend, jobs) if won]
    assert len(winners) == 1


def test_a_second_job_is_already_applied_once_the_first_succeeded(conn: Connection) -> None:
    first, second = claimed(conn, 2)
    taken(conn, [first])
    assert execute(conn, apply([first.claim])) == [first.claim.id]
    assert taken(conn, [second]) == []
    assert execute(conn, applied([second])) == {second.claim.id: first.claim.id}


def test_the_marker_is_not_set_before_success_so_a_crash_leaves_the_effect_to_the_next_run(
    conn: Connection,
) -> None:
    """Marker before handler: a crash in between made the redelivery `already applied`, and the effect was lost."""
    first, second = claimed(conn, 2)
    taken(conn, [first])
    conn.execute("UPDATE pgqueue.job SET deadline = now() - interval '1 s' WHERE id = %s", (first.claim.id,))
    assert execute(conn, applied([second])) == {}
    assert taken(conn, [second]) == [second.claim.id]


def test_a_late_success_without_its_lease_neither_acks_nor_marks(conn: Connection) -> None:
    (job,) = claimed(conn, 1)
    taken(conn, [job])
    assert execute(conn, apply([Claim(job.claim.id, job.claim.lease - 1)])) == []
    assert execute(conn, applied([job])) == {}


def test_a_failed_job_frees_its_key_at_once(conn: Connection) -> None:
    """A permanent failure that kept the marker made the replay from the dead letters a no-op for ever."""
    first, second = claimed(conn, 2)
    taken(conn, [first])
    conn.execute("DELETE FROM pgqueue.job WHERE id = %s", (first.claim.id,))
    assert taken(conn, [second]) == [second.claim.id]


def test_the_same_job_takes_its_key_again_under_its_next_lease(conn: Connection) -> None:
    (job,) = claimed(conn, 1)
    taken(conn, [job])
    conn.execute("UPDATE pgqueue.job SET lease = lease + 1")
    again = Keyed(claim=Claim(job.claim.id, job.claim.lease + 1), name=job.name, key=job.key)
    assert taken(conn, [again]) == [job.claim.id]
    assert execute(conn, apply([again.claim])) == [job.claim.id]


def test_keys_of_different_job_names_are_apart(conn: Connection) -> None:
    first, second = claimed(conn, 2)
    conn.execute("UPDATE pgqueue.job SET name = 'other' WHERE id = %s", (second.claim.id,))
    other = Keyed(claim=second.claim, name="other", key=second.key)
    both = taken(conn, [first, other])
    assert set(both) == {first.claim.id, second.claim.id}


def test_a_job_that_somebody_has_locked_is_passed_and_applied_later(conn: Connection, dsn: str) -> None:
    (job,) = claimed(conn, 1)
    taken(conn, [job])
    conn.commit()
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE", (job.claim.id,))
        assert execute(conn, apply([job.claim])) == []
        assert execute(conn, applied([job])) == {}
        other.rollback()
        assert execute(conn, apply([job.claim])) == [job.claim.id]


@pytest.mark.parametrize("rollback", [True, False])
def test_a_take_that_waits_for_another_follows_its_fate(conn: Connection, dsn: str, rollback: Any) -> None:
    first, second = claimed(conn, 2)
    taken(conn, [first])
    with psycopg.connect(dsn) as other, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(taken, other, [second])
        eventually(lambda: conn.execute(BLOCKED_BY_ME).fetchone())
        if rollback:
            conn.rollback()
        else:
            conn.commit()
        assert waiting.result(60) == ([second.claim.id] if rollback else [])


def test_a_take_that_waited_for_one_key_sees_who_took_the_next_one_meanwhile(
    conn: Connection, dsn: str
) -> None:
    """bensheldon/good_job#1335, river#1302: judged by what was seen before a wait, a second run begins.

    The batch waits for its first key; by then another worker has claimed and begun a job of its second one.
    """
    held, other, mine, first = claimed(conn, 4)
    conn.execute("UPDATE pgqueue.job SET lease = 0, deadline = '-infinity' WHERE id = %s", (first.claim.id,))
    conn.commit()
    a = Keyed(claim=held.claim, name=held.name, key="a")
    batch = [
        Keyed(claim=other.claim, name=other.name, key="a"),
        Keyed(claim=mine.claim, name=mine.name, key="b"),
    ]
    taken(conn, [a])
    with psycopg.connect(dsn) as waits, psycopg.connect(dsn) as runs, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(taken, waits, batch)
        eventually(lambda: conn.execute(BLOCKED_BY_ME).fetchone())
        runs.execute(
            "UPDATE pgqueue.job SET lease = 1000 + id, deadline = now() + interval '1 min' WHERE id = %s",
            (first.claim.id,),
        )
        runs.commit()
        assert taken(runs, [Keyed(claim=first.claim, name=first.name, key="b")]) == [first.claim.id]
        runs.commit()
        conn.rollback()
        assert waiting.result(60) == [other.claim.id]


def test_keys_are_locked_in_one_order_whoever_asks(conn: Connection, dsn: str) -> None:
    """vectorize-io/hindsight PR#2368, aikirun/aiki#196: the same keys in opposite order deadlock."""
    jobs = claimed(conn, 40)
    keyed = [Keyed(claim=j.claim, name=j.name, key=f"k{n:02}") for n, j in enumerate(jobs)]
    conn.execute(
        "UPDATE pgqueue.job SET idempotency_key = 'k' || lpad((id - %s)::text, 2, '0')", (jobs[0].claim.id,)
    )
    conn.commit()
    assert len(taken(conn, keyed)) == 40
    conn.commit()
    ends = [j.claim for j in keyed]

    def again(jobs: list[Keyed]) -> int:
        with psycopg.connect(dsn) as own:
            return len(taken(own, jobs))

    def finish(claims: list[Claim]) -> int:
        with psycopg.connect(dsn) as own:
            own.execute("SET lock_timeout = '60s'")
            return len(execute(own, apply(claims)))

    with ThreadPoolExecutor(4) as pool:
        takes = [pool.submit(again, keyed[:: 1 - 2 * (n % 2)]) for n in range(20)]
        done = [pool.submit(finish, ends[n::4][:: 1 - 2 * (n % 2)]) for n in range(4)]
        assert sum(f.result(60) for f in done) == 40
        assert all(f.result(60) <= 40 for f in takes)
    row = conn.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()
    assert row == (0,)


@pytest.mark.parametrize("how", ["bury", "drop"])
def test_a_job_that_ends_without_success_leaves_no_row_behind(conn: Connection, how: str) -> None:
    """que-rb/que#240: what nobody takes away grows; and what another job has taken since is not touched."""
    first, second = claimed(conn, 2)
    taken(conn, [first])
    taken(conn, [Keyed(claim=second.claim, name=second.name, key="other")])
    conn.execute("UPDATE pgqueue.effect SET job_id = 99 WHERE key = 'other'")
    conn.execute("UPDATE pgqueue.job SET idempotency_key = 'other' WHERE id = %s", (second.claim.id,))
    both = [first.claim, second.claim]
    if how == "bury":
        execute(conn, bury([Failed(claim=claim, outcome=buried()) for claim in both], "host:1"))
    else:
        execute(conn, drop(both))
    assert conn.execute("SELECT key, job_id FROM pgqueue.effect").fetchall() == [("other", 99)]
