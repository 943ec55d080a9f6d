"""Stride: where a claim of a backlog starts that is sent behind another one.

The one in front has not told yet how far it came. It takes the first jobs above its start, so as many jobs lie at
least as many positions further on; where others drain the same level, or other queues draw the numbers between, a claim
passes more. The claim behind starts there, and not at the floor, where it would read again what the front one has
just taken. If the guess went too far, the next claim starts at the floor, which no claim behind a gap has raised.
"""

from __future__ import annotations

from collections.abc import Sequence

from pgqueue.floors import Floors
from pgqueue.job import Claimed
from pgqueue.plan import Wish


class Stride:
    """How many positions of a level a claim passes for each job it takes: the less of the last two."""

    def __init__(self) -> None:
        self._level = -1
        self._last = self._per_job = 1.0

    def took(self, wish: Wish, jobs: Sequence[Claimed]) -> None:
        """Take in a claim and its jobs, in order; it tells something if it was full and all are of one level."""
        if not wish.backlog or len(jobs) < wish.n or jobs[0].level != jobs[-1].level:
            return
        level = jobs[-1].level - 1
        if level != self._level:
            self._level, self._last = level, 1.0
        span = (jobs[-1].pos - wish.starts[wish.levels.index(level)]) / wish.n
        self._per_job = min(self._last, span)
        self._last = span

    def starts(self, floors: Floors, under_way: Sequence[Wish]) -> list[int]:
        """Return the position above which the next claim reads, per level, behind the claims under way."""
        starts, level = floors.starts(), self._level
        for wish in under_way:
            if not wish.backlog or level not in wish.levels:
                continue
            front = wish.starts[wish.levels.index(level)]
            if front <= floors.floor[level]:  # else nobody has looked below it: begin at the floor
                starts[level] = max(starts[level], front + int(wish.n * self._per_job))
        return starts
