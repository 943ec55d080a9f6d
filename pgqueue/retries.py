"""Spends the retry budget of one process: decides which failed attempts run again soon and which later.

Tokens are drawn from the shared row in chunks, in a short transaction of their own before the round that writes the
failures; a worker without failures reports what it ran every few seconds and otherwise touches nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import psycopg

from pgqueue.budget import Report
from pgqueue.hand import Ended
from pgqueue.job import Claimed, Retried

#: Seconds between two draws of one process, and between two reports of one that needs no token.
PAUSE = 0.1
REPORT = 5.0


class Retries:
    """The retry tokens in this process's hands. Runs in the engine's thread."""

    def __init__(self, levels: Sequence[tuple[str, int]], *, on: bool) -> None:
        self._levels = levels
        self._on = on
        self._one_queue = len({queue for queue, _ in levels[1:]}) == 1
        self._tokens: Counter[str] = Counter()
        self._ran: Counter[str] = Counter()
        self._drawn_at = time.monotonic()
        #: Draws tokens; the engine sets it when it is connected.
        self.draw: Callable[[Sequence[Report]], dict[str, int]] = lambda _: {}

    def ran(self, jobs: Sequence[Claimed]) -> None:
        """Count executions that ended."""
        if not self._on or not jobs:
            return
        if self._one_queue:
            self._ran[self._levels[1][0]] += len(jobs)
        else:
            self._ran.update(self._levels[job.level][0] for job in jobs)
        if time.monotonic() - self._drawn_at > REPORT:
            self._refill(Counter())

    def spend(self, ended: Sequence[Ended]) -> list[Ended]:
        """Let the retries that find no token wait longer."""
        wanted = (
            Counter(self._levels[e.claimed.level][0] for e in ended if _asks(e)) if self._on else Counter()
        )
        if not wanted:
            return list(ended)
        short = wanted - self._tokens
        if short and time.monotonic() - self._drawn_at > PAUSE:
            self._refill(short)
        return [self._decide(e) if _asks(e) else e for e in ended]

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
        self._drawn_at = time.monotonic()
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
    return isinstance(ended.outcome, Retried) and ended.outcome.later is not None
