"""The pulse: heartbeats and chores, in a thread and on a connection of its own.

It shares nothing with the handlers but the interpreter: a handler that blocks its thread or its event loop cannot
delay a heartbeat. Beside the heartbeats it watches running attempts (over their time, cancelled, lease lost), and
takes its turn at promoting due jobs, ticks of schedules, pruning, folding counters and sampling depth.
"""

from __future__ import annotations

import os
import random
import select
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from pgqueue.age import age
from pgqueue.batch import fold as fold_batches
from pgqueue.claim import paused
from pgqueue.config import WorkerSettings
from pgqueue.depth import gauge, sample
from pgqueue.dsn import one_line
from pgqueue.engine import Engine
from pgqueue.events import Bus, DepthSampled, LoopFailed, LoopRecovered
from pgqueue.hand import Hand
from pgqueue.heartbeat import beat, heartbeat, lane_heartbeat, signals
from pgqueue.job import Claim
from pgqueue.loop import Trouble
from pgqueue.monitor import Monitor
from pgqueue.notebook import Notebook
from pgqueue.pipeline import Pipeline
from pgqueue.promote import notify, promote
from pgqueue.prune import chores, fold
from pgqueue.statement import Statement
from pgqueue.tick import LOOK, tick
from pgqueue.turn import bounds, turn

PROMOTE = timedelta(seconds=0.25)
AGE = timedelta(seconds=5)
#: A due time this far below the latest promoted one may still be committed and is looked for every time.
LATE = timedelta(seconds=30)
#: Rows in a full page of a chore, and pages it may do in a row: a table that grows faster than that stays behind.
PAGE = 1000
PAGES = 20
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


class Pulse:
    """Keeps one worker process alive in the database."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        hand: Hand,
        engine: Engine,
        monitor: Monitor,
        notebook: Notebook,
        connect: Callable[[], psycopg.Connection[Any]],
        bus: Bus,
        nonce: int,
    ) -> None:
        self._settings = settings
        self._visibility = timedelta(seconds=settings.visibility)
        self._hand = hand
        self._engine = engine
        self._monitor = monitor
        self._notebook = notebook
        self._connect = connect
        self._bus = bus
        self._nonce = nonce
        self._connection: psycopg.Connection[Any] | None = None
        self._trouble = Trouble()
        self._stop = threading.Event()
        self._reader, self._writer = os.pipe()
        self._bell = threading.Lock()
        self._rung = self._ended = False
        notebook.ring = self._ring
        self._promoted_to = LONG_AGO
        self._looked_whole_at = 0.0
        self._due: dict[str, float] = {}
        self.alive_at = time.monotonic()

    def stop(self) -> None:
        """End the loop; called from another thread."""
        with self._bell:  # the loop closes the pipe when it sees the flag
            self._stop.set()
            if not self._ended:
                os.write(self._writer, b".")

    def run(self) -> None:
        """Beat until stopped."""
        while not self._stop.is_set():
            try:
                self._turn()
                self.alive_at = time.monotonic()
                if (seconds := self._trouble.over()) is not None:
                    self._bus.emit(LoopRecovered(loop="heartbeat", seconds=seconds))
                self._rest()
            except Exception as error:  # noqa: BLE001 - without heartbeats every job in hand would be lost
                wait = self._trouble.failed()
                problem = f"{type(error).__name__}: {one_line(error)}"
                self._bus.emit(LoopFailed(loop="heartbeat", error=problem, retry_in=wait))
                if self._connection is not None:
                    self._connection.close()
                self._wait(wait)
        if self._connection is not None:
            self._connection.close()
        with self._bell:
            self._ended = True
            os.close(self._reader)
            os.close(self._writer)

    def _ring(self) -> None:
        """Wake the loop: a handler waits for its answer. Called from any thread."""
        with self._bell:
            if not self._rung and not self._ended:
                self._rung = True
                os.write(self._writer, b"!")

    def _turn(self) -> None:
        """Do whatever is due."""
        connection = self._open()
        settings = self._settings
        self._keep(connection)
        if self._is_due("signals", 1.0) and self._hand.held:
            with Pipeline(connection) as p:
                asked = p.send(signals(list(self._hand.held)))
            self._monitor.cancel(asked.result())
        if self._is_due("promote", PROMOTE.total_seconds()):
            self._promote(connection)
        if self._is_due("schedule", LOOK.total_seconds()):
            tick(connection, between=lambda: self._keep(connection))
            self._fold_batches(connection)
        if self._is_due("beat", 5.0):
            draining = self._engine.draining.is_set()
            alive = beat(self._nonce, len(self._hand.held), self._monitor.overrun, draining=draining)
            self._chore(connection, alive)
        if self._is_due("paused", 1.0):
            with Pipeline(connection) as p:
                found = p.send(paused())
            self._engine.set_paused(found.result())
        if self._is_due("sample", AGE.total_seconds()):
            self._chore(connection, sample(settings.queues))
            self._chore(connection, age(AGE))
        if self._is_due("prune", 10.0):
            self._prune(connection)
        if self._is_due("depth", settings.depth_every) and self._bus.wants(DepthSampled):
            self._tell_depth(connection)

    def _keep(self, connection: psycopg.Connection[Any]) -> None:
        """Do what may not wait for a chore to end: called between any two of them."""
        self._monitor.look()
        if self._is_due("heartbeat", self._settings.visibility / 3):
            self._heartbeat(connection)
        self._serve_handlers(connection)

    def _chore(self, connection: psycopg.Connection[Any], statement: Statement[Any]) -> int:
        """Run a chore in a transaction of its own, for no longer than heartbeats can wait; return how many rows.

        One that fails is left for its next turn: nothing else may depend on it.
        """
        try:
            with Pipeline(connection) as p:
                p.begin()
                p.send(bounds(self._visibility / 3))
                done = p.send(statement)
                p.commit()
        except psycopg.Error as error:
            if connection.closed:
                raise
            problem = f"{type(error).__name__}: {one_line(error)}"
            self._bus.emit(LoopFailed(loop="chores", error=problem, retry_in=0.0))
            return 0
        self._keep(connection)
        return done.count

    def _serve_handlers(self, connection: psycopg.Connection[Any]) -> None:
        """Write and read checkpoints at once, progress once a second."""
        self._notebook.answer(connection)
        if self._is_due("progress", 1.0):
            self._notebook.write(connection)

    def _heartbeat(self, connection: psycopg.Connection[Any]) -> None:
        held = [Claim(c.id, c.lease) for c in list(self._hand.held.values())]
        if not held:
            self._monitor.lost(())
            return
        with Pipeline(connection) as p:
            standing = p.send(heartbeat(held, self._visibility))
            if lanes := [(h.queue, h.key, h.lease) for h in list(self._hand.lanes.values())]:
                p.send(lane_heartbeat(lanes, self._visibility))
        stand = set(standing.result())
        self._monitor.lost(claim for claim in held if claim.id not in stand)

    def _promote(self, connection: psycopg.Connection[Any]) -> None:
        now = time.monotonic()
        if now - self._looked_whole_at > 60.0:
            self._looked_whole_at, self._promoted_to = now, LONG_AGO
        while not self._stop.is_set():
            with Pipeline(connection) as p:
                promoted = p.send(
                    promote(
                        max(LONG_AGO, self._promoted_to - LATE) if self._promoted_to > LONG_AGO else LONG_AGO,
                        PROMOTE,
                    )
                )
            got = promoted.result()
            if got.latest is not None:
                self._promoted_to = max(self._promoted_to, got.latest)
                self._hand.wake.set()
                with Pipeline(connection) as p:
                    p.send(notify(got.queues))
            if got.count < 1000:
                return
            self._keep(connection)

    def _prune(self, connection: psycopg.Connection[Any]) -> None:
        with Pipeline(connection) as p:
            mine = p.send(turn("prune", timedelta(seconds=10)))
        if not mine.result():
            return
        dead = self._settings.dead_retention
        for statement in (
            fold(),
            *chores(
                timedelta(seconds=self._settings.ledger), None if dead is None else timedelta(seconds=dead)
            ),
        ):
            for _ in range(PAGES):
                if self._chore(connection, statement) < PAGE:
                    break

    def _fold_batches(self, connection: psycopg.Connection[Any]) -> None:
        """Complete batches whose last member ended in a transaction of its own, or whose worker died right after."""
        with Pipeline(connection) as p:
            mine = p.send(turn("batch", timedelta(seconds=1)))
        if mine.result():
            self._chore(connection, fold_batches())

    def _tell_depth(self, connection: psycopg.Connection[Any]) -> None:
        with Pipeline(connection) as p:
            found = p.send(gauge(self._settings.queues))
        for d in found.result():
            self._bus.emit(
                DepthSampled(
                    queue=d.queue,
                    ready=d.ready,
                    delayed=d.delayed,
                    in_flight=d.in_flight,
                    blocked=d.blocked,
                    oldest_ready_s=d.oldest_ready_s,
                )
            )

    def _rest(self) -> None:
        """Wait for the next chore, for a handler that asks, or stop."""
        self._wait(max(0.0, min(self._due.values(), default=0.25) - time.monotonic()))

    def _wait(self, seconds: float) -> None:
        if select.select([self._reader], [], [], seconds)[0]:
            with self._bell:
                self._rung = False
                os.read(self._reader, 4096)

    def _is_due(self, chore: str, period: float) -> bool:
        now = time.monotonic()
        if now < self._due.get(chore, 0.0):
            return False
        self._due[chore] = now + period * random.uniform(0.8, 1.0)
        return True

    def _open(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            connection = self._connect()
            self._connection = connection
            self._due.clear()  # heartbeats first: the last ones may not have arrived
        return self._connection
