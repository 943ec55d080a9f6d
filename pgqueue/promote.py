"""Promote: a delayed job whose time has come gets a place in the queue. By turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pgqueue.statement import Statement, load, nothing

_SQL = load("pgqueue", "promote")


@dataclass(frozen=True, slots=True, kw_only=True)
class Promoted:
    """How many jobs got a place, the latest of their due times, and their queues."""

    count: int
    latest: datetime | None
    queues: list[str]


def promote(floor: datetime, period: timedelta) -> Statement[Promoted]:
    """Promote up to 1,000 due jobs in order of their time, passing locked rows; none is due below `floor`.

    Does nothing unless it is this process's turn; the next turn comes after `period`, after a full page at once.
    """
    return Statement(
        _SQL["promote"],
        {"floor": floor, "period": period},
        lambda r: Promoted(count=r[0][0], latest=r[0][1], queues=r[0][2]),
    )


def notify(queues: Sequence[str]) -> Statement[None]:
    """Wake idle workers of these queues at commit."""
    return Statement(_SQL["notify"], {"queues": list(queues)}, nothing)
