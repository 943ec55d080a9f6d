"""Write events in the transaction of the business rows they tell about.

    outbox = Outbox()
    outbox.add(session, "order.placed", {"order_id": 8842}, aggregate_id="order-8842", version=1)

Any language may write them: `INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload) VALUES (..)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from pgqueue.connection import execute, execute_async, require_transaction, require_transaction_async
from pgqueue.errors import BadOption
from pgqueue.payload import Codec
from pgqueue.statement import Row, Statement, load, scalar
from relay.event import NewEvent

_SQL = load("relay", "outbox")

AGGREGATE_ID_BYTES = 512
NAME_BYTES = 200
_BIGINT = 2**63


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
    event_type = _text("event_type", event.event_type, NAME_BYTES)
    if event_type is None:
        raise BadOption("event_type", "is missing; give the event a stable name such as 'order.placed'")
    aggregate_id = event.aggregate_id
    if isinstance(aggregate_id, int | UUID) and not isinstance(aggregate_id, bool):
        aggregate_id = str(aggregate_id)
    version = event.version
    if version is not None and (
        not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < _BIGINT
    ):
        raise BadOption("version", f"{version!r} is not a whole number from 0 to 2^63 - 1")
    return {
        "event_type": event_type,
        "payload": Codec(event_type).encode(event.payload),
        "aggregate_id": _text("aggregate_id", aggregate_id, AGGREGATE_ID_BYTES),
        "aggregate_type": _text("aggregate_type", event.aggregate_type, NAME_BYTES),
        "version": version,
        "headers": _headers(event_type, event.headers),
    }


def _text(option: str, value: object, longest: int) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadOption(option, f"is {type(value).__name__}, not text")
    if not value.strip():
        raise BadOption(option, "is empty; leave it out instead")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise BadOption(option, "contains a lone surrogate, which Postgres cannot store") from None
    if "\0" in value:
        raise BadOption(option, "contains a NUL character, which Postgres cannot store")
    if size > longest:
        raise BadOption(option, f"has {size} bytes, more than {longest}")
    return value


def _headers(event_type: str, headers: Mapping[str, Any] | None) -> str:
    if not headers:
        return "{}"
    if not isinstance(headers, Mapping) or not all(isinstance(name, str) for name in headers):
        raise BadOption("headers", "is not a mapping of names to values")
    return Codec(f"{event_type} (headers)").encode(dict(headers))
