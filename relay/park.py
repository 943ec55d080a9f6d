"""Events set aside: look at them, retry them, skip them; hold an aggregate by hand.

Two facts on the row say everything. `next_attempt_at` in the future: its whole aggregate waits. `parked_at`:
this row is not read. A relay sees a change with its next read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from pgqueue.statement import Row, Statement, column, load, scalar

_SQL = load("relay", "park")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """An event that is parked, or waits. `blocks`: the later events of its aggregate wait for it."""

    id: int
    event_type: str
    aggregate_id: str | None
    created_at: datetime
    attempts: int
    last_error: str
    parked_at: datetime | None
    blocks: bool


def parked(*, after: int = 0, limit: int = 100) -> Statement[list[Parked]]:
    """Read parked and waiting events with an id above `after`, oldest first."""
    return Statement(_SQL["parked"], {"after": after, "limit": limit}, _parked)


def retry(ids: Iterable[int]) -> Statement[list[int]]:
    """Make parked or waiting events due again with all attempts; the answer is the ids that were.

    An event that blocks its aggregate goes out in order. One that was skipped goes out after its successors.
    """
    return Statement(_SQL["retry"], {"ids": sorted(ids)}, column)


def skip(ids: Iterable[int]) -> Statement[list[int]]:
    """Set events aside so that their successors go on; the answer is the ids that were unpublished.

    A relay that has read an event already may still publish it: then it counts as published, not as skipped.
    """
    return Statement(_SQL["skip"], {"ids": sorted(ids)}, column)


def hold(aggregate_id: str, *, why: str) -> Statement[int | None]:
    """Stop an aggregate at its oldest unpublished event; the answer is its id, None if there is none.

    `retry` with that id lets it go on. What a relay has read already, up to two batches, is not called back.
    """
    return Statement(_SQL["hold"], {"aggregate_id": aggregate_id, "why": why}, scalar)


def _parked(rows: Sequence[Row]) -> list[Parked]:
    return [
        Parked(
            id=id_,
            event_type=event_type,
            aggregate_id=aggregate_id,
            created_at=created_at,
            attempts=attempts,
            last_error=last_error,
            parked_at=parked_at,
            blocks=blocks,
        )
        for id_, event_type, aggregate_id, created_at, attempts, last_error, parked_at, blocks in rows
    ]
