"""Routing: when the keys of waiting jobs are given their lanes.

Before a claim of lanes each new keyed job is looked at once, so that its key has a lane. In a backlog that is a look-up
for every job, of which most are gone by the time their turn comes. So a queue with more to look at than a window holds
is left for a moment while the lanes that are there give enough, and jobs are so short that the looks would tell.
"""

from __future__ import annotations

from collections.abc import Sequence

from pgqueue.floors import EVERYTHING, WINDOW, Floors
from pgqueue.quota import Quota
from pgqueue.statement import Row

#: Where a job takes longer, in seconds, routing is nothing beside it.
SHORT = 0.0001


class Routing:
    """Decides for one process which queues are routed before a claim of lanes; `period` in seconds."""

    def __init__(self, floors: Floors, quota: Quota, period: float) -> None:
        self._floors = floors
        self._quota = quota
        self._period = period
        self._behind: dict[str, float] = {}
        #: Whether the last claim of lanes found all that it asked for.
        self.enough = False

    def due(self, now: float) -> dict[str, int]:
        """Return the floors of the queues that are to be routed now."""
        brief = self._quota.per_job is not None and self._quota.per_job < SHORT
        if not (self.enough and brief and self._behind):
            return dict(self._floors.route)
        left = {queue for queue, at in self._behind.items() if now - at < self._period}
        # A round that is sent before the answer does not ask again.
        self._behind |= dict.fromkeys(self._behind.keys() - left, now)
        return {queue: floor for queue, floor in self._floors.route.items() if queue not in left}

    def took(self, queues: Sequence[str], rows: Sequence[Row], settled: int, now: float) -> None:
        """Raise the floors of these queues as far as routing looked and the horizon had settled before."""
        for place, examined, last in rows:
            queue, more = queues[place - 1], examined >= WINDOW
            self._floors.routed(queue, settled, last if more else EVERYTHING)
            if more:
                self._behind[queue] = now
            else:
                self._behind.pop(queue, None)
