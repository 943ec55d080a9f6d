"""`queue:`: an event becomes one job per subscriber, and is marked as published in the same transaction.

    @app.on_event("order.placed")
    def reserve_stock(order: Order, job: Job) -> None: ...

Exactly-once hand-over: there is no moment between publishing and marking. The event's payload is the job's,
its aggregate the ordering key, its CloudEvents attributes the headers. An event without subscriber is
published too. The jobs of one name are made by one call, in event order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import psycopg

from pgqueue.connection import execute
from pgqueue.dsn import connect, one_line
from pgqueue.errors import ConfigError, DatabaseUnreachable
from pgqueue.statement import Row, Statement, column, load, nothing
from relay.event import CONFIRMED, HELD, Event, Receipt, Rejected, attributes
from relay.sinks import SinkContext, SinkUnavailable

_SQL = load("relay", "queue_sink")

KEY_BYTES: Final = 512
#: SQLSTATE classes: data exception, constraint, program limit.
REFUSED: Final = frozenset({"22", "23", "54"})


class QueueSink:
    """Enqueues into the database that holds the outbox, on a connection of its own."""

    name = "queue:"
    ordered = True
    marks = True

    def __init__(self, context: SinkContext, subscribers: Callable[[str], Sequence[str]]) -> None:
        self._source = context.source
        self._dsn = context.dsn
        self._keep = context.keep
        self._subscribers = subscribers
        self._conn: psycopg.Connection[Row] | None = None

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Mark and enqueue all events in one transaction; if one cannot be enqueued, one transaction each."""
        fit = {event.id: event for event in events if _problem(event) is None}
        try:
            self._hand_over(list(fit.values()))
        except (psycopg.Error, DatabaseUnreachable) as error:
            if not _refused(error):
                raise self._away(error) from error
            return self._one_by_one(events)
        return _in_order(
            events, lambda event: CONFIRMED if event.id in fit else Rejected(_problem(event) or "")
        )

    def close(self) -> None:
        """Close the connection."""
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()

    def _one_by_one(self, events: Sequence[Event]) -> Sequence[Receipt]:
        def one(event: Event) -> Receipt:
            problem = _problem(event)
            if problem is not None:
                return Rejected(problem)
            try:
                self._hand_over([event])
            except (psycopg.Error, DatabaseUnreachable) as error:
                if not _refused(error):
                    raise self._away(error) from error
                return Rejected(one_line(error))
            return CONFIRMED

        return _in_order(events, one)

    def _away(self, error: Exception) -> SinkUnavailable:
        self.close()
        return SinkUnavailable(self.name, one_line(error))

    def _hand_over(self, events: Sequence[Event]) -> None:
        if not events:
            return
        if self._conn is None:
            self._conn = connect(self._dsn, autocommit=True, application_name="relay queue:")
            self._conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            self._conn.read_only = False
        conn = self._conn
        with conn.transaction():
            taken = set(execute(conn, Statement(_SQL["take_over"], {"ids": [e.id for e in events]}, column)))
            for name, of_name in self._jobs(events, taken).items():
                execute(conn, Statement(_SQL["enqueue"], {"name": name, **of_name.columns()}, nothing))
            if not self._keep:
                execute(conn, Statement(_SQL["drop_taken"], {"ids": list(taken)}, nothing))

    def _jobs(self, events: Sequence[Event], taken: Collection[int]) -> Mapping[str, _Jobs]:
        """Sort the events by the jobs that they become; within one name they stay in event order."""
        jobs: dict[str, _Jobs] = {}
        for event in events:
            if event.id not in taken or not (names := self._subscribers(event.event_type)):
                continue
            headers = msgspec.json.encode(attributes(event, self._source)).decode()
            for name in names:
                of_name = jobs.setdefault(name, _Jobs())
                of_name.payloads.append(event.payload)
                of_name.keys.append(event.aggregate_id or None)
                of_name.headers.append(headers)
        return jobs


@dataclass(slots=True)
class _Jobs:
    """The jobs of one name, a column each: one call makes them all."""

    payloads: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)

    def columns(self) -> dict[str, object]:
        return {"payloads": f"[{','.join(self.payloads)}]", "keys": self.keys, "headers": self.headers}


def open_sink(url: str, context: SinkContext) -> QueueSink:
    """Return the sink for `queue:`."""
    if context.subscribers is None:
        raise ConfigError(
            f"sink {url} needs the app whose handlers subscribe: outbox-relay shop.jobs:app --sink queue:"
        )
    return QueueSink(context, context.subscribers)


def _refused(error: Exception) -> bool:
    """Tell whether Postgres refused the data; whatever else went wrong may pass with time."""
    return isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] in REFUSED


def _in_order(events: Sequence[Event], receipt: Callable[[Event], Receipt]) -> list[Receipt]:
    """Ask for each event's receipt; nothing of an aggregate passes an event that was not confirmed."""
    stopped: set[str] = set()
    receipts: list[Receipt] = []
    for event in events:
        given = HELD if event.key in stopped else receipt(event)
        if given is not CONFIRMED:
            stopped.add(event.key)
        receipts.append(given)
    return receipts


def _problem(event: Event) -> str | None:
    size = len((event.aggregate_id or "").encode())
    return (
        f"aggregate_id has {size} bytes, more than {KEY_BYTES}: too long for an ordering key"
        if size > KEY_BYTES
        else None
    )
