"""What a relay does beside publishing, on a connection of its own: beat, listen, sample, prune.

It beats only while the publishing loop makes progress: a relay that hangs in its sink loses its partitions to
others, whatever its other threads do.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Event as Flag
from typing import Final
from uuid import UUID

import psycopg

from pgqueue.connection import execute
from pgqueue.dsn import one_line
from pgqueue.events import Bus, LoopFailed, LoopRecovered
from pgqueue.loop import Trouble, Wake
from relay import inbox, partitions
from relay.config import RelayConfig
from relay.cycle import Connection, connect
from relay.events import Pruned, RelayStopped
from relay.lag import lag
from relay.prune import prune, turn

LOOP: Final = "upkeep"
LOOK_S: Final = 0.2
PRUNE_EVERY_S: Final = 60.0
PRUNE_FOR_S: Final = 1.0
#: Events that were parked or waited when their page was pruned, and were published since, are looked for so often.
FROM_THE_START_S: Final = 3_600.0

_SESSION = (
    "SET statement_timeout = '10s'",
    "SET lock_timeout = '2s'",
    "SET idle_in_transaction_session_timeout = '60s'",
    "LISTEN pgqueue_outbox",
)


class Upkeep:
    """One loop on one connection. `alive` tells whether the publishing loop makes progress.

    It samples once `shared` is set: before a relay has taken its partitions they look like nobody's.
    """

    def __init__(
        self,
        config: RelayConfig,
        me: UUID,
        bus: Bus,
        wake: Wake,
        stop: Flag,
        alive: Callable[[], bool],
        shared: Flag,
    ) -> None:
        self.config = config
        self.progress = time.monotonic()
        self._me = me
        self._bus = bus
        self._wake = wake
        self._stop = stop
        self._alive = alive
        self._shared = shared
        self._trouble = Trouble()
        self._beat_at = 0.0
        self._sample_at = 0.0
        self._prune_at = time.monotonic() + random.uniform(0, PRUNE_EVERY_S)
        self._cursor = 0
        self._from_the_start_at = 0.0

    def run(self) -> None:
        """Work until told to stop; then give the partitions back and end the lease. Returns, never raises."""
        while True:
            try:
                with connect(self.config.dsn, f"{self.config.name} upkeep", _SESSION) as conn:
                    self._work(conn)
                    execute(conn, partitions.leave(self._me))
            except Exception as error:  # noqa: BLE001 - whatever happened, the loop goes on
                if self._stop.is_set():
                    self._bus.emit(RelayStopped(relay=self.config.name, given=False))
                    return
                self.progress = time.monotonic()
                delay = self._trouble.failed()
                self._bus.emit(LoopFailed(loop=LOOP, error=one_line(error), retry_in=delay))
                self._stop.wait(delay)
            else:
                self._bus.emit(RelayStopped(relay=self.config.name, given=True))
                return

    def _work(self, conn: Connection) -> None:
        config = self.config
        self._wake.set()  # whatever was notified while nobody listened
        while not self._stop.is_set():
            self.progress = now = time.monotonic()
            if now >= self._beat_at and self._alive():
                execute(conn, partitions.beat(self._me, config.name, timedelta(seconds=config.lease)))
                self._beat_at = now + config.lease / 3 * random.uniform(0.8, 1.0)
            if now >= self._sample_at and self._shared.is_set():
                self._sample_at = now + config.sample_every
                self._sample(conn)
            if now >= self._prune_at:
                self._prune_at = now + PRUNE_EVERY_S * random.uniform(0.8, 1.2)
                self._prune(conn)
            if (seconds := self._trouble.over()) is not None:
                self._bus.emit(LoopRecovered(loop=LOOP, seconds=seconds))
            for _ in conn.notifies(timeout=LOOK_S, stop_after=1):
                self._wake.set()

    def _sample(self, conn: Connection) -> None:
        try:
            self._bus.emit(execute(conn, lag()))
        except (psycopg.errors.QueryCanceled, psycopg.DataError):
            self._sample_at += (
                20 * self.config.sample_every
            )  # too many rows to count often, or an infinite time

    def _prune(self, conn: Connection) -> None:
        """Delete old rows for at most a second, unless another relay is at it."""
        config = self.config
        until = time.monotonic() + PRUNE_FOR_S
        if time.monotonic() >= self._from_the_start_at:
            self._cursor = 0
            self._from_the_start_at = time.monotonic() + FROM_THE_START_S
        events = keys = 0
        more = True
        while more and time.monotonic() < until:
            with conn.transaction():
                if not turn(conn):
                    break
                page = prune(conn, cursor=self._cursor, keep=config.retention)
                gone = execute(conn, inbox.prune(config.inbox_retention))
            if page.more and page.last is not None:
                self._cursor = page.last
            events += page.gone
            keys += gone
            more = page.more or gone > 0
        execute(conn, partitions.forget())
        if events or keys:
            self._bus.emit(Pruned(events=events, inbox_keys=keys))
