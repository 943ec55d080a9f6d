"""Which numbers of a sequence are settled: the proof behind every floor.

Sequence order is not commit order. A reader that skips below the highest number it has seen loses the rows of
transactions that drew a lower number and commit later; a reader that never skips reads dead index entries again
and again. The proof between the two: `nextval` takes a RowExclusiveLock on the sequence before it hands out the
number and keeps it to the end of the transaction, prepared transactions included. So the transactions that can
still commit a low number are exactly the holders of that lock in `pg_locks`.

Each cycle observes, in this order: the snapshot of the rows, `last_value` of the sequence, the holders. A number
is settled once every holder noted with it has left the list: any snapshot taken later sees all that will ever be
visible up to it. A holder older than `patience` becomes a guard: the horizon rises past it, and remembers the
floors of that moment; when the guard ends, the reader goes back to them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Candidate:
    last: int
    holders: set[str]
    since: float


@dataclass(slots=True)
class Horizon(Generic[K]):
    """The state of the proof in one reader; `K` names the reader's floors (a queue level, a partition)."""

    patience: float = 1.0
    settled: int = 0
    _candidate: _Candidate | None = None
    _guards: dict[str, dict[K, int]] = field(default_factory=dict)

    @property
    def guarded(self) -> bool:
        """Tell whether a long transaction holds numbers below the horizon."""
        return bool(self._guards)

    @property
    def pending(self) -> bool:
        """Tell whether a proof is under way."""
        return self._candidate is not None

    def observe(
        self, *, last: int, holders: Collection[str], now: float, floors: Mapping[K, int]
    ) -> dict[K, int] | None:
        """Take in one observation; return the floors to go back to if guards ended, else None.

        A floor that is missing in the answer goes back to 0. `now` is seconds of a monotonic clock.
        Rows read by the snapshot of the same observation may be incomplete where a floor goes back.
        """
        back: dict[K, int] | None = None
        for writer in [w for w in self._guards if w not in holders]:
            then = self._guards.pop(writer)
            back = then if back is None else {k: min(v, then[k]) for k, v in back.items() if k in then}
        candidate = self._candidate
        if candidate is not None:
            candidate.holders.intersection_update(holders)
            if candidate.holders and now - candidate.since > self.patience:
                for writer in candidate.holders:
                    self._guards[writer] = dict(floors)
                candidate.holders.clear()
            if not candidate.holders:
                self.settled = max(self.settled, candidate.last)
                self._candidate = candidate = None
        if candidate is None:
            open_now = {writer for writer in holders if writer not in self._guards}
            if not open_now:
                self.settled = max(self.settled, last)
            elif last > self.settled:
                self._candidate = _Candidate(last, open_now, now)
        return back

    def reset(self) -> None:
        """Forget everything: after a reconnect, or when the sequence went back (failover, restore)."""
        self.settled = 0
        self._candidate = None
        self._guards.clear()
