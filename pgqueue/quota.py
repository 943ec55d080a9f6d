"""Quota: how much to claim, by what is in hand, how long jobs take and how large their payloads are.

A worker holds its running jobs and, for short ones, some more, so that no slot waits for a round trip: 50 ms of
work, at most 1,500 jobs and about 32 MiB of payload; nothing beyond the running ones when jobs take a second. Reserved
slots have a claim of their own, so that a full hand of bulk jobs never keeps a critical one out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from operator import attrgetter

from pgqueue.config import MAX_CLAIM, WorkerSettings
from pgqueue.hand import Hand
from pgqueue.job import Claimed

#: Seconds of work to hold beyond the running jobs.
AHEAD = 0.05
#: Beyond the running jobs, this many at most: a claim on the shelf, one being made, one behind it.
MOST_AHEAD = 3 * MAX_CLAIM
#: A lane hands out this many seconds of work at once: while it is held, nobody else can help with its key.
LANE_AHEAD = 0.02
#: Work for which it is worth to wake one more slot.
WORTH_A_SLOT = 0.001
#: Characters of payload to hold, unless the slots alone need more.
MOST_PAYLOAD = 32 * 1024 * 1024
#: A claim of so many jobs tells how large payloads are, whatever the ones before told.
TELLING = 20
_PAYLOAD = attrgetter("payload")


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
        #: Jobs still held whose results the coming round writes, and how many of each queue where slots are reserved.
        self.leaving = 0
        self._leaving_of: Counter[str] = Counter()
        #: Jobs asked for by rounds that have not been answered.
        self.coming = 0
        #: Set while what is shelved does not move: hold nothing beyond the running jobs.
        self.stalled = False
        #: Jobs that a lane of the last claim handed out, on average.
        self._per_lane = 1.0
        #: Mean characters of a payload, None before the first claim; and how many such payloads to hold.
        self._per_payload: float | None = None
        self._most = MOST_PAYLOAD

    def learn(self) -> None:
        """Take in the durations measured since the last call."""
        hand = self._hand
        n, s = hand.attempts - self._seen_n, hand.busy_s - self._seen_s
        if n > 0:
            self._seen_n, self._seen_s = hand.attempts, hand.busy_s
            weight = 1.0 if self.per_job is None else min(0.5, n / 20)
            self.per_job = (self.per_job or 0.0) * (1 - weight) + max(s, 1e-7) / n * weight

    def leave(self, jobs: Sequence[Claimed]) -> None:
        """Take in whose results the coming round writes: their slots are free, and may be claimed for now."""
        self.leaving = len(jobs)
        if self._settings.reserved:
            self._leaving_of = Counter(self._queue_of[job.level][0] for job in jobs)

    def learn_payloads(self, jobs: Collection[Claimed]) -> None:
        """Take in how large the payloads of a claim are."""
        if not jobs:
            return
        mean = sum(map(len, map(_PAYLOAD, jobs))) / len(jobs)
        weight = 1.0 if self._per_payload is None else min(1.0, len(jobs) / TELLING)
        self._per_payload = (self._per_payload or 0.0) * (1 - weight) + mean * weight
        self._most = int(MOST_PAYLOAD / max(1.0, self._per_payload))

    def learn_lanes(self, lanes: int, jobs: int) -> None:
        """Take in how many jobs so many lanes handed out."""
        if lanes:
            self._per_lane = jobs / lanes

    def prefetch(self) -> int:
        """Return how many jobs to hold beyond the running ones."""
        if self._settings.prefetch is not None:
            return 0 if self.stalled else self._settings.prefetch
        if self.stalled or self.per_job is None:
            return 0
        slots = self._settings.concurrency
        return max(0, min(MOST_AHEAD, int(slots * AHEAD / self.per_job), self._most - slots))

    def low_water(self) -> int:
        """Return at how many jobs on the shelf the next claim is due."""
        prefetch = self.prefetch()
        return prefetch - min(MAX_CLAIM, prefetch - prefetch // 2)

    def free(self) -> int:
        """Return how many more jobs of any queue this process may hold.

        What stands behind the first job of a lane takes no slot; it counts as far as jobs are held ahead.
        """
        prefetch = self.prefetch()
        ahead = prefetch - min(prefetch, self._behind())
        return self._general - len(self._hand.given_up) + ahead - self._held_generally() - self.coming

    def claims(self) -> list[tuple[tuple[str, ...], int]]:
        """Return the claims to make now: queues in order, and how many jobs."""
        wanted: list[tuple[tuple[str, ...], int]] = []
        wanted += (((queue,), n) for queue, n in self._reserved_room().items())
        free, prefetch = self.free(), self.prefetch()
        if free >= max(1, min(MAX_CLAIM, prefetch // 2)):
            wanted.append((self._settings.queues, min(MAX_CLAIM, free)))
        return wanted

    def lanes(self) -> tuple[tuple[str, ...], int, int, int]:
        """Return of which queues to take lanes now, how many, how many jobs of each, and how many jobs in all."""
        room, queues = max(0, min(MAX_CLAIM, self.free())), self._settings.queues
        if not room and (kept := self._reserved_room()):
            room, queues = sum(kept.values()), tuple(q for q in queues if q in kept)
        if self.per_job is None:
            return queues, min(room, self._settings.concurrency), 1, room
        slots = self._settings.concurrency
        depth = max(1, min(MAX_CLAIM, int(LANE_AHEAD / self.per_job), self._most // slots))
        lanes = max(slots, math.ceil(room / min(depth, self._per_lane)))
        return queues, min(room, lanes), depth, room

    def room(self, queue: str) -> int:
        """Return how many more jobs of this queue this process may hold."""
        return max(self.free(), self._reserved_room().get(queue, 0))

    def slots_for(self, jobs: int) -> int:
        """Return how many slots so many jobs are worth."""
        if self.per_job is None or self.per_job >= WORTH_A_SLOT:
            return jobs
        return min(jobs, 1 + int(jobs * self.per_job / WORTH_A_SLOT))

    def _reserved_room(self) -> dict[str, int]:
        """Return how many reserved slots have nothing to do, by queue."""
        if not self._settings.reserved:
            return {}
        held = self._by_queue()
        return {queue: n - held[queue] for queue, n in self._settings.reserved.items() if held[queue] < n}

    def _by_queue(self) -> Counter[str]:
        """Count what is held by queue, a lane as one, without what is leaving."""
        hand = self._hand
        held = Counter(self._queue_of[job.level][0] for job in list(hand.held.values()))
        held.subtract(self._leaving_of)
        for lane in list(hand.lanes.values()):
            held[lane.queue] -= max(0, len(lane.jobs) - 1)
        return held

    def _held_generally(self) -> int:
        hand = self._hand
        if not self._settings.reserved:
            return len(hand.held) - self.leaving - self._behind()
        return sum(max(0, n - self._settings.reserved.get(queue, 0)) for queue, n in self._by_queue().items())

    def _behind(self) -> int:
        """Count the jobs that stand behind the first of their lane."""
        return sum(max(0, len(lane.jobs) - 1) for lane in list(self._hand.lanes.values()))
