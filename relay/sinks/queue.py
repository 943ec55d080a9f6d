"""`queue:`: an event becomes one job per subscriber, and is marked as published in the same transaction.

    @app.on_event("order.placed")
    def reserve_stock(order: Order, job: Job) -> None: ...

Exactly-once hand-over: there is no moment between publishing and marking. The event's payload is the job's,
its aggregate the ordering key, its CloudEvents attributes the headers. An event without subscriber is
published too. The jobs of one name are made by one call, in event order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
#: A relay that is stopped inside its transaction holds its events, and whoever took over its partitions waits for them:
#: the server ends it, sooner than the others give up.
STALLED_MS: Final = 5_000
LOCKED_MS: Final = 10_000
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
        conn = self._opened()
        with conn.transaction():
            taken = set(execute(conn, Statement(_SQL["take_over"], {"ids": [e.id for e in events]}, column)))
            for jobs in self._jobs(events, taken):
                execute(conn, Statement(_SQL["enqueue"], jobs.columns(), nothing))
            if not self._keep:
                execute(conn, Statement(_SQL["drop_taken"], {"ids": list(taken)}, nothing))

    def _opened(self) -> psycopg.Connection[Row]:
        """Return the connection. A plan made while the outbox was empty must not read it whole when it is not."""
        if self._conn is None:
            self._conn = connect(self._dsn, autocommit=True, application_name="relay queue:")
            self._conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            self._conn.read_only = False
            self._conn.execute(
                "SELECT set_config('idle_in_transaction_session_timeout', %s, false),"
                " set_config('lock_timeout', %s, false),"
                " set_config('enable_seqscan', 'off', false), set_config('enable_bitmapscan', 'off', false)",
                [str(STALLED_MS), str(LOCKED_MS)],
            )
        return self._conn

    def _jobs(self, events: Sequence[Event], taken: Collection[int]) -> list[_Jobs]:
        """Sort the events into calls, each for one name of job, in an order that makes the jobs' ids right.

        The jobs of an aggregate run in the order of their ids: where its events are of several types, the later one
        stands in a later call. The subscribers of one type are independent of each other.
        """
        calls: list[_Jobs] = []
        newest: dict[str, int] = {}
        reached: dict[str, tuple[str, int, int]] = {}
        for event in events:
            if event.id not in taken or not (names := self._subscribers(event.event_type)):
                continue
            before, first, last = reached.get(event.key, (event.event_type, 0, 0))
            first = first if before == event.event_type else last
            headers = msgspec.json.encode(attributes(event, self._source)).decode()
            for name in names:
                place = newest.get(name, -1)
                if place < first:
                    place = newest[name] = len(calls)
                    calls.append(_Jobs(name))
                last = max(last, place)
                calls[place].add(event, headers)
            reached[event.key] = event.event_type, first, last
        return calls


@dataclass(slots=True)
class _Jobs:
    """Jobs of one name, a column each: one call makes them all."""

    name: str
    payloads: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)

    def add(self, event: Event, headers: str) -> None:
        self.payloads.append(event.payload)
        self.keys.append(event.aggregate_id or None)
        self.headers.append(headers)

    def columns(self) -> dict[str, object]:
        payloads = f"[{','.join(self.payloads)}]"
        # The driver would take half of the relay's time to escape that many quotation marks.
        headers = f"{{{','.join(map(_element, self.headers))}}}"
        return {"name": self.name, "payloads": payloads, "keys": self.keys, "headers": headers}


def open_sink(url: str, context: SinkContext) -> QueueSink:
    """Return the sink for `queue:`."""
    if context.subscribers is None:
        raise ConfigError(
            f"sink {url} needs the app whose handlers subscribe: outbox-relay shop.jobs:app --sink queue:"
        )
    return QueueSink(context, context.subscribers)


def _element(text: str) -> str:
    """Return a text as it stands in an array of Postgres."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


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
