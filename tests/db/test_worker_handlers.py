"""A worker runs handlers of every kind, each job apart from the others."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pgqueue import App, Backoff, Job
from pgqueue.config import WorkerSettings
from pgqueue.connection import execute
from pgqueue.events import Bus, Event, HandlerOverran, HandlerReturned, JobsReleased, LeasesLost
from pgqueue.jobs import workers
from pgqueue.report import Report
from pgqueue.worker import Worker
from tests.process.apps import every
from tests.process.apps.effects import Effects
from tests.process.apps.every import Work
from tests.server import Connection
from tests.waiting import eventually

Start = Callable[..., Worker]


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def start(dsn: str, effects: Effects, events: list[Event]) -> Iterator[Start]:
    """Give a way to start workers in this process."""
    with ExitStack() as stack:

        def begin(app: App = every.app, **settings: Any) -> Worker:
            bus = Bus()
            bus.subscribe(Event, events.append)
            worker = Worker(app, dsn, WorkerSettings(**{"visibility": 30.0, "grace": 5.0, **settings}), bus)
            worker.start()
            stack.callback(worker.stop)
            return worker

        yield begin


def none_left(conn: Connection) -> bool:
    left = conn.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (0,)
    conn.rollback()
    return left


def dead(conn: Connection) -> list[tuple[object, ...]]:
    rows = conn.execute(
        "SELECT name, reason, error_type, attempt FROM pgqueue.dead_job ORDER BY id"
    ).fetchall()
    conn.rollback()
    return rows


def test_def_handlers_run_in_parallel(
    conn: Connection, start: Start, effects: Effects, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    every.work.enqueue_many(conn, [Work(n=n, gate=str(gate)) for n in range(4)])
    conn.commit()
    start()
    assert len({e.thread for e in effects.wait("start", 4)}) == 4
    assert effects.all("end") == []
    gate.touch()
    effects.wait("end", 4)
    eventually(lambda: none_left(conn))


def test_async_handlers_share_one_thread_and_run_at_once(
    conn: Connection, start: Start, effects: Effects, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    every.awaits.enqueue_many(conn, [Work(n=n, gate=str(gate)) for n in range(6)])
    conn.commit()
    start()
    assert len({e.thread for e in effects.wait("start", 6)}) == 1
    gate.touch()
    effects.wait("end", 6)
    eventually(lambda: none_left(conn))


def test_context_variables_do_not_leak_from_one_async_job_to_another(
    conn: Connection, start: Start, effects: Effects
) -> None:
    every.awaits.enqueue_many(conn, [Work(n=n, seconds=0.001 * (n % 3)) for n in range(30)])
    conn.commit()
    start(concurrency=3)
    ended = effects.wait("end", 30)
    assert {e.note for e in effects.all("start")} == {"clean"}
    assert all(e.note == f"job {e.n}" for e in ended)


def test_an_async_handler_over_its_time_is_cancelled(
    conn: Connection, start: Start, effects: Effects
) -> None:
    every.awaits_short.enqueue(conn, Work(n=1, seconds=30))
    conn.commit()
    start()
    effects.wait("cancelled")
    assert eventually(lambda: dead(conn)) == [("awaits-short", "timeout", "Timeout", 1)]
    assert effects.all("end") == []


def test_a_def_handler_over_its_time_is_given_up_and_its_late_result_ignored(
    conn: Connection, start: Start, effects: Effects, tmp_path: Path
) -> None:
    """oban 532: the late result of an attempt that was given up changed what its successor had decided."""
    gate = tmp_path / "gate"
    every.short.enqueue(conn, Work(n=1, gate=str(gate)))
    conn.commit()
    start()
    assert eventually(lambda: dead(conn)) == [("short", "timeout", "Timeout", 1)]
    gate.touch()
    effects.wait("end")
    every.work.enqueue(conn, Work(n=2))  # the slot is free again
    conn.commit()
    eventually(lambda: 2 in effects.ns("end"))
    assert len(dead(conn)) == 1


def test_a_slot_that_a_handler_over_its_time_keeps_is_told_and_counted_until_it_returns(
    conn: Connection,
    start: Start,
    events: list[Event],
    effects: Effects,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "pgqueue")
    Report(start().bus, every_job=False)
    gate = tmp_path / "gate"
    ref = every.short.enqueue(conn, Work(n=1, gate=str(gate)))
    every.awaits_short.enqueue(conn, Work(n=2, seconds=30))
    conn.commit()

    def counted() -> list[int]:
        found = [w.overrun for w in execute(conn, workers())]
        conn.rollback()
        return found

    def overruns() -> list[Event]:
        return [e for e in events if isinstance(e, HandlerOverran | HandlerReturned)]

    eventually(lambda: counted() == [1])
    (told,) = overruns()
    assert told == HandlerOverran(job_id=ref.id, name="short", attempt=1, limit=0.3, overrun=1)
    gate.touch()
    effects.wait("end")
    eventually(lambda: counted() == [0])
    (_, ended) = overruns()
    assert isinstance(ended, HandlerReturned)
    assert (ended.job_id, ended.name, ended.overrun) == (ref.id, "short", 0)
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if r.getMessage().startswith("overrun")]
    assert [level for level, _ in lines] == ["WARNING", "INFO"]
    assert all(f"short {ref.id} attempt=1" in line for _, line in lines)


def test_a_key_goes_on_while_the_handler_of_its_job_that_ran_over_its_time_still_hangs(
    conn: Connection, start: Start
) -> None:
    app, go, ran = App(), threading.Event(), []

    @app.job("hangs", timeout=0.2, max_attempts=1)
    def hangs(n: int) -> None:
        go.wait(300)

    @app.job("next")
    def following(n: int) -> None:
        ran.append(n)

    hangs.using(key="k").enqueue(conn, 1)
    following.using(key="k").enqueue(conn, 2)
    conn.commit()
    start(app, visibility=600.0)
    try:
        eventually(lambda: ran == [2])
        assert not go.is_set()
    finally:
        go.set()


def test_a_process_handler_runs_in_another_process(conn: Connection, start: Start, effects: Effects) -> None:
    every.computes.enqueue_many(conn, [Work(n=n) for n in range(3)])
    conn.commit()
    start(concurrency=2)
    ended = effects.wait("end", 3)
    assert os.getpid() not in {e.pid for e in ended}
    assert len({e.pid for e in ended}) <= 2
    eventually(lambda: none_left(conn))


def test_a_child_process_that_dies_is_a_failed_attempt(
    conn: Connection, start: Start, effects: Effects
) -> None:
    every.computes.enqueue(conn, Work(n=1, dies=1))
    every.computes.using(max_attempts=2).enqueue(conn, Work(n=2, dies=9))
    conn.commit()
    start(concurrency=2)
    assert [(e.n, e.attempt) for e in effects.wait("end")] == [(1, 2)]
    (row,) = eventually(lambda: dead(conn))
    assert row == ("computes", "exhausted", "pgqueue.processes.ChildDied", 2)
    eventually(lambda: none_left(conn))


def command_of(pid: int) -> bytes:
    """Return the command line of a process; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_process_handler_over_its_time_is_killed(conn: Connection, start: Start, effects: Effects) -> None:
    every.computes.enqueue(conn, Work(n=0))
    conn.commit()
    start(concurrency=1)
    (child,) = effects.wait("end")
    # In the same child, whose pid is known: one that stalls is killed before it leaves a note.
    every.computes_short.enqueue(conn, Work(n=1, seconds=60))
    conn.commit()
    assert eventually(lambda: dead(conn)) == [("computes-short", "timeout", "Timeout", 1)]
    eventually(lambda: b"spawn" not in command_of(child.pid))
    every.computes.enqueue(conn, Work(n=2))
    conn.commit()
    effects.wait("end", 2)


def test_handlers_take_a_payload_a_job_both_or_nothing(
    conn: Connection, start: Start, effects: Effects
) -> None:
    every.bare.enqueue(conn)
    every.payload_only.enqueue(conn, Work(n=7))
    every.job_only.using(max_attempts=3).enqueue(conn)
    conn.commit()
    start()
    ended = effects.wait("end", 3)
    assert sorted((e.n, e.note) for e in ended) == [(0, ""), (0, "job-only default 1/3"), (7, "")]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("work", '{"n": "seven"}'),
        ("work", "null"),
        ("work", '{"n": 1e400}'),
        ("awaits", "[1]"),
        ("computes", "[1]"),
    ],
)
def test_an_undecodable_payload_is_buried_while_the_rest_of_its_batch_runs(
    conn: Connection, start: Start, effects: Effects, name: str, bad: str
) -> None:
    kind = every.app.types[name]
    kind.enqueue_many(conn, [Work(n=n) for n in range(4)])
    conn.execute(
        "INSERT INTO pgqueue.job (name, queue, priority, payload) VALUES (%s, 'default', 5, %s)", [name, bad]
    )
    kind.enqueue_many(conn, [Work(n=n) for n in range(4, 9)])
    conn.commit()
    start(concurrency=10)
    effects.wait("end", 9, timeout=40)  # nine processes may have to start
    ((found, reason, error, attempt),) = eventually(lambda: dead(conn))
    assert (found, reason, attempt) == (name, "undecodable", 1)
    assert "Validation" in str(error) or "Decode" in str(error)
    assert sorted(effects.ns("end")) == list(range(9))
    assert {e.attempt for e in effects.all("end")} == {1}


def test_a_name_this_worker_does_not_know_stays_pending_and_uncounted(
    conn: Connection, start: Start, effects: Effects
) -> None:
    """formbricks 9123, proletarian 18: an old worker finished what it did not know, or burnt its attempts."""
    old = App()
    old.job("bare")(every.bare.handler)
    every.work.enqueue(conn, Work(n=1))
    every.bare.enqueue(conn)
    conn.commit()
    first = start(old)
    effects.wait("end")
    eventually(
        lambda: conn.execute("SELECT count(*) FROM pgqueue.job WHERE name = 'bare'").fetchone() == (0,)
    )
    row = conn.execute("SELECT name, attempt, lease, lost FROM pgqueue.job").fetchall()
    conn.rollback()
    assert row == [("work", 0, 0, 0)]
    eventually(lambda: first.in_flight == 0)  # its row goes before the worker has the answer
    start()
    effects.wait("end", 2)
    assert [e.attempt for e in effects.all("start")] == [1]


def test_a_handler_that_leaves_with_system_exit_has_failed(
    conn: Connection, start: Start, effects: Effects
) -> None:
    every.exits.using(max_attempts=1).enqueue(conn, Work())
    every.work.enqueue(conn, Work(n=2))
    conn.commit()
    start(concurrency=1)
    effects.wait("end")
    assert eventually(lambda: dead(conn)) == [("exits", "exhausted", "SystemExit", 1)]


def test_an_async_handler_that_is_cancelled_from_within_has_failed_and_is_not_lost(
    conn: Connection, start: Start, effects: Effects
) -> None:
    app = App()

    @app.job("cancels-itself", max_attempts=1)
    async def cancels_itself() -> None:
        raise asyncio.CancelledError

    cancels_itself.enqueue(conn)
    conn.commit()
    start(app)
    assert eventually(lambda: dead(conn)) == [
        ("cancels-itself", "exhausted", "asyncio.exceptions.CancelledError", 1)
    ]


@pytest.mark.parametrize(
    ("answer", "starts", "died"),
    [
        ("fine", [1], []),
        ("retry", [1, 2, 3], [("asks", "exhausted", "pgqueue.errors.Retry", 3)]),
        ("snooze", [1, 1], []),
        ("permanent", [1], [("asks", "permanent", "pgqueue.errors.Permanent", 1)]),
    ],
)
def test_a_handler_says_how_its_job_goes_on(
    conn: Connection,
    start: Start,
    effects: Effects,
    answer: str,
    starts: list[int],
    died: list[tuple[object, ...]],
) -> None:
    every.asks.using(max_attempts=3).enqueue(conn, answer)
    conn.commit()
    start()
    eventually(lambda: none_left(conn))
    assert [e.attempt for e in effects.all("start")] == starts
    assert dead(conn) == died


def test_a_failed_job_runs_again_and_leaves_a_line_in_the_log(
    conn: Connection, start: Start, effects: Effects
) -> None:
    every.work.enqueue(conn, Work(n=1, fails=2))
    conn.commit()
    start()
    effects.wait("end")
    assert [e.attempt for e in effects.all("start")] == [1, 2, 3]
    log = conn.execute(
        "SELECT attempt, outcome, error_type, error, worker FROM pgqueue.attempt_log ORDER BY at"
    ).fetchall()
    assert [row[:4] for row in log] == [
        (1, "retry", "RuntimeError", "attempt 1 was to fail"),
        (2, "retry", "RuntimeError", "attempt 2 was to fail"),
    ]
    assert all(str(row[4]).endswith(f":{os.getpid()}") for row in log)


def test_a_job_somebody_cancels_while_it_runs_never_runs_again(
    conn: Connection, start: Start, effects: Effects
) -> None:
    """river discussion 1603, procrastinate 511."""
    job = every.awaits.enqueue(conn, Work(n=1, seconds=60))
    conn.commit()
    start()
    effects.wait("start")
    conn.execute("INSERT INTO pgqueue.job_signal (job_id) VALUES (%s)", [job.id])
    conn.commit()
    effects.wait("cancelled")
    eventually(lambda: none_left(conn))
    assert dead(conn) == []
    assert conn.execute("SELECT count(*) FROM pgqueue.job_signal").fetchone() == (0,)


def test_a_worker_that_stops_leaves_no_thread_behind(dsn: str, effects: Effects) -> None:
    before = set(threading.enumerate())
    worker = Worker(every.app, dsn, WorkerSettings(visibility=1.0))
    worker.start()
    assert worker.stop()
    eventually(lambda: {t for t in threading.enumerate() if t.name.startswith("pgqueue")} <= before)


def test_a_worker_that_stops_while_idle_does_so_at_once(start: Start) -> None:
    worker = start(poll=60.0, grace=40.0)
    worker._engine._poll._next = 60.0
    eventually(lambda: worker._hand.wake._waiting)
    began = time.monotonic()
    assert worker.stop()
    assert time.monotonic() - began < 30, "one poll would take longer"


def test_twenty_restarts_do_not_cost_a_healthy_job_an_attempt(
    conn: Connection, dsn: str, effects: Effects
) -> None:
    every.awaits.using(max_attempts=2).enqueue(conn, Work(n=1, seconds=60))
    conn.commit()
    for n in range(20):
        worker = Worker(every.app, dsn, WorkerSettings(grace=0.0))
        worker.start()
        effects.wait("start", n + 1)
        worker.stop()  # waits a second for the cancelled handler, which may need longer
        eventually(worker._engine.stopped.is_set)
    row = conn.execute("SELECT attempt, lost, lease FROM pgqueue.job").fetchone()
    assert row == (0, 0, 0)
    assert {e.attempt for e in effects.all("start")} == {1}


def test_a_slot_whose_handler_hangs_claims_nothing_until_it_returns(
    conn: Connection, start: Start, effects: Effects, events: list[Event], tmp_path: Path
) -> None:
    """dbos 805, solid_queue 761: a slot was counted free while its handler ran, or was never given back."""
    gate = tmp_path / "gate"
    every.short.enqueue(conn, Work(n=1, gate=str(gate)))
    conn.commit()
    worker = start(concurrency=1)
    eventually(lambda: dead(conn))
    every.work.enqueue(conn, Work(n=2))
    conn.commit()
    assert eventually(worker.stalled) == "slots: each one holds a handler that ran over its time"
    other = App()
    other.job("bare")(every.bare.handler)
    every.bare.enqueue(conn)
    conn.commit()
    start(other)  # somebody else makes progress, and this one leaves the rest alone
    effects.wait("end")
    assert worker.in_flight == 0
    assert not [e for e in events if isinstance(e, JobsReleased)]
    gate.touch()
    eventually(lambda: none_left(conn))
    assert worker.stalled() is None


def test_an_attempt_that_was_given_up_does_not_end_the_next_one(
    conn: Connection, start: Start, effects: Effects, events: list[Event], tmp_path: Path
) -> None:
    app = App()
    gate, over = tmp_path / "gate", threading.Event()
    attempts: list[int] = []

    @app.job("hangs", timeout=0.5, backoff=Backoff(base=600, cap=600, jitter="none"))
    def hangs(job: Job) -> None:
        attempts.append(job.attempt)
        if job.attempt == 1:
            eventually(gate.exists)
            attempts.append(-1)
        else:
            over.wait(50)

    hangs.using(timeout=60).enqueue(conn)
    conn.execute("UPDATE pgqueue.job SET timeout_s = 0.5")
    conn.commit()
    start(app, concurrency=2)
    eventually(lambda: attempts == [1])

    def let_it_retry() -> bool:
        again = "UPDATE pgqueue.job SET timeout_s = 60, run_at = clock_timestamp() WHERE run_at IS NOT NULL"
        waited = conn.execute(again).rowcount == 1
        conn.commit()
        return waited

    eventually(let_it_retry)
    eventually(lambda: attempts == [1, 2])
    gate.touch()
    eventually(lambda: attempts == [1, 2, -1])
    over.set()
    eventually(lambda: none_left(conn))
    assert attempts == [1, 2, -1]
    assert not [e for e in events if isinstance(e, LeasesLost)]
