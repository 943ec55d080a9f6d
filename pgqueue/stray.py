"""Stray: keyed jobs that have no lane, and so are found by nobody.

Routing gives every keyed job above its floor a lane. A row that appears below the floor (restored by hand), or a lane
that somebody deleted, is what a look from the start is for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pgqueue.statement import Row, Statement, load

_SQL = load("pgqueue", "stray")


class Window(NamedTuple):
    """The keyed jobs of one queue from a position on, 5,000 at most; `last` is the position of the last one."""

    queue: str
    jobs: int
    last: int
    missing: bool


def strays(starts: Mapping[str, int]) -> Statement[list[Window]]:
    """Look at one window of each queue, from the position given; takes no lock and writes nothing."""
    queues = list(starts)

    def read(rows: Sequence[Row]) -> list[Window]:
        return [Window(queues[r[0] - 1], r[1], r[2] or 0, r[3]) for r in rows]

    return Statement(_SQL["strays"], {"queues": queues, "floors": list(starts.values())}, read)
