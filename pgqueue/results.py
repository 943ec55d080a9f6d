"""Results: what a round has to write, as the slots have reported it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pgqueue.job import Claimed, Outcome
from pgqueue.shelf import LaneHold

#: So many jobs of one claim are acknowledged by a statement of their own.
TOGETHER = 16


@dataclass(slots=True, kw_only=True)
class Results:
    """What is to be written: jobs done, attempts that ended otherwise, lanes to give back."""

    done: list[Claimed] = field(default_factory=list)
    #: Done, and to be noted in the idempotency ledger.
    applied: list[Claimed] = field(default_factory=list)
    ended: list[tuple[Claimed, Outcome]] = field(default_factory=list)
    lanes: list[LaneHold] = field(default_factory=list)
    #: Ids of those done whose rows were locked at the last try: passed while they are, or no round would get through.
    locked: frozenset[int] = frozenset()

    def claims(self) -> Iterator[Claimed]:
        """Return the claims that end."""
        return itertools.chain(self.done, self.applied, (claimed for claimed, _ in self.ended))

    def __len__(self) -> int:
        return len(self.done) + len(self.applied) + len(self.ended)

    def singles(self) -> list[Results]:
        """Return each result for itself, without the lanes."""
        return [
            *(Results(done=[c]) for c in self.done),
            *(Results(applied=[c]) for c in self.applied),
            *(Results(ended=[e]) for e in self.ended),
        ]

    def __bool__(self) -> bool:
        return bool(self.done or self.applied or self.ended or self.lanes)


def by_claim(done: Sequence[Claimed]) -> list[list[Claimed]]:
    """Part finished jobs by the claim that brought them; what few came together goes as one."""
    groups: dict[int, list[Claimed]] = {}
    for claimed in done:
        groups.setdefault(claimed.lease, []).append(claimed)
    parts = [group for group in groups.values() if len(group) >= TOGETHER]
    rest = [claimed for group in groups.values() if len(group) < TOGETHER for claimed in group]
    return [*parts, rest] if rest else parts


def by_lease(lanes: Sequence[LaneHold]) -> dict[tuple[int, float], list[LaneHold]]:
    """Group lanes by their lease and by how long they must rest."""
    groups: dict[tuple[int, float], list[LaneHold]] = {}
    for lane in lanes:
        groups.setdefault((lane.lease, lane.wait), []).append(lane)
    return groups
