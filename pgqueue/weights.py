"""Weights: whose turn it is when queues share a worker by weight instead of being served in strict order.

Each queue moves on by 1/weight for each job it gives, and the one that is furthest behind is asked first. A queue
that has nothing to give catches up with the others: rest gives no credit, so that a burst after a quiet hour takes
its share and no more (stride scheduling).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Weights:
    """The turns of one process; false where the order is strict."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = dict(weights)
        self._at = dict.fromkeys(weights, 0.0)

    def __bool__(self) -> bool:
        return bool(self._weights)

    def order(self) -> list[str]:
        """Return the queues in the order in which the next claim asks them."""
        return sorted(self._weights, key=self._at.__getitem__)

    def took(self, queues: Sequence[str], *, exhausted: bool) -> None:
        """Take in a claim that asked in this order: the queue of each job, in the order the jobs came.

        `exhausted`: it found fewer jobs than it asked for, so no queue has any left.
        """
        asked = self.order()
        for queue in queues:
            self._at[queue] += 1 / self._weights[queue]
        if exhausted:
            self._at = dict.fromkeys(self._weights, 0.0)
        elif queues:
            last = queues[-1]
            for queue in asked[: asked.index(last)]:
                self._at[queue] = max(self._at[queue], self._at[last])
