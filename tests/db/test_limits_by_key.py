"""Limits by key: so many jobs of a key at once, never more, never fewer for no reason; other keys go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest

from pgqueue import App, BadOption, Job
from pgqueue.connection import execute
from pgqueue.declare import Policy, declare
from pgqueue.finish import Failed, retry
from pgqueue.limits import limit_job
from tests.db.limited import Begun, Gauge, Start, begun, count, quickest, workers
from tests.factories import (
    NAME,
    QUEUE,
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
from tests.waiting import eventually

#: Every test of lanes runs with both forms of their claim (see conftest).
BOTH_CLAIMS = True


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


@pytest.fixture
def start(dsn: str) -> Iterator[Start]:
    with workers(dsn) as begin:
        yield begin


def limited(conn: Connection, n: int, rate: float | None = None) -> None:
    execute(conn, declare([Policy(name=NAME, key_limit=n, key_rate=rate)]))
    conn.commit()


def put(conn: Connection, n: int, key: str) -> list[int]:
    made = enqueue(conn, n, key=key)
    conn.commit()
    return made


def test_of_each_key_as_many_run_at_once_as_the_limit_over_all_workers(
    conn: Connection, start: Start
) -> None:
    app, gauge = App(), Gauge()

    @app.job("sync", key_limit=2)
    def sync(account: str) -> None:
        gauge.visit(account)

    for _ in range(2):
        start(app, concurrency=16)
    for account in ("a", "b", "c"):
        sync.using(key=account).enqueue_many(conn, [account] * 8)
    conn.commit()
    eventually(lambda: gauge.inside == 6)
    assert gauge.inside_of == {"a": 2, "b": 2, "c": 2}
    gauge.open.set()
    eventually(lambda: count(conn) == 0, timeout=30)
    assert (gauge.done, dict(gauge.most_of)) == (24, {"a": 2, "b": 2, "c": 2})
    eventually(lambda: count(conn, "lane") == 0)


def test_a_handler_sees_the_key_that_was_given_and_a_long_one_is_limited_too(
    conn: Connection, start: Start
) -> None:
    app, seen = App(), []

    @app.job("sync", key_limit=2)
    def sync(n: int, job: Job) -> None:
        seen.append(job.key)

    start(app)
    sync.using(key="account-7").enqueue(conn, 1)
    sync.enqueue(conn, 2)
    sync.using(key="x" * 512).enqueue(conn, 3)
    conn.commit()
    eventually(lambda: len(seen) == 3)
    assert {"account-7", None} < set(seen)
    assert all(len(key or "") < 512 for key in seen)


def test_jobs_that_come_one_by_one_get_a_slot_each(conn: Connection, a: Holder) -> None:
    limited(conn, 3)
    made = []
    for _ in range(5):
        made += put(conn, 1, "k")
        a.lanes()
    held = [i for i in made if (found := row(conn, i)) and found["lease"] != 0]
    assert held == made[:3]


def test_a_held_claim_of_another_connection_lets_nobody_past_the_limit(
    conn: Connection, a: Holder, b: Holder
) -> None:
    """pgqueuer#761: a limit was exceeded while another worker's claim was under way."""
    limited(conn, 2)
    put(conn, 6, "k")
    a.route()
    a.begin()
    assert len(a.lanes(routing=False)) == 2
    assert b.lanes() == []
    a.commit()
    assert b.lanes() == []


def test_the_same_key_of_a_type_without_a_limit_is_an_ordering_key_of_its_own(
    conn: Connection, a: Holder
) -> None:
    limited(conn, 2)
    mine = put(conn, 3, "k")
    other = enqueue(conn, 2, key="k", name="other")
    conn.commit()
    both = scope(names=[NAME, "other"])
    assert ids(a.lanes(of=both)) == [*mine[:2], other[0]]


def test_a_retry_waits_by_itself_and_its_slot_goes_on(conn: Connection, a: Holder) -> None:
    limited(conn, 1)
    first, second = put(conn, 2, "k")
    (job,) = a.lanes()
    a.begin()
    a.run(retry([Failed(claim=token(job), outcome=retried(60.0))], "w"))
    a.give_back((QUEUE, str(job.key)), job.lease)
    a.commit()
    assert ids(a.lanes()) == [second]
    found = row(conn, first)
    assert found
    assert found["run_at"] is not None


def test_a_lost_worker_gives_all_slots_of_its_keys_back(conn: Connection, a: Holder, b: Holder) -> None:
    """dbos#805: a recovered job kept its slot."""
    limited(conn, 2)
    made = put(conn, 5, "k")
    assert ids(a.lanes()) == made[:2]
    assert b.lanes() == []
    lose(conn, made)
    conn.commit()
    assert ids(b.lanes()) == made[:2]
    assert b.lanes() == []
    assert a.lanes() == []


def test_a_key_limit_is_raised_and_lowered_while_jobs_run(conn: Connection, start: Start, dsn: str) -> None:
    app, gauge = App(), Gauge()

    @app.job("sync", key_limit=2)
    def sync(n: int) -> None:
        gauge.visit()

    start(app, concurrency=16)
    sync.using(key="k").enqueue_many(conn, list(range(40)))
    conn.commit()
    eventually(lambda: gauge.inside == 2)
    with psycopg.connect(dsn, autocommit=True) as admin:
        assert execute(admin, limit_job("sync", key_limit=6)) is True
        eventually(lambda: gauge.inside == 6)
        assert admin.execute("SELECT pgqueue.limit_job('sync', key_slots => 1)").fetchone() == (True,)
    start(app)  # declares its own limit of 2, which does not undo what was set
    gauge.open.set()
    eventually(lambda: gauge.done >= 12, timeout=30)
    gauge.most = 0
    eventually(lambda: count(conn) == 0, timeout=60)
    assert gauge.done == 40
    assert gauge.most <= 2  # one that was inside when the counter was put back, and the one slot


def test_a_key_rate_holds_for_each_key(conn: Connection, start: Start, dsn: str) -> None:
    app = App()
    jobs: dict[str, list[Begun]] = {"a": [], "b": []}

    @app.job("call", key_rate="5/s")
    def call(account: str, job: Job) -> None:
        jobs[account].append(begun(dsn, job))

    for _ in range(2):
        start(app)
    for account in jobs:
        call.using(key=account).enqueue_many(conn, [account] * 8)
    conn.commit()
    eventually(lambda: [len(of_one) for of_one in jobs.values()] == [8, 8], timeout=30)
    assert all(quickest(of_one, 6) >= 0.95 for of_one in jobs.values())


def test_a_saturated_key_with_a_long_backlog_delays_no_other(conn: Connection, start: Start) -> None:
    """pg-boss#756, #760: a saturated group filled the limit of the claim."""
    app, gauge, other = App(), Gauge(), threading.Event()

    @app.job("sync", key_limit=2)
    def sync(account: str) -> None:
        gauge.visit(account) if account == "hot" else other.set()

    start(app)
    conn.execute(
        "SELECT FROM pgqueue.enqueue_many('sync', (SELECT json_agg('hot'::text) FROM generate_series(1, 100000)),"
        " keys => array_fill('hot'::text, ARRAY[100000]))"
    )
    conn.commit()
    eventually(lambda: gauge.inside_of["hot"] == 2, timeout=60)
    sync.using(key="cool").enqueue(conn, "cool")
    conn.commit()
    assert other.wait(60)
    assert gauge.most_of["hot"] == 2
    gauge.open.set()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"key_limit": 0}, "key_limit"),
        ({"key_limit": -1}, "key_limit"),
        ({"key_limit": True}, "key_limit"),
        ({"key_rate": "abc/min"}, "key_rate"),
        ({"key_rate": "0/s"}, "key_rate"),
        ({"key_limit": 2, "limit": 3}, "limit or rate of its own"),
        ({"key_rate": "1/s", "rate": "1/s"}, "limit or rate of its own"),
        ({"key_limit": 2, "on_dead": "block"}, "no ordering key to block"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(BadOption, match=match):
        App().job("sync", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("slots => -1", "limit of -1"),
        ("slots => 10001", "limit of 10001"),
        ("key_slots => -1", "key limit of -1"),
        ("rate_per_s => -1", "rate of -1"),
        ("rate_per_s => 'NaN'", "rate of NaN"),
        ("slots => 2, key_slots => 2", "not both"),
    ],
)
def test_the_sql_function_refuses_what_makes_no_sense(conn: Connection, arguments: str, match: str) -> None:
    execute(conn, declare([Policy(name=NAME)]))
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=match):
        conn.execute(f"SELECT pgqueue.limit_job('work', {arguments})".encode())
    conn.rollback()
    assert execute(conn, limit_job("nobody", limit=1)) is False
