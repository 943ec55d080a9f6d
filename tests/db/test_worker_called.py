"""A notification starts a job by a short first look, and that look forgets nothing it does not look at."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from pgqueue import App
from pgqueue.events import LoopRecovered
from pgqueue.flights import Flights
from pgqueue.loop import Wake
from pgqueue.plan import Flight
from pgqueue.pulse import Pulse
from pgqueue.worker import Worker
from tests.db.limited import Start, workers
from tests.factories import enqueue
from tests.server import Connection
from tests.waiting import eventually


@pytest.fixture
def start(dsn: str) -> Iterator[Start]:
    """Give a way to start workers that, once idle, look by themselves only every 20 s."""
    with workers(dsn) as begin:
        yield partial(begin, visibility=30.0, grace=2.0, poll=20.0, sweep=20.0)


@pytest.fixture
def fired(monkeypatch: pytest.MonkeyPatch) -> list[Flight]:
    """Note the first looks that were made ready before the notification came."""
    seen: list[Flight] = []
    fire = Flights.fire

    def noted(self: Flights, flight: Flight) -> None:
        seen.append(flight)
        fire(self, flight)

    monkeypatch.setattr(Flights, "fire", noted)
    return seen


class Jobs:
    """An app whose jobs note their names."""

    def __init__(self) -> None:
        self.app, self.ran, self.gate = App(), list[str](), threading.Event()

        @self.app.job("plain")
        def plain() -> None:
            self.ran.append("plain")

        @self.app.job("keyed")
        def keyed() -> None:
            self.ran.append("keyed")

        @self.app.job("slow")
        def slow() -> None:
            self.ran.append("slow")
            self.gate.wait(100)

    def run(self, conn: Connection, name: str, **options: Any) -> None:
        """Enqueue a job and wait until it has begun."""
        before = len(self.ran)
        enqueue(conn, name=name, payload=None, **options)
        conn.commit()
        eventually(lambda: len(self.ran) > before)


def rested(worker: Worker) -> bool:
    """Tell whether the engine waits with its first look made ready, nothing in hand and its poll timer far away."""
    return worker._hand.wake._waiting and not worker._hand.held and worker._engine._poll._next > 1.0


def test_a_job_for_an_idle_worker_is_taken_by_the_look_that_was_made_ready(
    conn: Connection, start: Start, fired: list[Flight]
) -> None:
    jobs = Jobs()
    worker = start(jobs.app)
    for turn in range(5):
        eventually(lambda: rested(worker))
        jobs.run(conn, "plain")
        assert len(jobs.ran) == turn + 1
    assert len(fired) >= 3
    assert all(wish.few for flight in fired for wish in flight.plan.wishes)
    eventually(lambda: not worker._hand.held)


def test_a_first_look_that_finds_nothing_is_followed_by_a_whole_one(
    conn: Connection, start: Start, fired: list[Flight]
) -> None:
    jobs = Jobs()
    worker = start(jobs.app)
    for name, options in [
        ("plain", {}),
        ("plain", {}),
        ("keyed", {"key": "k"}),
        ("plain", {}),
        ("keyed", {"key": "l"}),
    ]:
        eventually(lambda: rested(worker))
        jobs.run(conn, name, **options)
    assert jobs.ran == ["plain", "plain", "keyed", "plain", "keyed"]
    assert fired


def test_a_slot_that_is_kept_for_a_queue_has_its_first_look_too(
    conn: Connection, start: Start, fired: list[Flight]
) -> None:
    jobs = Jobs()
    worker = start(jobs.app, queues=("critical", "default", "bulk"), reserved={"critical": 1})
    for queue in ("default", "critical", "bulk", "critical", "default"):
        eventually(lambda: rested(worker))
        jobs.run(conn, "plain", queue=queue)
    assert len(fired) >= 3
    assert all(len(flight.plan.wishes) == 2 for flight in fired)


def test_a_keyed_job_beside_the_one_a_first_look_has_found_does_not_wait_for_its_end(
    conn: Connection, start: Start
) -> None:
    jobs = Jobs()
    worker = start(jobs.app)
    for _ in range(2):
        eventually(lambda: rested(worker))
        jobs.run(conn, "plain")
    eventually(lambda: rested(worker))
    enqueue(conn, name="slow", payload=None)
    enqueue(conn, name="keyed", payload=None, key="k")
    conn.commit()
    eventually(lambda: "keyed" in jobs.ran)
    eventually(lambda: "slow" in jobs.ran)
    jobs.gate.set()


def test_a_worker_is_called_though_its_pulse_does_not_beat(
    conn: Connection, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    monkeypatch.setattr(Pulse, "_turn", lambda _: held.wait(100))
    jobs = Jobs()
    worker = start(jobs.app)
    eventually(lambda: rested(worker))
    jobs.run(conn, "plain")
    held.set()


def test_a_pause_beats_the_look_that_was_made_ready(conn: Connection, start: Start) -> None:
    jobs = Jobs()
    worker = start(jobs.app)
    for _ in range(2):
        eventually(lambda: rested(worker))
        jobs.run(conn, "plain")
    conn.execute(
        "INSERT INTO pgqueue.queue (name, paused) VALUES ('default', true)"
        " ON CONFLICT (name) DO UPDATE SET paused = true"
    )
    conn.commit()
    eventually(lambda: bool(worker._engine._intake.paused.queues))
    eventually(lambda: rested(worker))
    enqueue(conn, name="plain", payload=None)
    conn.commit()
    looked = worker._engine.alive_at
    eventually(lambda: worker._engine.alive_at > looked)
    assert len(jobs.ran) == 2
    conn.execute("UPDATE pgqueue.queue SET paused = false")
    conn.commit()
    eventually(lambda: len(jobs.ran) == 3)


def test_the_look_that_was_made_ready_is_dropped_where_something_else_has_changed_in_the_same_moment(
    conn: Connection, start: Start, fired: list[Flight], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag of the process may stand for a pause or a drain, which the look knows nothing of."""
    jobs = Jobs()
    worker = start(jobs.app)
    for _ in range(2):
        eventually(lambda: rested(worker))
        jobs.run(conn, "plain")
    eventually(lambda: rested(worker))
    wait, both = Wake.wait, threading.Event()

    def notified_and_raised(wake: Wake, timeout: float, *sockets: int) -> bool:
        if both.is_set() and sockets and wake is worker._hand.wake:
            both.clear()
            enqueue(conn, name="plain", payload=None)
            conn.execute("SELECT pg_notify('pgqueue_' || pgqueue.bucket('default'), '')")
            conn.commit()
            assert select.select(sockets, [], [], 100)[0]
            wake.set()
        return wait(wake, timeout, *sockets)

    monkeypatch.setattr(Wake, "wait", notified_and_raised)
    before = len(fired)
    both.set()
    worker._hand.wake.set()
    eventually(lambda: len(jobs.ran) == 3)
    assert len(fired) == before


def test_a_lost_connection_of_an_idle_worker_is_noticed_at_once_and_jobs_are_heard_of_again(
    conn: Connection, start: Start
) -> None:
    jobs = Jobs()
    worker = start(jobs.app)
    back = threading.Event()
    worker.bus.subscribe(LoopRecovered, lambda event: back.set() if event.loop == "claim" else None)
    eventually(lambda: rested(worker))
    rounds = worker._engine._rounds
    assert rounds is not None
    conn.execute("SELECT pg_terminate_backend(%s)", [rounds.connection.info.backend_pid])
    conn.commit()
    began = time.monotonic()
    assert back.wait(60)
    assert time.monotonic() - began < 20
    eventually(lambda: rested(worker))
    jobs.run(conn, "plain")
