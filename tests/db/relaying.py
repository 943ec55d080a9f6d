"""A relay taken apart for tests: its loop one step at a time, and the checker of what it published."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID, uuid4

import psycopg

from pgqueue.connection import execute
from pgqueue.horizon import Horizon
from relay import partitions
from relay.cycle import Connection, Ledger, connect, cycle
from relay.event import Event
from relay.floors import Batch, Floors
from relay.publish import Look, RejectionPolicy
from tests.waiting import eventually


@dataclass(slots=True, kw_only=True)
class Stepper:
    """One relay that publishes into `log`, one cycle at each call. It owns every partition it finds in the table."""

    conn: Connection
    log: list[tuple[str, int]]
    me: UUID = field(default_factory=uuid4)
    floors: Floors = field(default_factory=Floors)
    ledger: Ledger = field(default_factory=Ledger)
    policy: RejectionPolicy = field(default_factory=RejectionPolicy)
    reject: Callable[[Event], str | None] = lambda _: None
    n: int = 100
    rows_read: int = 0

    def step(self, *, mark: bool = True) -> int:
        """Write down the last batch, read and publish the next; return how many were published."""
        asked = dict(self.floors.parts)
        return self._publish(self._absorb(self._look(asked), asked), mark=mark)

    def step_ahead(self, between: Callable[[], None]) -> int:
        """Publish two batches, the second read while the first was under way.

        `between` is called before that read and after it.
        """
        asked = dict(self.floors.parts)
        batch = self._absorb(self._look(asked), asked)
        above = self.floors.ahead(batch.events, ()) if batch.events else None
        between()
        seen = None if above is None else self._look(above)
        between()
        done = self._publish(batch, mark=True)
        if above is not None and seen is not None:
            done += self._publish(self._absorb(seen, above), mark=True)
        return done

    def _look(self, asked: Mapping[int, int]) -> Look:
        look, _ = cycle(
            self.conn, me=self.me, ledger=self.ledger, floors=asked, n=self.n, keep=True, policy=self.policy
        )
        self.rows_read += len(look.rows)
        return look

    def _absorb(self, look: Look, asked: Mapping[int, int]) -> Batch:
        return self.floors.absorb(look, asked=asked, n=self.n, now=time.monotonic())

    def _publish(self, batch: Batch, *, mark: bool) -> int:
        stopped: set[str] = set()
        unconfirmed: list[Event] = []
        done = 0
        for event in batch.events:
            reason = None if event.key in stopped else self.reject(event)
            if event.key in stopped or reason is not None:
                stopped.add(event.key)
                unconfirmed.append(event)
                if reason is not None:
                    self.ledger.rejected[event.id] = reason
            else:
                self.log.append((event.key, event.id))
                done += 1
                if mark:
                    self.ledger.confirmed.add(event.id)
        if not batch.moved or batch.events:
            self.floors.settle(unconfirmed)
        return done

    def drain(self, cycles: int = 6) -> None:
        """Step until `cycles` in a row found nothing."""
        quiet = 0
        while quiet < cycles:
            quiet = 0 if self.step() else quiet + 1


def stepper(dsn: str, log: list[tuple[str, int]] | None = None, *, patience: float = 1.0) -> Stepper:
    """Return a relay that has taken every partition."""
    conn = connect(dsn, "stepper")
    made = Stepper(
        conn=conn, log=[] if log is None else log, floors=Floors(horizon=Horizon(patience=patience))
    )
    execute(conn, partitions.beat(made.me, "stepper", timedelta(hours=1)))
    taken: list[int] = execute(conn, partitions.take(made.me, 64))
    made.floors.take(taken)
    return made


def cleared(dsn: str) -> str:
    """Empty a database that tests of a module share, with nobody left in it; return its DSN."""
    others = (
        "SELECT pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )
    with psycopg.connect(dsn, autocommit=True) as conn:
        eventually(lambda: conn.execute(others).rowcount == 0, look=0.001)
        conn.execute(
            "TRUNCATE pgqueue.outbox, pgqueue.relay, pgqueue.inbox, pgqueue.inbox_version, pgqueue.job"
        )
        conn.execute("UPDATE pgqueue.relay_partition SET owner = NULL")
        conn.execute("SELECT setval('pgqueue.outbox_idle', 0, false)")
        conn.execute("DROP TABLE IF EXISTS public.applied, public.aggregate")
    return dsn


def inversions(log: Iterable[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Return every first occurrence that came after one with a higher id: (aggregate, id, the higher one)."""
    highest: dict[str, int] = {}
    seen: set[tuple[str, int]] = set()
    wrong = []
    for key, id_ in log:
        if (key, id_) in seen:
            continue
        seen.add((key, id_))
        if id_ < highest.get(key, 0):
            wrong.append((key, id_, highest[key]))
        highest[key] = max(id_, highest.get(key, 0))
    return wrong


def missing(log: Sequence[tuple[str, int]], ids: Iterable[int]) -> set[int]:
    """Return which of these events were never published."""
    return set(ids) - {id_ for _, id_ in log}
