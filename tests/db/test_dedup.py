from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from pgqueue import App, JobRef
from pgqueue.cancel import cancel
from pgqueue.connection import execute
from pgqueue.finish import Failed, bury, drop, release
from pgqueue.prune import chores
from pgqueue.testing import drain
from tests.factories import Holder, buried, scope, token
from tests.server import Connection, Server
from tests.waiting import eventually

app = App()
CALLERS = 50


@app.job("ship")
def ship(n: int) -> None: ...


@app.job("tidy", queue="tidy")
def tidy() -> None: ...


@pytest.fixture(scope="module")
def shop(server: Server) -> Iterator[str]:
    """Give the DSN of one database for the whole module."""
    name = server.migrated()
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def clean(shop: str) -> Iterator[Connection]:
    """Give a connection to that database without jobs in it."""
    with psycopg.connect(shop) as conn:
        conn.execute("SET search_path = ''")
        conn.execute("TRUNCATE pgqueue.job, pgqueue.dedup")
        conn.commit()
        yield conn
        conn.rollback()


def stored(conn: Connection) -> list[int]:
    rows = conn.execute("SELECT j.id FROM pgqueue.job j ORDER BY j.id").fetchall()
    conn.commit()
    return [int(str(row[0])) for row in rows]


def waiting(conn: Connection, n: int) -> Callable[[], bool]:
    """Tell whether n sessions of this database wait for a lock."""

    def wait_for_a_lock() -> bool:
        row = conn.execute(
            "SELECT count(*) FROM pg_catalog.pg_stat_activity a"
            " WHERE a.datname = current_database() AND a.wait_event_type = 'Lock'"
        ).fetchone()
        conn.commit()
        return row == (n,)

    return wait_for_a_lock


def test_within_its_window_a_key_belongs_to_one_job_though_that_is_done(clean: Connection) -> None:
    """procrastinate-org/procrastinate#1050: a scope that was not named was taken for another one."""
    once = ship.using(dedup_key="k", dedup_window=timedelta(hours=1))
    first = once.enqueue(clean, 1)
    clean.commit()
    assert once.enqueue(clean, 2) == JobRef(first.id, created=False)
    clean.execute("DELETE FROM pgqueue.job")
    assert once.enqueue(clean, 3) == JobRef(first.id, created=False)
    clean.execute("UPDATE pgqueue.dedup SET until = clock_timestamp()")
    assert once.enqueue(clean, 4).created
    clean.commit()
    assert len(stored(clean)) == 1


def test_a_live_key_is_free_as_soon_as_its_job_is_gone(clean: Connection) -> None:
    live = ship.using(dedup_key="k", dedup_window="live")
    first = live.enqueue(clean, 1)
    clean.commit()
    assert live.enqueue(clean, 2) == JobRef(first.id, created=False)
    clean.execute("DELETE FROM pgqueue.job")
    second = live.enqueue(clean, 3)
    assert second.created
    assert second.id != first.id
    assert live.enqueue(clean, 4) == JobRef(second.id, created=False)


def test_a_key_that_belonged_to_a_window_can_go_on_living_and_back(clean: Connection) -> None:
    ship.using(dedup_key="k").enqueue(clean, 1)
    clean.execute("UPDATE pgqueue.dedup SET until = clock_timestamp()")
    live = ship.using(dedup_key="k", dedup_window="live").enqueue(clean, 2)
    assert ship.using(dedup_key="k").enqueue(clean, 3) == JobRef(live.id, created=False)
    clean.execute("DELETE FROM pgqueue.job")
    assert ship.using(dedup_key="k").enqueue(clean, 4).created


def test_a_key_is_taken_per_queue(clean: Connection) -> None:
    assert ship.using(dedup_key="k").enqueue(clean, 1).created
    assert ship.using(dedup_key="k", queue="other").enqueue(clean, 1).created
    assert not tidy.using(dedup_key="k", queue="other").enqueue(clean).created


def test_a_rollback_frees_the_key_so_no_job_is_suppressed_by_one_that_never_was(clean: Connection) -> None:
    """oban-bg/oban#1087, #1093: the winner rolled back, and the loser had been told that the job exists."""
    lost = ship.using(dedup_key="k").enqueue(clean, 1)
    clean.rollback()
    found = ship.using(dedup_key="k").enqueue(clean, 2)
    assert found.created
    assert found.id != lost.id
    clean.commit()
    assert stored(clean) == [found.id]


def test_a_savepoint_that_is_rolled_back_frees_the_key(clean: Connection) -> None:
    with suppress(ZeroDivisionError), clean.transaction():
        ship.using(dedup_key="k").enqueue(clean, 1)
        raise ZeroDivisionError
    assert ship.using(dedup_key="k").enqueue(clean, 2).created


@pytest.mark.parametrize("window", [timedelta(hours=1), "live"])
@pytest.mark.parametrize("first_commits", [True, False])
def test_of_fifty_concurrent_callers_one_creates_the_job_and_all_get_its_id(
    window: timedelta, first_commits: bool, clean: Connection, shop: str
) -> None:
    """oban-bg/oban#1505: under races ON CONFLICT DO NOTHING returned no row, and a caller no id."""
    once = ship.using(dedup_key="k", dedup_window=window)

    def call(n: int) -> JobRef:
        with psycopg.connect(shop) as conn:
            return once.enqueue(conn, n)

    with psycopg.connect(shop) as first, ThreadPoolExecutor(CALLERS) as pool:
        early = once.enqueue(first, 0)
        late = [pool.submit(call, n) for n in range(1, CALLERS)]
        eventually(waiting(clean, CALLERS - 1), 60)
        if first_commits:
            first.commit()
        else:
            first.rollback()
        refs = [future.result() for future in late]
    (winner,) = stored(clean)
    assert {ref.id for ref in refs} == {winner}
    assert (winner == early.id) is first_commits
    assert sum(ref.created for ref in refs) == (0 if first_commits else 1)


def test_a_caller_that_meets_a_taken_key_waits_for_nobody_and_aborts_nothing(
    clean: Connection, shop: str
) -> None:
    """rails/solid_queue#224: a taken key aborted the caller's business transaction."""
    first = ship.using(dedup_key="k").enqueue(clean, 1)
    clean.commit()
    clean.execute("SELECT FROM pgqueue.job j, pgqueue.dedup d FOR UPDATE")
    with psycopg.connect(shop) as conn:
        conn.execute("SET LOCAL lock_timeout = '1s'")
        assert ship.using(dedup_key="k").enqueue(conn, 2) == JobRef(first.id, created=False)


def test_two_bulks_of_the_same_keys_in_opposite_order_do_not_deadlock(clean: Connection, shop: str) -> None:
    """vectorize-io/hindsight PR#2368, aikirun/aiki#196: bulks of the same keys in opposite order."""
    numbers = list(range(1_000))
    keyed = ship.using(dedup_key=lambda n: f"order-{n}")
    start = threading.Barrier(2)

    def bulk(order: list[int]) -> dict[int, JobRef]:
        with psycopg.connect(shop) as conn:
            start.wait()
            return dict(zip(order, keyed.enqueue_many(conn, order), strict=True))

    for _ in range(3):
        clean.execute("TRUNCATE pgqueue.job, pgqueue.dedup")
        clean.commit()
        with ThreadPoolExecutor(2) as pool:
            one, two = pool.map(bulk, [numbers, numbers[::-1]])
        assert {n: ref.id for n, ref in one.items()} == {n: ref.id for n, ref in two.items()}
        assert [one[n].created != two[n].created for n in numbers] == [True] * 1_000
        assert len(stored(clean)) == 1_000


def test_refs_come_back_in_the_order_of_the_payloads_whatever_the_keys(clean: Connection) -> None:
    keys = ["z", "é", "a", "Z", "🦆", "a", "10", "9"]
    refs = ship.using(dedup_key=lambda n: keys[n]).enqueue_many(clean, range(len(keys)))
    rows: Any = clean.execute("SELECT j.dedup_key, j.id FROM pgqueue.job j").fetchall()
    found = dict(rows)
    assert [ref.id for ref in refs] == [found[key] for key in keys]
    assert [ref.created for ref in refs] == [True] * 5 + [False] + [True] * 2


def test_a_taken_key_draws_no_number(clean: Connection) -> None:
    """graphile/worker#619: conflicts used the ids up, 38 rows and 2^31 of them."""
    ship.using(dedup_key="k").enqueue(clean, 1)
    before = clean.execute("SELECT last_value FROM pgqueue.job_id_seq").fetchone()
    for _ in range(10):
        ship.using(dedup_key="k").enqueue(clean, 1)
    assert clean.execute("SELECT last_value FROM pgqueue.job_id_seq").fetchone() == before


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_above_read_committed_a_concurrent_same_key_is_a_serialization_failure(
    level: str, clean: Connection, shop: str
) -> None:
    with psycopg.connect(shop) as conn:
        conn.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        conn.execute("SELECT FROM pgqueue.job")
        first = ship.using(dedup_key="k").enqueue(clean, 1)
        clean.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            ship.using(dedup_key="k").enqueue(conn, 2)
        conn.rollback()
        assert ship.using(dedup_key="k").enqueue(conn, 2) == JobRef(first.id, created=False)


def test_two_single_enqueues_in_opposite_order_can_deadlock_like_any_two_updates(
    clean: Connection, shop: str
) -> None:
    with psycopg.connect(shop) as other, ThreadPoolExecutor(1) as pool:
        ship.using(dedup_key="a").enqueue(clean, 1)
        ship.using(dedup_key="b").enqueue(other, 1)
        crossing = pool.submit(ship.using(dedup_key="b").enqueue, clean, 2)
        failed = 0
        try:
            ship.using(dedup_key="a").enqueue(other, 2)
        except psycopg.errors.DeadlockDetected:
            failed += 1
        other.rollback()
        try:
            crossing.result()
        except psycopg.errors.DeadlockDetected:
            failed += 1
    assert failed == 1


def test_a_bulk_without_a_key_for_each_payload_is_refused(clean: Connection) -> None:
    for call in (
        "SELECT FROM pgqueue.enqueue_many('ship', '[1, 2]', dedup_keys => ARRAY['a'])",
        "SELECT FROM pgqueue.enqueue_many('ship', '[1]', keys => ARRAY['a', 'b'])",
        "SELECT FROM pgqueue.enqueue_many('ship', '[1, 2]', dedup_keys => ARRAY['a', NULL])",
    ):
        with (
            pytest.raises(psycopg.errors.InvalidParameterValue, match=r"job 'ship'|job ship"),
            clean.transaction(),
        ):
            clean.execute(call)
    assert stored(clean) == []


def test_a_key_that_is_taken_while_prune_is_at_it_stays_taken(clean: Connection, shop: str) -> None:
    """riverqueue/river#1302: read, decide, write; what was free when it was read had a new job when it went."""
    live = ship.using(dedup_key="k", dedup_window="live")
    (prune,) = [chore for chore in chores(timedelta(days=7)) if "pgqueue.dedup" in chore.query.text]
    reads = "f.until IS NULL AND NOT EXISTS"
    assert prune.query.text.count(reads) == 1
    paused = prune.query.text.replace(
        reads, "f.until IS NULL AND (SELECT pg_advisory_lock(7)) IS NOT NULL AND NOT EXISTS"
    )
    live.enqueue(clean, 1)
    clean.execute("DELETE FROM pgqueue.job")
    clean.commit()
    with (
        psycopg.connect(shop, autocommit=True) as holds,
        psycopg.connect(shop, autocommit=True) as prunes,
        ThreadPoolExecutor(1) as pool,
    ):
        holds.execute("SELECT pg_advisory_lock(7)")
        pruned = pool.submit(prunes.execute, paused.encode())
        eventually(waiting(clean, 1))  # it has its snapshot, and has read nothing yet
        second = live.enqueue(clean, 2)
        clean.commit()
        holds.execute("SELECT pg_advisory_unlock(7)")
        pruned.result(60)
    assert live.enqueue(clean, 3) == JobRef(second.id, created=False)


@pytest.mark.parametrize("mode", ["keep", "replace"])
@pytest.mark.parametrize("commits", [True, False])
def test_of_two_callers_that_find_a_live_key_free_one_takes_it(
    clean: Connection, shop: str, commits: bool, mode: Any
) -> None:
    """oban-bg/oban#1093, riverqueue/river#1302: judged by what was seen before the wait, the second took it, too."""
    live = ship.using(dedup_key="k", dedup_window="live", dedup_mode=mode)
    live.enqueue(clean, 0)
    clean.execute("DELETE FROM pgqueue.job")
    clean.commit()
    with psycopg.connect(shop) as one, psycopg.connect(shop) as two, ThreadPoolExecutor(1) as pool:
        first = live.enqueue(one, 1)
        late = pool.submit(live.enqueue, two, 2)
        eventually(waiting(clean, 1))
        if commits:
            one.commit()
        else:
            one.rollback()
        second = late.result(60)
        two.commit()
    assert first.created
    assert second.created is not commits
    assert stored(clean) == [first.id if commits else second.id]


def test_a_caller_that_was_late_by_a_moment_sees_who_took_the_free_key(conn: Connection, dsn: str) -> None:
    """oban-bg/oban#1093: one takes it between the look and the write of the other, which waits for it."""
    live = ship.using(dedup_key="k", dedup_window="live")
    live.enqueue(conn, 0)
    conn.execute("DELETE FROM pgqueue.job")
    row = conn.execute("SELECT pg_get_functiondef('pgqueue.enqueue_many'::regproc)").fetchone()
    text = str(row[0]) if row else ""
    look = "ON CONFLICT DO NOTHING;\n      IF NOT FOUND THEN\n"
    assert text.count(look) == 1
    pause = "PERFORM pg_advisory_lock(7) WHERE r.value::text = '2'; PERFORM pg_advisory_unlock_all();\n"
    conn.execute(text.replace(look, look + pause).encode())
    conn.commit()
    with (
        psycopg.connect(dsn, autocommit=True) as holds,
        psycopg.connect(dsn) as one,
        psycopg.connect(dsn) as two,
        ThreadPoolExecutor(1) as pool,
    ):
        holds.execute("SELECT pg_advisory_lock(7)")
        late = pool.submit(live.enqueue, two, 2)
        eventually(waiting(conn, 1))
        first = live.enqueue(one, 1)
        holds.execute("SELECT pg_advisory_unlock(7)")
        blocked = "SELECT FROM pg_stat_activity WHERE pg_blocking_pids(pid) @> ARRAY[%s]::int[]"
        eventually(lambda: holds.execute(blocked, [one.info.backend_pid]).fetchone() is not None)
        one.commit()
        assert late.result(60) == JobRef(first.id, created=False)
        two.commit()
    assert stored(conn) == [first.id]


def test_a_job_that_is_cancelled_before_it_ran_frees_its_key(clean: Connection, shop: str) -> None:
    once = ship.using(dedup_key="k")
    first = once.enqueue(clean, 1)
    kept = ship.using(dedup_key="other").enqueue(clean, 1)
    clean.commit()
    assert [c.state for c in execute(clean, cancel([first.id]))] == ["cancelled"]
    second = once.enqueue(clean, 2)
    assert second.created
    assert not ship.using(dedup_key="other").enqueue(clean, 2).created
    clean.execute("UPDATE pgqueue.dedup SET job_id = 0 WHERE key = 'k'")  # another job's by now
    execute(clean, cancel([second.id, kept.id]))
    assert clean.execute("SELECT key FROM pgqueue.dedup").fetchall() == [("k",)]


def test_a_job_that_is_cancelled_after_it_ran_keeps_its_key_for_the_window(
    clean: Connection, shop: str
) -> None:
    once = ship.using(dedup_key="k")
    first = once.enqueue(clean, 1)
    clean.execute("UPDATE pgqueue.job SET attempt = 1")
    execute(clean, cancel([first.id]))
    assert once.enqueue(clean, 2) == JobRef(first.id, created=False)


@pytest.mark.parametrize(
    ("end", "frees"),
    [
        ("dropped unbegun", True),
        ("dropped", False),
        ("expired", True),
        ("permanent", False),
        ("second attempt", False),
    ],
)
def test_a_claimed_job_that_ends_frees_its_key_only_if_its_handler_was_never_called(
    clean: Connection, shop: str, end: str, frees: bool
) -> None:
    once = ship.using(dedup_key="k")
    first = once.enqueue(clean, 1)
    clean.execute("UPDATE pgqueue.job SET attempt = %s", [int(end == "second attempt")])
    clean.commit()
    with Holder(shop) as holder:
        (job,) = holder.claim(of=scope(names=["ship"]))
        if end in ("expired", "permanent", "second attempt"):
            reason = "permanent" if end == "permanent" else "expired"
            holder.run(bury([Failed(claim=token(job), outcome=buried(reason))], "host:1"))
        else:
            holder.run(drop([token(job)], [job.id] if end == "dropped unbegun" else []))
    again = once.enqueue(clean, 2)
    assert (again.created, again.id != first.id) == (frees, frees)
    clean.execute("DELETE FROM pgqueue.dead_job")
    clean.commit()


def test_a_worker_frees_the_keys_of_jobs_that_it_does_not_begin(clean: Connection, shop: str) -> None:
    """One was claimed, cancelled and given back; the time of the other one is over."""
    cancelled, expired = ship.using(dedup_key="c"), ship.using(dedup_key="e")
    first = cancelled.enqueue(clean, 1)
    clean.commit()
    with Holder(shop) as holder:
        (job,) = holder.claim(of=scope(names=["ship"]))
        assert [c.state for c in execute(clean, cancel([first.id]))] == ["requested"]
        clean.commit()
        holder.run(release([token(job)]))
    expired.using(expires_at=datetime.now(UTC) - timedelta(hours=1)).enqueue(clean, 2)
    clean.commit()
    drain(app, shop)
    assert stored(clean) == []
    assert cancelled.enqueue(clean, 3).created
    assert expired.enqueue(clean, 4).created
    clean.rollback()
    clean.execute("DELETE FROM pgqueue.dead_job")
    clean.commit()


def test_a_cancel_takes_keys_in_their_order_whatever_that_of_the_jobs(clean: Connection, shop: str) -> None:
    """A bulk that replaces takes the keys in their order, as a cancel does, whatever the order of the jobs."""
    made = [ship.using(dedup_key=key).enqueue(clean, 1).id for key in ("b", "a")]
    clean.commit()
    with psycopg.connect(shop) as one, psycopg.connect(shop) as two, ThreadPoolExecutor(1) as pool:
        one.execute("SELECT FROM pgqueue.dedup WHERE key = 'a' FOR NO KEY UPDATE")
        cancelling = pool.submit(execute, two, cancel(made))
        eventually(waiting(clean, 1))
        one.execute("SELECT FROM pgqueue.dedup WHERE key = 'b' FOR NO KEY UPDATE")
        one.commit()
        assert [c.state for c in cancelling.result(60)] == ["cancelled"] * 2
        two.commit()
    assert stored(clean) == []
