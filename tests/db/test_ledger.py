"""The idempotency ledger: one effect per (job name, key), and no marker that could swallow a later run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from pgqueue.connection import execute
from pgqueue.job import Claim
from pgqueue.ledger import Keyed, applied, apply, take
from tests import factories
from tests.server import Connection
from tests.waiting import eventually

BLOCKED_BY_ME = """
SELECT 1 FROM pg_catalog.pg_stat_activity a WHERE pg_catalog.pg_backend_pid() = ANY (pg_catalog.pg_blocking_pids(a.pid))
"""


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
    assert execute(conn, take([first, second])) == [first.claim.id]
    assert execute(conn, take([second])) == []
    assert execute(conn, applied([second])) == []


def test_twenty_at_once_have_one_winner(conn: Connection, dsn: str) -> None:
    jobs = claimed(conn, 20)

    def contend(job: Keyed) -> list[int]:
        with psycopg.connect(dsn) as own:
            return execute(own, take([job]))

    with ThreadPoolExecutor(20) as pool:
        winners = [won for won in pool.map(contend, jobs) if won]
    assert len(winners) == 1


def test_a_second_job_is_already_applied_once_the_first_succeeded(conn: Connection) -> None:
    first, second = claimed(conn, 2)
    execute(conn, take([first]))
    assert execute(conn, apply([first.claim])) == [first.claim.id]
    assert execute(conn, take([second])) == []
    assert execute(conn, applied([second])) == [second.claim.id]


def test_the_marker_is_not_set_before_success_so_a_crash_leaves_the_effect_to_the_next_run(
    conn: Connection,
) -> None:
    """Marker before handler: a crash in between made the redelivery `already applied`, and the effect was lost."""
    first, second = claimed(conn, 2)
    execute(conn, take([first]))
    conn.execute("UPDATE pgqueue.job SET deadline = now() - interval '1 s' WHERE id = %s", (first.claim.id,))
    assert execute(conn, applied([second])) == []
    assert execute(conn, take([second])) == [second.claim.id]


def test_a_late_success_without_its_lease_neither_acks_nor_marks(conn: Connection) -> None:
    (job,) = claimed(conn, 1)
    execute(conn, take([job]))
    assert execute(conn, apply([Claim(job.claim.id, job.claim.lease - 1)])) == []
    assert execute(conn, applied([job])) == []


def test_a_failed_job_frees_its_key_at_once(conn: Connection) -> None:
    """A permanent failure that kept the marker made the replay from the dead letters a no-op for ever."""
    first, second = claimed(conn, 2)
    execute(conn, take([first]))
    conn.execute("DELETE FROM pgqueue.job WHERE id = %s", (first.claim.id,))
    assert execute(conn, take([second])) == [second.claim.id]


def test_the_same_job_takes_its_key_again_under_its_next_lease(conn: Connection) -> None:
    (job,) = claimed(conn, 1)
    execute(conn, take([job]))
    conn.execute("UPDATE pgqueue.job SET lease = lease + 1")
    again = Keyed(claim=Claim(job.claim.id, job.claim.lease + 1), name=job.name, key=job.key)
    assert execute(conn, take([again])) == [job.claim.id]
    assert execute(conn, apply([again.claim])) == [job.claim.id]


def test_keys_of_different_job_names_are_apart(conn: Connection) -> None:
    first, second = claimed(conn, 2)
    conn.execute("UPDATE pgqueue.job SET name = 'other' WHERE id = %s", (second.claim.id,))
    other = Keyed(claim=second.claim, name="other", key=second.key)
    both = execute(conn, take([first, other]))
    assert set(both) == {first.claim.id, second.claim.id}


def test_a_job_that_somebody_has_locked_is_passed_and_applied_later(conn: Connection, dsn: str) -> None:
    (job,) = claimed(conn, 1)
    execute(conn, take([job]))
    conn.commit()
    with psycopg.connect(dsn) as other:
        other.execute("SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE", (job.claim.id,))
        assert execute(conn, apply([job.claim])) == []
        assert execute(conn, applied([job])) == []
        other.rollback()
        assert execute(conn, apply([job.claim])) == [job.claim.id]


@pytest.mark.parametrize("rollback", [True, False])
def test_a_take_that_waits_for_another_follows_its_fate(conn: Connection, dsn: str, rollback: Any) -> None:
    first, second = claimed(conn, 2)
    execute(conn, take([first]))
    with psycopg.connect(dsn) as other, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(execute, other, take([second]))
        eventually(lambda: conn.execute(BLOCKED_BY_ME).fetchone())
        if rollback:
            conn.rollback()
        else:
            conn.commit()
        assert waiting.result(10) == ([second.claim.id] if rollback else [])
