"""Spends the retry budget of one process: decides which failed attempts run again soon and which later.

Tokens are drawn from the shared row in chunks, in a short transaction of their own before the round that writes the
failures; a worker without failures reports what it ran every few seconds and otherwise touches nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter

import psycopg

from pgqueue.budget import Report
from pgqueue.hand import Ended
from pgqueue.job import Buried, Claimed, Completed, Done, Retried, Written
from pgqueue.run import deferred

#: Seconds between two draws of one process, and between two reports of one that needs no token.
PAUSE = 0.1
REPORT = 5.0
#: Deferred retries that a success lets through: two, so that a side that is well again is tried by twice as many each
#: time, and half of the calls may fail before there are too few. Any other failure takes one back. At most so many are
#: saved up.
EARNED = 2
MOST_EARNED = 500
_ATTEMPT = attrgetter("attempt")


class Retries:
    """The retry tokens in this process's hands. Runs in the engine's thread."""

    def __init__(
        self, levels: Sequence[tuple[str, int]], *, on: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._levels = levels
        self._on = on
        self._clock = clock
        self._one_queue = len({queue for queue, _ in levels[1:]}) == 1
        self._tokens: Counter[str] = Counter()
        self._earned: Counter[str] = Counter()
        self._ran: Counter[str] = Counter()
        self._drawn_at = clock() - 2 * PAUSE  # the first failure of a worker may ask at once
        #: Draws tokens; the engine sets it when it is connected.
        self.draw: Callable[[Sequence[Report]], dict[str, int]] = lambda _: {}

    def ran(self, done: Sequence[Claimed], ended: Sequence[Ended]) -> None:
        """Count executions that ended: how many were first ones, how many went well; `done` did."""
        if not self._on or not (done or ended):
            return
        executed = [e for e in ended if e.executed]
        well = [*done, *(e.claimed for e in executed if isinstance(e.outcome, Done | Completed | Written))]
        ill = [
            e.claimed
            for e in executed
            if isinstance(e.outcome, Retried | Buried) and not deferred(e.claimed)  # which has paid already
        ]
        for queue, n in self._by_queue(well).items():
            self._earned[queue] = min(MOST_EARNED, self._earned[queue] + EARNED * n)
        for queue, n in self._by_queue(ill).items():
            self._earned[queue] = max(0, self._earned[queue] - n)
        ran = [*done, *(e.claimed for e in executed)] if executed else done
        if sum(map(_ATTEMPT, ran)) > len(ran):  # seldom, so the hot path counts nothing one by one
            ran = [job for job in ran if job.attempt <= 1]
        for queue, n in self._by_queue(ran).items():
            self._ran[queue] += n
        if self._ran and self._clock() - self._drawn_at > REPORT:
            self._refill(Counter())

    def spend(self, ended: Sequence[Ended]) -> list[Ended]:
        """Let the retries that find no token wait longer."""
        wanted = self._by_queue([e.claimed for e in ended if _asks(e)]) if self._on else Counter()
        if not wanted:
            return list(ended)
        self._want(wanted - self._tokens)
        return [self._decide(e) if _asks(e) else e for e in ended]

    def refuse(self, late: Sequence[Claimed]) -> list[Claimed]:
        """Return those of some deferred retries, whose time has come, that may not run now.

        Each needs what a success of the queue has earned, or else a token.
        """
        if not self._on or not late:
            return []
        self._want(self._by_queue(late) - self._earned - self._tokens)
        return [job for job in late if not self._admits(self._levels[job.level][0])]

    def _admits(self, queue: str) -> bool:
        for purse in (self._earned, self._tokens):
            if purse[queue] > 0:
                purse[queue] -= 1
                return True
        return False

    def _by_queue(self, jobs: Sequence[Claimed]) -> Counter[str]:
        if self._one_queue or not jobs:
            return Counter({self._levels[1][0]: len(jobs)} if jobs else {})
        return Counter(self._levels[job.level][0] for job in jobs)

    def _want(self, short: Counter[str]) -> None:
        if short and self._clock() - self._drawn_at > PAUSE:
            self._refill(short)

    def _decide(self, ended: Ended) -> Ended:
        queue, outcome = self._levels[ended.claimed.level][0], ended.outcome
        if self._tokens[queue] > 0:
            self._tokens[queue] -= 1
            return ended
        if not isinstance(outcome, Retried) or outcome.later is None:
            return ended
        return replace(
            ended, outcome=replace(outcome, delay=max(outcome.delay, outcome.later), deferred=True)
        )

    def _refill(self, short: Counter[str]) -> None:
        self._drawn_at = self._clock()
        reports = [
            Report(queue=queue, ran=self._ran[queue], want=short[queue])
            for queue in sorted({*self._ran, *short})
        ]
        try:
            granted = self.draw(reports)
        except psycopg.Error:
            return  # no budget to ask: failures wait, which is the careful way
        self._ran.clear()
        self._tokens.update(granted)


def _asks(ended: Ended) -> bool:
    """Tell whether an attempt wants a retry at its backoff (one the handler timed itself does not ask)."""
    return isinstance(ended.outcome, Retried) and ended.outcome.later is not None and ended.executed
