"""In which order a worker runs jobs: queues, reserved slots, priorities, pauses, delays, keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pgqueue.config import WorkerSettings, parse_queues
from pgqueue.events import Bus, JobsClaimed
from pgqueue.worker import Worker
from tests.process.apps import every
from tests.process.apps.effects import Effects
from tests.process.apps.every import Work
from tests.server import Connection
from tests.waiting import eventually

Start = Callable[..., Worker]


@pytest.fixture
def start(dsn: str, effects: Effects) -> Iterator[Start]:
    """Give a way to start workers in this process: `queues` as on the command line."""
    with ExitStack() as stack:

        def begin(queues: str = "default", *, concurrency: int = 1, **settings: Any) -> Worker:
            names, reserved = parse_queues(queues, concurrency)
            values = {
                "queues": names,
                "reserved": reserved,
                "concurrency": concurrency,
                "prefetch": 0,
                **settings,
            }
            worker = Worker(every.app, dsn, WorkerSettings(**values))
            worker.start()
            stack.callback(worker.stop)
            return worker

        yield begin


def left(conn: Connection) -> int:
    row = conn.execute("SELECT count(*) FROM pgqueue.job").fetchone()
    conn.rollback()
    return int(str(row[0])) if row else 0


def test_queues_are_served_strictly_in_the_order_written(
    conn: Connection, start: Start, effects: Effects
) -> None:
    for n, queue in enumerate(["bulk", "default", "critical"]):
        every.work.using(queue=queue, priority=n).enqueue_many(conn, [Work(n=10 * n + i) for i in range(3)])
    conn.commit()
    start("critical,default,bulk")
    eventually(lambda: left(conn) == 0)
    assert effects.ns("end") == [20, 21, 22, 10, 11, 12, 0, 1, 2]


def test_a_reserved_slot_runs_a_critical_job_while_bulk_jobs_hold_the_rest(
    conn: Connection, start: Start, effects: Effects, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    every.work.using(queue="bulk").enqueue_many(conn, [Work(n=n, gate=str(gate)) for n in range(6)])
    conn.commit()
    start("critical,default,bulk", concurrency=4)  # with three queues the first keeps a slot
    effects.wait("start", 3)
    for n in (100, 101):
        every.work.using(queue="critical").enqueue(conn, Work(n=n))
        conn.commit()
        eventually(lambda n=n: n in effects.ns("end"))  # type: ignore[misc]
    assert sorted(effects.ns("start")) == [0, 1, 2, 100, 101]
    gate.touch()
    eventually(lambda: left(conn) == 0)


def test_the_same_for_async_handlers(
    conn: Connection, start: Start, effects: Effects, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    every.awaits.using(queue="bulk").enqueue_many(conn, [Work(n=n, gate=str(gate)) for n in range(6)])
    conn.commit()
    start("critical=2,bulk", concurrency=5)
    effects.wait("start", 3)
    every.awaits.using(queue="critical").enqueue_many(conn, [Work(n=n, gate=str(gate)) for n in (100, 101)])
    conn.commit()
    effects.wait("start", 5)
    assert sorted(effects.ns("start")) == [0, 1, 2, 100, 101]
    gate.touch()
    eventually(lambda: left(conn) == 0)


def test_lower_priorities_run_first_and_equal_ones_in_their_order(
    conn: Connection, start: Start, effects: Effects
) -> None:
    for priority in (9, 0, 5, 3, 7, 1, 8, 2, 6, 4):
        every.work.using(priority=priority).enqueue_many(conn, [Work(n=10 * priority + i) for i in range(2)])
    conn.commit()
    start()
    eventually(lambda: left(conn) == 0)
    assert effects.ns("end") == [10 * p + i for p in range(10) for i in range(2)]


def test_a_prefetched_bulk_job_yields_to_a_critical_one(
    conn: Connection, start: Start, effects: Effects, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    every.work.using(queue="bulk").enqueue_many(conn, [Work(n=n, gate=str(gate)) for n in range(10)])
    conn.commit()
    worker = start("critical,bulk", prefetch=5)
    eventually(lambda: worker.in_flight == 6)
    every.work.using(queue="critical").enqueue(conn, Work(n=100))
    conn.commit()
    gate.touch()
    eventually(lambda: left(conn) == 0)
    assert effects.ns("start").index(100) <= 6


def idle_again(worker: Worker) -> None:
    """Wait until the worker has looked once more and has nothing in hand."""
    looked = worker._engine.alive_at
    eventually(
        lambda: worker._engine.alive_at > looked and worker._hand.wake._waiting and not worker.in_flight
    )


@pytest.mark.parametrize("what", ["queue", "name"])
def test_a_pause_stops_claims_within_about_a_second_and_a_resume_finds_what_was_passed(
    conn: Connection, start: Start, effects: Effects, what: str
) -> None:
    every.work.enqueue(conn, Work(n=1))
    conn.commit()
    worker = start()
    effects.wait("end")
    if what == "queue":
        conn.execute("INSERT INTO pgqueue.queue (name, paused) VALUES ('default', true)")
    else:
        conn.execute("UPDATE pgqueue.job_type SET paused = true WHERE name = 'work'")
    conn.commit()
    n = 1

    def one_more() -> None:
        nonlocal n
        n += 1
        every.work.enqueue(conn, Work(n=n))
        conn.commit()

    def heard_of() -> bool:
        one_more()  # jobs that come while the news travels may still run
        paused = worker._engine._intake.paused
        return "default" in paused.queues or "work" in paused.names

    eventually(heard_of, timeout=5, look=0.05)
    idle_again(worker)
    ran = len(effects.all("end"))
    one_more()
    idle_again(worker)
    assert left(conn) > 0
    every.bare.using(queue="other").enqueue(conn)  # so that the sequence goes on
    every.payload_only.enqueue(conn, Work(n=0))
    conn.commit()
    if what == "name":  # its neighbours run, so the floor passes the paused ones
        eventually(lambda: 0 in effects.ns("end"))
        ran += 1
    assert len(effects.all("end")) == ran
    conn.execute("UPDATE pgqueue.queue SET paused = false")
    conn.execute("UPDATE pgqueue.job_type SET paused = false")
    conn.commit()
    eventually(lambda: {*range(1, n + 1)} <= set(effects.ns("end")))


def test_a_delayed_job_runs_not_before_its_time_and_soon_after(
    conn: Connection, start: Start, effects: Effects
) -> None:
    start(concurrency=4)
    before = time.monotonic()
    every.work.using(run_after=timedelta(seconds=0.7)).enqueue(conn, Work(n=1))
    every.work.using(run_after=timedelta(hours=1)).enqueue(conn, Work(n=2))
    conn.commit()
    (ran,) = effects.wait("end")
    assert ran.n == 1
    assert ran.at >= before + 0.7
    assert ran.at < before + 20.0  # promoted every 250 ms, on a machine that stalls


def test_an_idle_worker_starts_a_job_at_once_and_costs_next_to_nothing(
    conn: Connection, start: Start, effects: Effects
) -> None:
    start(concurrency=2, poll=60.0)
    every.work.enqueue(conn, Work(n=0))
    conn.commit()
    effects.wait("end")
    for n in range(1, 11):
        every.work.enqueue(conn, Work(n=n))
        conn.commit()
        committed_at = time.monotonic()
        (ran,) = eventually(lambda n=n: [e for e in effects.all("start") if e.n == n], look=0.002)  # type: ignore[misc]
        assert ran.at - committed_at < 20.0


def test_a_worker_that_polls_seldom_is_woken_however_long_it_has_waited(
    conn: Connection, start: Start
) -> None:
    """Its announcement holds for five seconds: past that, a job waited for the poll."""
    worker = start(poll=60.0, sweep=30.0)
    worker._engine._poll._next = 60.0  # as after minutes

    def announced() -> int:
        row = conn.execute(
            "SELECT max(last_value) FROM pg_sequences WHERE schemaname = 'pgqueue' AND sequencename ~ '^idle_'"
        ).fetchone()
        conn.rollback()
        return int(str(row[0])) if row and row[0] else 0

    first = eventually(announced)
    eventually(lambda: announced() > first, timeout=6)


def test_jobs_of_a_key_run_one_at_a_time_in_order_beside_others(
    conn: Connection, start: Start, effects: Effects
) -> None:
    for n in range(30):
        every.work.using(key=f"customer-{n % 3}").enqueue(conn, Work(n=n, seconds=0.002))
    every.awaits.using(key="customer-0").enqueue(conn, Work(n=30))  # another kind of handler, the same key
    every.work.using(key="customer-0").enqueue(conn, Work(n=33))
    conn.commit()
    start(concurrency=8, prefetch=None)
    eventually(lambda: left(conn) == 0)
    for key in range(3):
        mine = [n for n in effects.ns("end") if n % 3 == key]
        assert mine == sorted(mine)
    assert effects.overlaps(lambda e: e.n % 3) == []
    assert len(effects.all("start")) == 32


def test_a_retry_of_the_head_blocks_its_key_and_no_other(
    conn: Connection, start: Start, effects: Effects
) -> None:
    every.work.using(key="slow").enqueue_many(conn, [Work(n=1, fails=2), Work(n=2)])
    every.work.using(key="quick").enqueue_many(conn, [Work(n=n) for n in range(10, 20)])
    conn.commit()
    start(concurrency=4)
    eventually(lambda: left(conn) == 0)
    slow = [(e.n, e.attempt) for e in effects.all("start") if e.n < 10]
    assert slow == [(1, 1), (1, 2), (1, 3), (2, 1)]
    assert [n for n in effects.ns("end") if n >= 10] == list(range(10, 20))


def test_a_key_waits_out_the_backoff_of_its_head(conn: Connection, start: Start, effects: Effects) -> None:
    conn.execute("SELECT pgqueue.enqueue('asks', '\"retry\"', key => 'k', max_attempts => 2)")
    every.work.using(key="k").enqueue(conn, Work(n=2))
    conn.commit()
    start(concurrency=4)
    eventually(lambda: left(conn) == 0)
    assert [(e.n, e.attempt) for e in effects.all("start")] == [(0, 1), (0, 2), (2, 1)]


def test_a_worker_tells_how_many_it_claims(dsn: str, conn: Connection, effects: Effects) -> None:
    every.work.enqueue_many(conn, [Work(n=n) for n in range(20)])
    conn.commit()
    bus, counts = Bus(), []
    bus.subscribe(JobsClaimed, lambda event: counts.append(event.count))
    worker = Worker(every.app, dsn, WorkerSettings(concurrency=2), bus)
    worker.start()
    eventually(lambda: left(conn) == 0)
    worker.stop()
    assert sum(counts) == 20
