"""Read what is to be published, and write down what became of it.

The read is five statements of one snapshot (REPEATABLE READ READ ONLY), in this order; `relay.cycle`
sends them in one round trip. Marks and failures are transactions of their own before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec

from pgqueue.statement import Query, Row, Statement, column, load, nothing
from relay.event import Event

_SQL = load("relay", "publish")

ERROR_CHARACTERS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """An event that was rejected or is held: `waits` while its time is in the future, else it is due."""

    part: int
    key: str
    id: int
    waits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one read transaction saw."""

    mine: Sequence[int]
    trouble: Sequence[Trouble]
    rows: Sequence[Event]
    last: int
    at: datetime
    writers: Collection[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """What a rejection did to an event."""

    id: int
    attempts: int
    parked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionPolicy:
    """How often a rejected event is tried (delays in seconds), and whether its aggregate stops behind it."""

    max_attempts: int = 5
    base: float = 1.0
    cap: float = 300.0
    block: bool = True


def mine(me: UUID) -> Statement[list[int]]:
    """Read the partitions of this relay."""
    return Statement(_SQL["mine"], {"me": me}, column)


def trouble(parts: Sequence[int]) -> Statement[list[Trouble]]:
    """Read the rejected and held events of these partitions: 0.6 us each, so alert at a thousand."""
    return Statement(_SQL["trouble"], {"parts": parts}, _trouble)


def read(floors: Mapping[int, int], n: int) -> Statement[list[Event]]:
    """Read at most `n` of the oldest publishable events above each partition's floor, in id order."""
    params = {"parts": list(floors), "floors": list(floors.values()), "n": n}
    return Statement(_SQL["read"], params, _events)


def chosen(ids: Sequence[int]) -> Statement[list[Event]]:
    """Read those of these events that are neither published nor parked, in id order."""
    return Statement(_SQL["chosen"], {"ids": list(ids)}, _events)


def last() -> Statement[tuple[int, datetime]]:
    """Read the highest id handed out, and the database's time."""
    return Statement(_SQL["last"], {}, _last)


def writers() -> Statement[list[str]]:
    """Read which transactions may still commit an id handed out before."""
    return Statement(_SQL["writers"], {}, column)


def mark(ids: Iterable[int], *, keep: bool = True) -> Statement[None]:
    """Mark events as published, or delete them (`keep=False`); locks in id order, repeatable."""
    query: Query = _SQL["mark"] if keep else _SQL["mark_by_delete"]
    return Statement(query, {"ids": sorted(ids)}, nothing)


def mark_unlocked(ids: Iterable[int]) -> Statement[None]:
    """Mark those events that no other transaction has locked."""
    return Statement(_SQL["mark_unlocked"], {"ids": sorted(ids)}, nothing)


def unmarked(ids: Iterable[int]) -> Statement[list[int]]:
    """Read which of these events are not published yet."""
    return Statement(_SQL["unmarked"], {"ids": sorted(ids)}, column)


def fail(rejected: Mapping[int, str], policy: RejectionPolicy) -> Statement[list[Failed]]:
    """Count a rejection of each event; let its aggregate wait, or park by policy. Skips locked rows."""
    params = {
        "ids": list(rejected),
        "errors": [_storable(error) for error in rejected.values()],
        "max_attempts": policy.max_attempts,
        "base": policy.base,
        "cap": policy.cap,
        "block": policy.block,
    }
    return Statement(_SQL["fail"], params, _failed)


def defer(late: Mapping[int, tuple[str, float]]) -> Statement[None]:
    """Let aggregates of unanswered events wait (error, seconds); spends no attempt, skips locked rows."""
    params = {
        "ids": list(late),
        "errors": [_storable(error) for error, _ in late.values()],
        "delays": [delay for _, delay in late.values()],
    }
    return Statement(_SQL["defer"], params, nothing)


def idle(seconds: float) -> Statement[None]:
    """Ask writers to notify `pgqueue_outbox` for some seconds. Not undone by a rollback; no lock."""
    return Statement(_SQL["idle"], {"seconds": seconds}, nothing)


def _storable(error: str) -> str:
    text = error.encode(errors="backslashreplace").decode().replace("\0", "\\x00")
    return text[:ERROR_CHARACTERS] or "rejected without a reason"


def _last(rows: Sequence[Row]) -> tuple[int, datetime]:
    number, at = rows[0]
    return number, at


def _trouble(rows: Sequence[Row]) -> list[Trouble]:
    return [Trouble(part=part, key=key, id=id_, waits=waits) for part, key, id_, waits in rows]


def _failed(rows: Sequence[Row]) -> list[Failed]:
    return [Failed(id=id_, attempts=attempts, parked=parked) for id_, attempts, parked in rows]


_NO_HEADERS: Mapping[str, Any] = {}
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def _headers(text: str) -> Mapping[str, Any]:
    if text == "{}":
        return _NO_HEADERS
    try:
        return _decode(text)
    except (ValueError, RecursionError):
        return _NO_HEADERS  # no header worth having: numbers of thousands of digits, thousands of levels


def _events(rows: Sequence[Row]) -> list[Event]:
    events = [
        Event(
            id=row[0],
            part=row[1],
            key=row[2],
            aggregate_id=row[3],
            version=row[4],
            event_type=row[5],
            payload=row[6],
            aggregate_type=row[7],
            headers=_headers(row[8]),
            created_at=row[9],
            attempts=row[10],
        )
        for row in rows
    ]
    events.sort(key=_id)
    return events


def _id(event: Event) -> int:
    return event.id
