"""Concurrency limits: never more than N jobs of a type at once over all workers, never stuck below it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from pgqueue import App, BadOption, Job
from tests.db.limited import Begun, Gauge, Start, begun, quickest, workers
from tests.server import Connection
from tests.waiting import eventually


@pytest.fixture
def start(dsn: str) -> Iterator[Start]:
    with workers(dsn) as begin:
        yield begin


def limited(limit: int) -> tuple[App, Gauge]:
    app, gauge = App(), Gauge()

    @app.job("export", limit=limit)
    def export(n: int) -> None:
        gauge.visit()

    return app, gauge


def none_left(conn: Connection, table: str = "job") -> bool:
    (left,) = conn.execute(
        sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier("pgqueue", table))
    ).fetchone() or (None,)
    conn.rollback()
    return left == 0


def enqueue(conn: Connection, app: App, count: int) -> None:
    app.types["export"].enqueue_many(conn, list(range(count)))
    conn.commit()


def test_no_more_than_the_limit_run_over_all_workers(conn: Connection, start: Start) -> None:
    app, gauge = limited(3)
    for _ in range(3):
        start(app)
    enqueue(conn, app, 30)
    eventually(lambda: gauge.inside == 3)
    gauge.open.set()
    eventually(lambda: none_left(conn), timeout=30)
    assert (gauge.done, gauge.most) == (30, 3)
    eventually(lambda: none_left(conn, "lane"))


def test_a_limit_can_be_raised_and_lowered_while_jobs_run(conn: Connection, start: Start, dsn: str) -> None:
    app, gauge = limited(2)
    start(app, concurrency=16)
    enqueue(conn, app, 60)
    eventually(lambda: gauge.inside == 2)
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("UPDATE pgqueue.job_type SET slots = 5 WHERE name = 'export'")
        eventually(lambda: gauge.inside == 5)
        admin.execute("UPDATE pgqueue.job_type SET slots = 1 WHERE name = 'export'")
    gauge.open.set()
    eventually(lambda: gauge.done >= 10, timeout=30)
    gauge.most = 0
    eventually(lambda: none_left(conn), timeout=30)
    assert gauge.done == 60
    assert gauge.most <= 2  # the attempt that was inside when the counter was put back, and the one slot


def test_a_saturated_limit_does_not_delay_other_jobs(conn: Connection, start: Start) -> None:
    app, gauge = limited(1)
    other = threading.Event()

    @app.job("other")
    def run() -> None:
        other.set()

    start(app)
    enqueue(conn, app, 50)
    eventually(lambda: gauge.inside == 1)
    run.enqueue(conn)
    conn.commit()
    assert other.wait(60)
    assert gauge.inside == 1
    gauge.open.set()


@pytest.mark.parametrize("queue", [None, "other"])
def test_a_hundred_thousand_jobs_of_a_saturated_name_delay_no_other(
    conn: Connection, start: Start, queue: str | None
) -> None:
    """pg-boss#756: ten thousand jobs of a saturated group in front, and one of another waited behind them."""
    app, gauge = limited(1)
    other = threading.Event()

    @app.job("other", queue=queue)
    def run() -> None:
        other.set()

    start(app, queues=("default", "other"))
    conn.execute(
        "SELECT FROM pgqueue.enqueue_many('export', (SELECT json_agg(i) FROM generate_series(1, 100000) i))"
    )
    conn.commit()
    eventually(lambda: gauge.inside == 1, timeout=60)
    run.enqueue(conn)
    conn.commit()
    assert other.wait(60)
    assert gauge.inside == 1
    gauge.open.set()
    conn.execute("DELETE FROM pgqueue.job WHERE lease = 0")
    conn.commit()


def test_a_lost_worker_gives_its_slots_back_when_its_lease_ends(
    conn: Connection, start: Start, dsn: str
) -> None:
    """A recovered job kept its slot and blocked a queue of limit 1 for ever."""
    app, gauge = limited(1)
    gauge.open.set()
    enqueue(conn, app, 3)
    with psycopg.connect(dsn, autocommit=True) as dead:  # a worker that claims and vanishes
        dead.execute(
            "INSERT INTO pgqueue.job_type (name, slots) VALUES ('export', 1) ON CONFLICT (name) DO UPDATE SET slots = 1"
        )
        dead.execute("UPDATE pgqueue.job SET key = '@export'")
        dead.execute("SELECT * FROM pgqueue.route(ARRAY['default'], ARRAY[0]::bigint[])")
        rows = dead.execute(
            "SELECT id FROM pgqueue.lane_claim(ARRAY['default'], ARRAY[5]::smallint[], ARRAY[0]::bigint[], "
            "ARRAY['export'], 5, 5, 5, 77, interval '1 s')"
        ).fetchall()
        assert len(rows) == 3
    start(app)
    eventually(lambda: none_left(conn), timeout=10)
    assert gauge.done == 3
    assert gauge.most == 1


def test_a_limited_job_takes_no_ordering_key_and_a_limit_is_a_positive_number(
    conn: Connection, start: Start
) -> None:
    app, _ = limited(2)
    start(app)
    with pytest.raises(BadOption, match="limit"):
        app.types["export"].using(key="customer").enqueue(conn, 1)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="limit of 2"):
        conn.execute("SELECT pgqueue.enqueue('export', '1', key => 'customer')")
    conn.rollback()
    with pytest.raises(BadOption, match="limit"):
        app.job("none", limit=0)


def test_a_rate_holds_over_all_workers_and_over_an_empty_queue(
    conn: Connection, start: Start, dsn: str
) -> None:
    app, jobs = App(), list[Begun]()

    @app.job("call", rate="10/s", limit=2)
    def call(n: int, job: Job) -> None:
        jobs.append(begun(dsn, job))

    for _ in range(2):
        start(app)
    for n in range(30):
        if n == 15:  # an empty queue in between must not grant a new burst
            eventually(lambda: len(jobs) == 15, timeout=30)
        call.enqueue(conn, n)
        conn.commit()
    eventually(lambda: len(jobs) == 30, timeout=30)
    assert quickest(jobs, 12) >= 0.95  # 12 more need at least a second, less the burst of 2


def test_a_rate_can_be_changed_while_jobs_wait(conn: Connection, start: Start, dsn: str) -> None:
    app, begun = App(), []

    @app.job("call", rate="1/h")
    def call(n: int) -> None:
        begun.append(n)

    start(app)
    call.enqueue_many(conn, list(range(20)))
    conn.commit()
    eventually(lambda: begun == [0])
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("UPDATE pgqueue.job_type SET rate_per_s = 1000 WHERE name = 'call'")
    eventually(lambda: len(begun) == 20, timeout=30)


@pytest.mark.parametrize("rate", ["", "100", "0/s", "-1/s", "5/fortnight", "x/min"])
def test_a_rate_that_is_none_is_refused(rate: str) -> None:
    with pytest.raises(BadOption, match="rate"):
        App().job("call", rate=rate)
