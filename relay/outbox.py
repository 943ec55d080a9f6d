"""Write events in the transaction of the business rows they tell about.

    outbox = Outbox()
    outbox.add(session, "order.placed", {"order_id": 8842}, aggregate_id="order-8842", version=1)

Any language may write them: `INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload) VALUES (..)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pgqueue.connection import execute, execute_async, require_transaction, require_transaction_async
from pgqueue.errors import BadOption
from pgqueue.payload import Codec
from pgqueue.statement import Row, Statement, load, scalar
from relay.event import REPLAY_HEADERS, NewEvent
from relay.fields import NAME_BYTES, aggregate, text, whole

_SQL = load("relay", "outbox")


class Outbox:
    """The writing side of the outbox; it has no state, one for the whole program is enough."""

    def add(
        self,
        handle: Any,
        event_type: str,
        payload: Any,
        *,
        aggregate_id: object = None,
        aggregate_type: str | None = None,
        version: int | None = None,
        headers: Mapping[str, Any] | None = None,
        ordered: bool = False,
    ) -> int:
        """Write one event in the transaction of `handle`; return its id (its key is `outbox:<id>`).

        Events of one aggregate are published in the order of their ids. That is the order of the commits if the
        transaction holds the aggregate's row by now; if it does not, `ordered` takes an advisory lock of the
        aggregate first, to the end of the transaction. Raises BadPayload or BadOption before anything is sent,
        NotInTransaction on a handle that would commit at once.
        """
        statement = _add(event_type, payload, aggregate_id, aggregate_type, version, headers, ordered=ordered)
        require_transaction(handle)
        return execute(handle, statement)

    async def aadd(
        self,
        handle: Any,
        event_type: str,
        payload: Any,
        *,
        aggregate_id: object = None,
        aggregate_type: str | None = None,
        version: int | None = None,
        headers: Mapping[str, Any] | None = None,
        ordered: bool = False,
    ) -> int:
        """Write one event in the transaction of an asynchronous handle; return its id."""
        statement = _add(event_type, payload, aggregate_id, aggregate_type, version, headers, ordered=ordered)
        await require_transaction_async(handle)
        return await execute_async(handle, statement)

    def add_many(self, handle: Any, events: Iterable[NewEvent], *, ordered: bool = False) -> list[int]:
        """Write events in one statement; return their ids, which rise in the order given.

        `ordered` locks their aggregates first, as `add` does.
        """
        statement = _add_many(events, ordered=ordered)
        require_transaction(handle)
        return execute(handle, statement)

    async def aadd_many(self, handle: Any, events: Iterable[NewEvent], *, ordered: bool = False) -> list[int]:
        """Write events in one statement on an asynchronous handle; return their ids in the order given."""
        statement = _add_many(events, ordered=ordered)
        await require_transaction_async(handle)
        return await execute_async(handle, statement)


def _add(
    event_type: str,
    payload: Any,
    aggregate_id: object,
    aggregate_type: str | None,
    version: int | None,
    headers: Mapping[str, Any] | None,
    *,
    ordered: bool,
) -> Statement[int]:
    columns = _columns(
        NewEvent(
            event_type=event_type,
            payload=payload,
            aggregate_id=aggregate_id,
            aggregate_type=aggregate_type,
            version=version,
            headers=headers,
        )
    )
    if ordered:
        _has_order(columns)
    return Statement(_SQL["add_ordered" if ordered else "add"], columns, scalar)


def _add_many(events: Iterable[NewEvent], *, ordered: bool) -> Statement[list[int]]:
    rows = [_columns(event) for event in events]
    if ordered:
        for row in rows:
            _has_order(row)
    params = {
        "aggregate_ids": [row["aggregate_id"] for row in rows],
        "event_types": [row["event_type"] for row in rows],
        "payloads": [row["payload"] for row in rows],
        "aggregate_types": [row["aggregate_type"] for row in rows],
        "versions": [row["version"] for row in rows],
        "headers": [row["headers"] for row in rows],
    }
    return Statement(_SQL["add_many_ordered" if ordered else "add_many"], params, _ids)


def _has_order(columns: Mapping[str, object]) -> None:
    if columns["aggregate_id"] is None:
        raise BadOption("ordered", "goes with an aggregate_id: an event without one has no order")


def _ids(rows: Sequence[Row]) -> list[int]:
    return sorted(row[0] for row in rows)


def _columns(event: NewEvent) -> dict[str, object]:
    if event.event_type is None:
        raise BadOption("event_type", "is missing; give the event a stable name such as 'order.placed'")
    event_type = text("event_type", event.event_type, NAME_BYTES)
    kind, version = event.aggregate_type, event.version
    return {
        "event_type": event_type,
        "payload": Codec(event_type).encode(event.payload),
        "aggregate_id": None if event.aggregate_id is None else aggregate(event.aggregate_id),
        "aggregate_type": None if kind is None else text("aggregate_type", kind, NAME_BYTES),
        "version": None if version is None else whole("version", version, 0),
        "headers": _headers(event_type, event.headers),
    }


def _headers(event_type: str, headers: Mapping[str, Any] | None) -> str:
    if not headers:
        return "{}"
    if not isinstance(headers, Mapping) or not all(isinstance(name, str) for name in headers):
        raise BadOption("headers", "is not a mapping of names to values")
    if taken := sorted(REPLAY_HEADERS.intersection(headers)):
        raise BadOption("headers", f"{taken[0]!r} is what outbox-relay replay writes; take another name")
    return Codec(f"{event_type} (headers)").encode(dict(headers))
