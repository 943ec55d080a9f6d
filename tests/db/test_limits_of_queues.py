"""Limits and rates of a queue: exact over all workers and by live leases, never stuck, no part of anybody else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from pgqueue import App, BadOption, Job
from pgqueue.connection import execute
from pgqueue.depth import sample
from pgqueue.finish import Failed, ack, bury, release, retry, snooze
from pgqueue.job import Claimed
from pgqueue.limits import Limits, adopt, as_declared, gate, gate_pass, limit_job, limit_queue, limits
from tests.db.limited import Begun, Gauge, Start, begun, count, quickest, workers
from tests.factories import (
    MINUTE,
    QUEUE,
    Connection,
    Holder,
    buried,
    enqueue,
    ids,
    lose,
    retried,
    token,
    wipe,
)
from tests.waiting import eventually


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


@pytest.fixture
def start(dsn: str) -> Iterator[Start]:
    with workers(dsn) as begin:
        yield begin


def limit(conn: Connection, n: int | None = None, **options: Any) -> None:
    execute(conn, limit_queue(QUEUE, limit=n, **options))
    conn.commit()


def put(conn: Connection, n: int = 1) -> list[int]:
    made = enqueue(conn, n)
    conn.commit()
    return made


def ack_all(a: Holder, jobs: list[Claimed]) -> object:
    return a.run(ack(jobs))


def retry_all(a: Holder, jobs: list[Claimed]) -> object:
    return a.run(retry([Failed(claim=token(job), outcome=retried()) for job in jobs], "w"))


def bury_all(a: Holder, jobs: list[Claimed]) -> object:
    return a.run(bury([Failed(claim=token(job), outcome=buried()) for job in jobs], "w"))


def snooze_all(a: Holder, jobs: list[Claimed]) -> object:
    return a.run(snooze([token(job) for job in jobs], [60.0] * len(jobs)))


def release_all(a: Holder, jobs: list[Claimed]) -> object:
    return a.run(release([token(job) for job in jobs]))


def through(holder: Holder, want: int = 100) -> list[Claimed]:
    """Claim through the gate as a worker does, and commit."""
    holder.begin()
    (n, _) = holder.run(gate(QUEUE, want))
    jobs = holder.claim(n) if n else []
    holder.run(gate_pass(QUEUE, ids(jobs)))
    holder.commit()
    return jobs


def test_the_gate_lets_as_many_through_as_the_limit_and_the_next_when_one_ends(
    conn: Connection, a: Holder, b: Holder
) -> None:
    limit(conn, 3)
    made = put(conn, 10)
    first = through(a)
    assert ids(first) == made[:3]
    assert through(b) == []
    a.run(ack(first[:2]))
    assert ids(through(b)) == made[3:5]
    assert through(a) == []


def test_who_finds_somebody_at_the_gate_passes_by_and_does_not_wait(
    conn: Connection, a: Holder, b: Holder
) -> None:
    """pgqueuer#761: a limit of one was exceeded by two workers."""
    limit(conn, 1)
    made = put(conn, 3)
    a.begin()
    assert a.run(gate(QUEUE, 5))[0] == 1
    assert through(b) == []
    jobs = a.claim(1)
    a.run(gate_pass(QUEUE, ids(jobs)))
    a.commit()
    assert ids(jobs) == made[:1]
    assert through(b) == []


def test_a_claim_that_is_rolled_back_leaves_no_permit(conn: Connection, a: Holder, b: Holder) -> None:
    limit(conn, 1)
    made = put(conn, 2)
    a.begin()
    assert a.run(gate(QUEUE, 1))[0] == 1
    a.run(gate_pass(QUEUE, ids(a.claim(1))))
    a.rollback()
    assert ids(through(b)) == made[:1]


def test_a_lost_job_keeps_its_permit_until_it_is_claimed_again_and_then_too(
    conn: Connection, a: Holder, b: Holder
) -> None:
    """solid_queue#761, dbos#805: a slot is neither released twice nor kept for ever."""
    limit(conn, 2)
    made = put(conn, 4)
    assert len(through(a)) == 2
    lose(conn, made)
    conn.commit()
    assert through(b) == []
    again = b.suspects()
    assert ids(again) == made[:2]
    assert through(b) == []
    b.run(ack(again))
    assert ids(through(b)) == made[2:]


def test_a_lost_job_that_is_given_back_unrun_keeps_its_permit(conn: Connection, a: Holder, b: Holder) -> None:
    """It is claimed again without the gate; were its place free, one more would run."""
    limit(conn, 1)
    made = put(conn, 2)
    assert len(through(a)) == 1
    lose(conn, made)
    conn.commit()
    b.run(release([token(job) for job in b.suspects()]))
    assert through(a) == []
    assert ids(b.suspects(high=1)) == made[:1]
    assert through(a) == []


def test_a_lost_job_that_nobody_wants_blocks_the_queue_for_a_minute_at_most(
    conn: Connection, a: Holder
) -> None:
    limit(conn, 1)
    made = put(conn, 2)
    assert len(through(a)) == 1
    conn.execute("UPDATE pgqueue.job SET deadline = now() - interval '61 s' WHERE lease <> 0")
    conn.commit()
    assert ids(through(a)) == made[1:]


def test_a_lost_job_with_a_key_comes_through_the_gate_again_and_its_old_lease_cannot_be_revived(
    conn: Connection, a: Holder, b: Holder
) -> None:
    from pgqueue.heartbeat import heartbeat
    from pgqueue.job import Claim

    limit(conn, 1)
    (job_id,) = enqueue(conn, 1, key="k")
    conn.commit()
    a.begin()
    assert a.run(gate(QUEUE, 1))[0] == 1
    (job,) = a.lanes()
    a.run(gate_pass(QUEUE, [job.id]))
    a.commit()
    lose(conn, [job_id])
    conn.commit()
    b.begin()
    assert b.run(gate(QUEUE, 1))[0] == 1
    b.commit()
    assert a.run(heartbeat([Claim(job.id, job.lease)], MINUTE)) == []
    b.begin()
    assert b.run(gate(QUEUE, 1))[0] == 1
    (again,) = b.lanes()
    b.run(gate_pass(QUEUE, [again.id]))
    b.commit()
    assert again.id == job_id
    b.begin()
    assert b.run(gate(QUEUE, 1))[0] == 0
    b.commit()


def test_a_rate_lets_a_burst_through_and_then_keeps_its_pace_and_grants_no_more_for_resting(
    conn: Connection, a: Holder
) -> None:
    limit(conn, rate=0.001, burst=5)
    made = put(conn, 20)
    assert ids(through(a)) == made[:5]
    a.begin()
    n, wait = a.run(gate(QUEUE, 5))
    a.commit()
    assert n == 0
    assert 900 < wait <= 1000
    conn.execute("UPDATE pgqueue.queue SET tat = tat - interval '2010 s'")
    conn.commit()
    assert ids(through(a)) == made[5:7]
    conn.execute("UPDATE pgqueue.queue SET tat = now() - interval '1 year'")
    conn.commit()
    assert ids(through(a)) == made[7:12]


def test_a_clock_that_went_back_costs_a_burst_at_most(conn: Connection, a: Holder) -> None:
    limit(conn, rate=10.0, burst=5)
    put(conn, 20)
    conn.execute("UPDATE pgqueue.queue SET tat = now() + interval '1 year'")
    conn.commit()
    a.begin()
    n, wait = a.run(gate(QUEUE, 5))
    a.commit()
    assert n == 0
    assert wait <= 0.2


def test_tokens_are_spent_on_jobs_that_began_and_not_on_those_that_were_asked_for(
    conn: Connection, a: Holder
) -> None:
    limit(conn, rate=0.001, burst=5)
    made = put(conn, 2)
    assert ids(through(a)) == made
    more = put(conn, 5)
    assert ids(through(a)) == more[:3]


def test_limit_and_rate_of_a_queue_and_of_a_name_hold_together(conn: Connection, start: Start) -> None:
    app, gauge = App(), Gauge()

    @app.job("narrow", limit=2)
    def narrow(n: int) -> None:
        gauge.visit("narrow")

    @app.job("wide")
    def wide(n: int) -> None:
        gauge.visit("wide")

    limit(conn, 5)
    for _ in range(2):
        start(app, concurrency=16)
    narrow.enqueue_many(conn, list(range(10)))
    wide.enqueue_many(conn, list(range(20)))
    conn.commit()
    eventually(lambda: gauge.inside == 5, timeout=30)
    gauge.open.set()
    eventually(lambda: count(conn) == 0, timeout=60)
    assert (gauge.done, gauge.most) == (30, 5)
    assert gauge.most_of["narrow"] <= 2


def test_the_limit_of_a_queue_is_set_raised_lowered_and_lifted_while_workers_run(
    conn: Connection, start: Start
) -> None:
    app, gauge = App(), Gauge()

    @app.job("work")
    def work(n: int) -> None:
        gauge.visit()

    for _ in range(2):
        start(app, concurrency=4, prefetch=0)
    work.enqueue_many(conn, list(range(1_000)))  # more than run before the gauge is closed again
    conn.commit()
    eventually(lambda: gauge.inside == 8)
    limit(conn, 3)
    # Those that run already count: their workers give them permits.
    eventually(lambda: count(conn, "permit") == 8)
    gauge.open.set()
    eventually(lambda: gauge.done >= 12, timeout=30)
    gauge.open.clear()
    eventually(lambda: gauge.inside == 3, timeout=30)
    gauge.most = 0
    limit(conn, 5)
    eventually(lambda: gauge.inside == 5, timeout=30)
    assert gauge.most == 5
    limit(conn, 0)
    eventually(lambda: gauge.inside == 8, timeout=30)
    gauge.open.set()
    eventually(lambda: count(conn) == 0, timeout=60)
    assert gauge.done == 1_000


def test_a_rate_of_a_queue_holds_over_all_workers(conn: Connection, start: Start, dsn: str) -> None:
    app, jobs = App(), list[Begun]()

    @app.job("call")
    def call(n: int, job: Job) -> None:
        jobs.append(begun(dsn, job))

    limit(conn, rate=20.0, burst=4)
    for _ in range(2):
        start(app)
    call.enqueue_many(conn, list(range(30)))
    call.using(key="k").enqueue_many(conn, list(range(10)))
    conn.commit()
    eventually(lambda: len(jobs) == 40, timeout=60)
    assert quickest(jobs, 24) >= 0.9  # 24 more need a second, less the burst of 4


def test_a_queue_at_its_limit_keeps_jobs_of_no_other_queue_waiting(conn: Connection, start: Start) -> None:
    app, gauge, other = App(), Gauge(), threading.Event()

    @app.job("slow", queue="slow")
    def slow(n: int) -> None:
        gauge.visit()

    @app.job("quick", queue="quick")
    def quick() -> None:
        other.set()

    execute(conn, limit_queue("slow", limit=2))
    conn.commit()
    start(app, queues=("slow", "quick"))
    slow.enqueue_many(conn, list(range(50)))
    conn.commit()
    eventually(lambda: gauge.inside == 2)
    quick.enqueue(conn)
    conn.commit()
    assert other.wait(60)
    assert gauge.most == 2
    gauge.open.set()


def test_a_queue_behind_a_busy_one_comes_after_it_with_a_limit_too(conn: Connection, start: Start) -> None:
    app, order, go = App(), [], threading.Event()

    @app.job("first", queue="first")
    def first(n: int) -> None:
        go.wait(100)
        order.append("first")

    @app.job("second", queue="second")
    def second(n: int) -> None:
        go.wait(100)
        order.append("second")

    execute(conn, limit_queue("second", limit=50))
    conn.commit()
    first.enqueue_many(conn, list(range(40)))
    second.enqueue_many(conn, list(range(40)))
    conn.commit()
    start(app, queues=("first", "second"), concurrency=2, prefetch=0)
    go.set()
    eventually(lambda: len(order) == 80, timeout=60)
    assert order[:30].count("second") <= 4  # what was taken before the first queue had been looked at


@pytest.mark.usefixtures("alone")
def test_a_worker_of_queues_without_limits_never_looks_at_permits(
    conn: Connection, start: Start, dsn: str
) -> None:
    """river#1145: global limits cost those who had none half of their throughput."""
    app, done = App(), []

    @app.job("work")
    def work(n: int) -> None:
        done.append(n)

    def scans() -> int:
        found = conn.execute(
            "SELECT (seq_scan + coalesce(idx_scan, 0))::int FROM pg_stat_user_tables WHERE relname = 'permit'"
        ).fetchone()
        conn.commit()
        return int(str(found[0])) if found else 0

    before = scans()
    execute(conn, limit_queue("elsewhere", limit=1))
    conn.commit()
    worker = start(app)
    work.enqueue_many(conn, list(range(500)))
    conn.commit()
    eventually(lambda: len(done) == 500, timeout=30)
    worker.stop()  # what a session has counted is there when it has ended
    with psycopg.connect(dsn, autocommit=True) as other:
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pgqueue-worker%'"
        eventually(lambda: other.execute(sessions).fetchone() == (0,))
    assert scans() == before
    assert count(conn, "permit") == 0


def test_a_rate_alone_needs_no_permits(conn: Connection, a: Holder) -> None:
    limit(conn, rate=1.0)
    put(conn, 1)
    assert len(through(a)) == 1
    assert count(conn, "permit") == 0


@pytest.mark.parametrize("end", [ack_all, retry_all, bury_all, snooze_all, release_all])
def test_however_an_attempt_ends_its_permit_ends_with_it(
    conn: Connection, a: Holder, b: Holder, end: Callable[[Holder, list[Claimed]], object]
) -> None:
    """pgqueuer#475, #630: what was released kept its slot; solid_queue#761: a slot was released twice."""
    limit(conn, 2)
    put(conn, 5)
    jobs = through(a)
    assert len(jobs) == 2
    assert through(b) == []
    end(a, jobs)
    assert len(through(b)) == 2
    end(a, jobs)  # the zombie's second try frees nothing
    assert through(a) == []


def test_limits_are_listed_with_what_is_held_and_go_back_to_what_the_code_says(
    conn: Connection, start: Start
) -> None:
    app, gauge = App(), Gauge()

    @app.job("narrow", limit=2)
    def narrow(n: int) -> None:
        gauge.visit()

    limit(conn, 5, rate=100.0)
    start(app)
    narrow.enqueue_many(conn, list(range(4)))
    conn.commit()
    eventually(lambda: gauge.inside == 2)
    plain: dict[str, Any] = {"key_limit": None, "key_rate": None}
    found = execute(conn, limits())
    assert found == [
        Limits(kind="job", name="narrow", limit=2, rate=None, burst=None, held=2, changed=False, **plain),
        Limits(kind="queue", name=QUEUE, limit=5, rate=100.0, burst=100.0, held=2, changed=False, **plain),
    ]
    assert execute(conn, limit_job("narrow", limit=3))
    conn.commit()
    eventually(lambda: gauge.inside == 3)
    assert execute(conn, limits())[0].changed
    assert execute(conn, as_declared("narrow"))
    assert not execute(conn, as_declared("nobody"))
    conn.commit()
    start(app)
    assert execute(conn, limits())[0].limit == 2
    gauge.open.set()


def test_depth_and_state_call_a_job_blocked_that_waits_for_its_queue_as_long_as_leases_live(
    conn: Connection, a: Holder
) -> None:
    limit(conn, 1)
    made = put(conn, 3)
    through(a)

    def depths() -> list[tuple[object, ...]]:
        conn.execute("DELETE FROM pgqueue.depth_sample")
        execute(conn, sample([QUEUE]))
        found = [
            conn.execute(f"SELECT ready, in_flight, blocked FROM pgqueue.{view}".encode()).fetchone()
            for view in ("queue_depth", "queue_gauge")
        ]
        conn.commit()
        return [tuple(row or ()) for row in found]

    def states() -> list[object]:
        return [(conn.execute("SELECT pgqueue.job_state(%s)", [i]).fetchone() or (None,))[0] for i in made]

    assert depths() == [(0, 1, 2)] * 2
    assert states() == ["in_flight", "blocked", "blocked"]
    lose(conn, made)  # with nobody at work they are ready, or no alarm would ring
    conn.commit()
    assert depths() == [(3, 0, 0)] * 2
    assert states() == ["ready"] * 3


def test_jobs_that_end_before_they_are_adopted_get_no_permit(conn: Connection, a: Holder) -> None:
    limit(conn, 5)
    made = put(conn, 2)
    jobs = a.claim(1)
    a.run(adopt(QUEUE, made))
    assert count(conn, "permit") == 1
    a.run(ack(jobs))
    a.run(adopt(QUEUE, made))
    assert len(through(a)) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"limit": -1},
        {"limit": 100_001},
        {"limit": True},
        {"rate": -1.0},
        {"rate": float("nan")},
        {"rate": float("inf")},
        {"rate": 1.0, "burst": 0},
        {"rate": 1.0, "burst": -1},
    ],
)
def test_a_limit_of_a_queue_that_is_none_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadOption):
        limit_queue(QUEUE, **options)
    with pytest.raises(BadOption):
        limit_queue(" ", limit=1)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("'q', slots => -1", "limit of -1"),
        ("'q', rate_per_s => -1", "rate of -1"),
        ("'q', rate_per_s => 'NaN'", "rate of NaN"),
        ("'q', rate_per_s => 1, burst => 0", "burst of 0"),
        ("'q', burst => 3", "goes with a rate"),
        ("' ', slots => 1", "queue is blank"),
    ],
)
def test_the_sql_function_of_queues_refuses_what_makes_no_sense(
    conn: Connection, arguments: str, match: str
) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=match):
        conn.execute(f"SELECT pgqueue.limit_queue({arguments})".encode())
