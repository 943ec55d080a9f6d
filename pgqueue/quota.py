"""Quota: how much to claim, by what is in hand and how long jobs take.

A worker holds its running jobs and, for short ones, some more, so that no slot waits for a round trip: 50 ms of
work, at most 500 jobs; nothing beyond the running ones when jobs take a second. Reserved slots have a claim of
their own, so that a full hand of bulk jobs never keeps a critical one out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pgqueue.config import MAX_CLAIM, WorkerSettings
from pgqueue.hand import Hand

#: Seconds of work to hold beyond the running jobs.
AHEAD = 0.05
#: A lane hands out this many seconds of work at once: while it is held, nobody else can help with its key.
LANE_AHEAD = 0.02
#: Work for which it is worth to wake one more slot.
WORTH_A_SLOT = 0.001


class Quota:
    """Decides the size of claims for one process."""

    def __init__(self, settings: WorkerSettings, hand: Hand, queue_of: Sequence[tuple[str, int]]) -> None:
        self._settings = settings
        self._hand = hand
        self._queue_of = queue_of
        self._general = settings.concurrency - sum(settings.reserved.values())
        self._seen_s = 0.0
        self._seen_n = 0
        #: Mean seconds per job, recent jobs weighing more; None before the first.
        self.per_job: float | None = None
        #: Jobs still held whose results the coming round writes.
        self.leaving = 0
        #: Set while what is shelved does not move: hold nothing beyond the running jobs.
        self.stalled = False

    def learn(self) -> None:
        """Take in the durations measured since the last call."""
        hand = self._hand
        n, s = hand.attempts - self._seen_n, hand.busy_s - self._seen_s
        if n > 0:
            self._seen_n, self._seen_s = hand.attempts, hand.busy_s
            weight = 1.0 if self.per_job is None else min(0.5, n / 20)
            self.per_job = (self.per_job or 0.0) * (1 - weight) + max(s, 1e-7) / n * weight

    def prefetch(self) -> int:
        """Return how many jobs to hold beyond the running ones."""
        if self._settings.prefetch is not None:
            return 0 if self.stalled else self._settings.prefetch
        if self.stalled or self.per_job is None:
            return 0
        return min(MAX_CLAIM, int(self._settings.concurrency * AHEAD / self.per_job))

    def free(self) -> int:
        """Return how many more jobs of any queue this process may hold."""
        return self._general - len(self._hand.given_up) + self.prefetch() - self._held_generally()

    def claims(self) -> list[tuple[tuple[str, ...], int]]:
        """Return the claims to make now: queues in order, and how many jobs."""
        wanted: list[tuple[tuple[str, ...], int]] = []
        if self._settings.reserved:
            held = self._by_queue()
            for queue, slots in self._settings.reserved.items():
                if held[queue] < slots:
                    wanted.append(((queue,), slots - held[queue]))
        free, prefetch = self.free(), self.prefetch()
        if free >= max(1, prefetch // 2):
            wanted.append((self._settings.queues, min(MAX_CLAIM, free)))
        return wanted

    def lanes(self) -> tuple[int, int, int]:
        """Return how many lanes to take now, how many jobs of each, and how many jobs in all."""
        room = max(0, min(MAX_CLAIM, self.free()))
        if self.per_job is None:
            return min(room, self._general), 1, room
        depth = max(1, min(MAX_CLAIM, int(LANE_AHEAD / self.per_job)))
        return room, depth, room

    def slots_for(self, jobs: int) -> int:
        """Return how many slots so many jobs are worth."""
        if self.per_job is None or self.per_job >= WORTH_A_SLOT:
            return jobs
        return min(jobs, 1 + int(jobs * self.per_job / WORTH_A_SLOT))

    def _by_queue(self) -> Counter[str]:
        hand = self._hand
        held = Counter(self._queue_of[job.level][0] for job in list(hand.held.values()))
        for lane in list(hand.lanes.values()):
            held[lane.queue] -= len(lane.ids) - 1
        return held

    def _held_generally(self) -> int:
        hand = self._hand
        if not self._settings.reserved:
            return (
                len(hand.held) - self.leaving - sum(len(lane.ids) - 1 for lane in list(hand.lanes.values()))
            )
        held = sum(max(0, n - self._settings.reserved.get(queue, 0)) for queue, n in self._by_queue().items())
        return max(0, held - self.leaving)
