"""Where claims begin: one floor per level, raised only by proof.

A level is a (queue, priority) pair. `floor` is proven: no job that is ready, or can still become visible, stands
at or below it (bar guards, see `pgqueue.horizon`). `high` is how far claims have looked. A claim starts at the
floor as soon as something new is settled - it is the one that proves the next floor - and otherwise not further
back than `SLACK` below `high`, so that its cost does not grow with what it has already drained. What such a claim
passes by is found by the next one that starts at the floor, or by the sweep, which starts at 0: nothing is ever
lost to a floor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pgqueue.horizon import Horizon

#: Entries of a level that one claim examines at most (the LIMIT in `claim.sql`).
WINDOW = 5000
SLACK = WINDOW
EVERYTHING = 2**63 - 1


class Floors:
    """The floors of one process."""

    def __init__(self, levels: Sequence[tuple[str, int]]) -> None:
        self.levels = tuple(levels)
        self.horizon: Horizon[int | str] = Horizon()
        self.floor = [0] * len(levels)
        self.high = [0] * len(levels)
        #: How far keyed jobs have been given their lanes, by queue: under the same proof as the floors.
        self.route = {queue: 0 for queue, _ in levels}
        #: Upper bounds for the suspect scan: jobs this process cannot have claimed lie above.
        self.ceiling = [EVERYTHING] * len(levels)

    def starts(self) -> list[int]:
        """Return the position above which the next claim reads, per level."""
        settled = self.horizon.settled
        return [f if settled > f else max(f, h - SLACK) for f, h in zip(self.floor, self.high, strict=True)]

    def claimed(
        self,
        levels: Sequence[int],
        starts: Sequence[int],
        settled: int,
        last: tuple[int, int] | None,
        full: Mapping[int, int],
        *,
        exhausted: bool,
    ) -> None:
        """Take in what a claim saw.

        It read `levels` (counted from 0, in this order) from `starts`, with the horizon at `settled` before it was
        sent; `last` is the (level, pos) of its last job; `full` the last position examined in levels whose window was
        full; `exhausted` tells that it found fewer jobs than it asked for.
        """
        reached = levels.index(last[0]) if last is not None else -1
        for place, (level, start) in enumerate(zip(levels, starts, strict=True)):
            if exhausted:
                covered = full.get(level, EVERYTHING)
                looked = full.get(level, 0)
            elif last is None or place > reached:
                self.ceiling[level] = self.high[level]
                continue
            elif level == last[0]:
                covered = looked = last[1]
            else:
                # Whether this level's window was full is not known; so many numbers it held for certain.
                covered, looked = start + WINDOW, 0
            if start <= self.floor[level] and settled > self.floor[level]:
                self.floor[level] = max(self.floor[level], min(settled, covered))
            self.high[level] = max(self.high[level], looked)
            self.ceiling[level] = self.high[level] if looked else EVERYTHING

    def saw(self, rows: Iterable[tuple[int, int]]) -> None:
        """Note the (level, pos) of claimed jobs."""
        for level, pos in rows:
            if pos > self.high[level]:
                self.high[level] = pos

    def observed(self, last: int, holders: Sequence[str], now: float) -> None:
        """Take in an observation of the sequence; go back where a guard ended, or where the sequence did."""
        if last < max(self.high, default=0) or last < self.horizon.settled:
            self.drop()
            return
        floors: dict[int | str, int] = dict(enumerate(self.floor))
        floors.update(self.route)
        back = self.horizon.observe(last=last, holders=holders, now=now, floors=floors)
        if back is not None:
            self.floor = [min(f, back.get(level, 0)) for level, f in enumerate(self.floor)]
            self.route = {queue: min(f, back.get(queue, 0)) for queue, f in self.route.items()}

    def routed(self, queue: str, settled: int, covered: int) -> None:
        """Take in how far routing looked, with the horizon at `settled` before it."""
        self.route[queue] = max(self.route[queue], min(settled, covered))

    def wants_proof(self) -> bool:
        """Tell whether an observation could raise a floor."""
        settled = self.horizon.settled
        return self.horizon.pending or self.horizon.guarded or any(h > settled for h in self.high)

    def swept(self, levels: Iterable[int], last: Mapping[int, int]) -> None:
        """Go back: a sweep found as many jobs as it took, so there may be more behind its last ones."""
        for level in levels:
            if level in last:
                self.floor[level] = min(self.floor[level], last[level])
                self.high[level] = last[level]

    def lower(self, queues: Iterable[str]) -> None:
        """Start these queues from 0: rows below the floors became ready (released, resumed)."""
        wanted = set(queues)
        for level, (queue, _) in enumerate(self.levels):
            if queue in wanted:
                self.floor[level] = self.high[level] = 0

    def drop(self) -> None:
        """Start everything from 0 and forget the proof: reconnect, failover, new names."""
        self.horizon.reset()
        self.floor = [0] * len(self.levels)
        self.high = [0] * len(self.levels)
        self.route = dict.fromkeys(self.route, 0)
        self.ceiling = [EVERYTHING] * len(self.levels)
