"""Publish history again: copies of published events, with new ids in the old order.

A consumer's inbox drops a key that it has applied, so the same key can not be published twice. A copy carries the
headers `replay_of` (the old key) and `replay_time` (when the event happened). Copies are not copied again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pgqueue.statement import Row, Statement, column, load, scalar

_SQL = load("relay", "replay")

#: Rows that one copy looks at, so that a rare type does not make it long.
WINDOW: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Which:
    """Which published events: an exact type or a prefix (`order.*`), one aggregate, written in [since, until)."""

    event_type: str | None = None
    aggregate_id: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def is_empty(self) -> bool:
        """Tell whether this means all of them."""
        return self == Which()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a replay would copy."""

    events: int
    types: int
    aggregates: int
    first: datetime | None
    last: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A replay that was begun."""

    id: int
    which: Which
    copied: int
    started_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What one step did: events copied now and in all, and whether that was the last."""

    now: int
    total: int
    ended: bool


def found(which: Which) -> Statement[Found]:
    """Count what a replay would copy; reads the whole outbox."""
    return Statement(_SQL["found"], _params(which), _found)


def now() -> Statement[datetime]:
    """Read the database's clock."""
    return Statement(_SQL["now"], {}, scalar)


def begin(which: Which) -> Statement[Replay | None]:
    """Note a replay of what is published up to now; None if one of this type and aggregate has not ended."""
    return Statement(_SQL["begin"], _params(which), _replay)


def unfinished(which: Which) -> Statement[Replay | None]:
    """Read the replay of this type and aggregate that has not ended."""
    params = {"event_type": which.event_type, "aggregate_id": which.aggregate_id}
    return Statement(_SQL["open"], params, _replay)


def show(id_: int) -> Statement[Replay | None]:
    """Read one replay."""
    return Statement(_SQL["show"], {"id": id_}, _replay)


def leave(which: Which) -> Statement[list[int]]:
    """Give up the replay of this type and aggregate that has not ended; what it copied stays."""
    params = {"event_type": which.event_type, "aggregate_id": which.aggregate_id}
    return Statement(_SQL["leave"], params, column)


def copy(id_: int, *, n: int) -> Statement[Copied | None]:
    """Copy at most `n` events of a replay and note it, in one statement; None if it has ended.

    Of two at once one waits for the other's commit and goes on behind it.
    """
    return Statement(_SQL["copy"], {"id": id_, "n": n, "window": WINDOW}, _copied)


def _params(which: Which) -> dict[str, object]:
    return {
        "event_type": which.event_type,
        "aggregate_id": which.aggregate_id,
        "since": which.since,
        "until": which.until,
    }


def _found(rows: Sequence[Row]) -> Found:
    events, types, aggregates, first, last = rows[0]
    return Found(events=events, types=types, aggregates=aggregates, first=first, last=last)


def _replay(rows: Sequence[Row]) -> Replay | None:
    if not rows:
        return None
    id_, event_type, aggregate_id, since, until, copied, started_at, ended_at = rows[0]
    which = Which(event_type=event_type, aggregate_id=aggregate_id, since=since, until=until)
    return Replay(id=id_, which=which, copied=copied, started_at=started_at, ended_at=ended_at)


def _copied(rows: Sequence[Row]) -> Copied | None:
    if not rows:
        return None
    count, total, ended = rows[0]
    return Copied(now=count, total=total, ended=ended)
