"""A limit that is set, changed or lifted while jobs wait holds for them too: none is lost, none runs twice."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import psycopg
import pytest

from pgqueue.connection import execute
from pgqueue.dead import Filter, replay
from pgqueue.declare import Policy, declare
from pgqueue.finish import Failed, ack, bury
from pgqueue.limits import limit_job
from tests.factories import (
    NAME,
    QUEUE,
    Connection,
    Holder,
    buried,
    enqueue,
    fall_due,
    ids,
    scope,
    token,
    wipe,
)
from tests.waiting import eventually

#: Every test of lanes runs with both forms of their claim (see conftest).
BOTH_CLAIMS = True


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


def put(conn: Connection, n: int = 1, key: str | None = None) -> list[int]:
    made = enqueue(conn, n, key=key)
    conn.commit()
    return made


def declared(conn: Connection, limit: int | None = None, key_limit: int | None = None) -> None:
    execute(conn, declare([Policy(name=NAME, limit=limit, key_limit=key_limit)]))
    conn.commit()


def by_hand(conn: Connection, limit: int | None = None, key_limit: int | None = None) -> None:
    assert execute(conn, limit_job(NAME, limit=limit, key_limit=key_limit))
    conn.commit()


def keys(conn: Connection) -> dict[str | None, int]:
    found = conn.execute("SELECT key, count(*)::int FROM pgqueue.job GROUP BY key").fetchall()
    conn.commit()
    return dict(found)


@pytest.mark.parametrize("lift", ["by hand", "in code"])
def test_what_waits_runs_freely_when_a_limit_is_lifted(conn: Connection, a: Holder, lift: str) -> None:
    declared(conn, 2)
    made = put(conn, 12)
    running = a.lanes()
    assert ids(running) == made[:2]
    by_hand(conn, 0) if lift == "by hand" else declared(conn)
    assert ids(a.claim()) == made[2:]
    a.begin()
    a.run(ack(running))
    a.give_back((QUEUE, f"@{NAME}"), running[0].lease)
    a.commit()
    assert a.lanes() == []
    assert conn.execute("SELECT count(*) FROM pgqueue.lane").fetchone() == (0,)


@pytest.mark.parametrize("limit", ["by hand", "in code"])
def test_what_waits_is_limited_when_a_limit_is_set(
    conn: Connection, a: Holder, b: Holder, limit: str
) -> None:
    declared(conn)
    made = put(conn, 12)
    delayed = enqueue(conn, 1, delay=timedelta(hours=1))
    conn.commit()
    running = a.claim(3)
    by_hand(conn, 2) if limit == "by hand" else declared(conn, 2)
    assert b.claim() == []
    assert ids(b.lanes()) == made[3:5]
    assert b.lanes() == []
    assert keys(conn) == {None: 3, f"@{NAME}": 10}
    assert ids(running) == made[:3]
    fall_due(conn, delayed)
    conn.commit()


def test_a_type_that_is_declared_after_its_jobs_were_enqueued_is_limited(conn: Connection, a: Holder) -> None:
    made = put(conn, 3)
    declared(conn, 1)
    assert a.claim() == []
    assert ids(a.lanes()) == made[:1]


def test_jobs_of_a_key_limit_get_their_ordering_key_back_when_it_is_lifted_and_the_other_way_round(
    conn: Connection, a: Holder
) -> None:
    declared(conn)
    made = put(conn, 3, "k")
    put(conn, 1, "é")
    a.route()
    by_hand(conn, key_limit=2)
    assert keys(conn) == {f"@{NAME}@k": 3, f"@{NAME}@é": 1}
    assert [i for i in ids(a.lanes()) if i in made] == made[:2]
    by_hand(conn, key_limit=0)
    assert keys(conn) == {f"@{NAME}@k": 2, f"@{NAME}@é": 1, "k": 1}  # what runs keeps its own
    assert ids(a.lanes()) == made[2:]


def test_what_was_enqueued_by_a_transaction_that_was_open_runs_freely_when_the_limit_is_lifted_again(
    conn: Connection, a: Holder, dsn: str
) -> None:
    declared(conn, 1)
    with psycopg.connect(dsn) as late:
        made = enqueue(late, 3)
        by_hand(conn, 0)
        late.commit()
    assert a.claim() == []
    by_hand(conn, 0)
    assert ids(a.claim()) == made


def test_a_lane_that_loses_its_head_to_a_key_limit_is_taken_by_whoever_knows_the_next(
    conn: Connection, a: Holder
) -> None:
    declared(conn)
    put(conn, 1, "k")
    other = enqueue(conn, 1, key="k", name="other")
    conn.commit()
    a.route()
    by_hand(conn, key_limit=1)
    assert ids(a.lanes(of=scope(names=["other"]), routing=False)) == other


def test_claims_beside_changes_of_a_limit_lose_no_job_and_take_none_twice(
    conn: Connection, dsn: str, backlog: bool
) -> None:
    declared(conn)
    made, done, stop, lock = put(conn, 400), Counter[int](), threading.Event(), threading.Lock()

    def work(nonce: int) -> None:
        with Holder(dsn, nonce, backlog=backlog) as holder:
            while not stop.is_set():
                jobs = holder.claim(5)
                with lock:
                    done.update(ids(jobs))
                holder.run(ack(jobs))
                holder.begin()
                held = holder.lanes(depth=3)
                holder.commit()
                with lock:
                    done.update(ids(held))
                holder.begin()
                holder.run(ack(held))
                for lease in {job.lease for job in held}:
                    holder.give_back((QUEUE, f"@{NAME}"), lease)
                holder.commit()

    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2))
        stack.callback(stop.set)
        working = [pool.submit(work, nonce) for nonce in (11, 12)]
        for turn in range(12):
            by_hand(conn, 3 * (turn % 2))
            made += put(conn, 30)
        by_hand(conn, 0)

        def empty() -> bool:
            by_hand(conn, 0)
            left = conn.execute("SELECT count(*) FROM pgqueue.job").fetchone()
            conn.commit()
            return left == (0,)

        eventually(empty, timeout=30)
    for one in working:
        one.result()
    assert done == Counter(made)


@pytest.mark.parametrize(("limit", "key_limit", "now"), [(1, None, f"@{NAME}"), (None, 1, f"@{NAME}@k")])
def test_a_dead_letter_of_before_the_limit_is_limited_when_it_is_replayed(
    conn: Connection, a: Holder, limit: int | None, key_limit: int | None, now: str
) -> None:
    declared(conn)
    made = put(conn, 3, "k" if key_limit else None)
    for job in a.lanes(depth=3) or a.claim():
        a.run(bury([Failed(claim=token(job), outcome=buried())], "w"))
    assert keys(conn) == {}
    declared(conn, limit, key_limit)
    assert execute(conn, replay(Filter(ids=made))).ids == tuple(made)
    conn.commit()
    assert keys(conn) == {now: 3}


def test_a_dead_letter_of_a_limit_that_was_lifted_runs_freely_when_it_is_replayed(
    conn: Connection, a: Holder
) -> None:
    declared(conn, 1)
    made = put(conn)
    (job,) = a.lanes()
    a.run(bury([Failed(claim=token(job), outcome=buried())], "w"))
    declared(conn)
    execute(conn, replay(Filter(ids=made)))
    conn.commit()
    assert ids(a.claim()) == made


@pytest.mark.parametrize("limit", ["by hand", "in code"])
@pytest.mark.parametrize("was", [None, 3])
def test_a_type_whose_jobs_have_keys_takes_no_limit_until_they_have_run(
    conn: Connection, limit: str, was: int | None
) -> None:
    """From then on an enqueue with a key would fail, and its whole transaction."""
    declared(conn, key_limit=was)
    put(conn, 1, "k")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="a limit or its jobs have keys"):
        by_hand(conn, 2, 0) if limit == "by hand" else declared(conn, 2)
    conn.rollback()
    put(conn, 1, "k")
    conn.execute("DELETE FROM pgqueue.job")
    conn.commit()
    by_hand(conn, 2, 0) if limit == "by hand" else declared(conn, 2)
    assert conn.execute("SELECT slots FROM pgqueue.job_type").fetchone() == (2,)
