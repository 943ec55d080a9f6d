"""Intake: what to claim next, and where the claimed jobs go.

Keeps the floors, builds the wishes of a round, and puts what came back on the shelves of the slots that run it.
All of it runs in the engine's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import cast

import psycopg

from pgqueue.claim import Answer, Paused, Scope
from pgqueue.config import WorkerSettings
from pgqueue.events import AlreadyApplied, Bus, JobsClaimed
from pgqueue.floors import Floors
from pgqueue.hand import Hand
from pgqueue.job import (
    Buried,
    Claim,
    Claimed,
    Dropped,
    Failure,
    Outcome,
    Released,
    Retried,
    Snoozed,
    is_limit,
)
from pgqueue.ledger import Keyed
from pgqueue.plan import LaneWish, Outcomes, Wish
from pgqueue.quota import Quota
from pgqueue.retries import Retries
from pgqueue.routing import Routing
from pgqueue.run import Runner, cancelled, deferred, expired, idempotency_key, unreadable
from pgqueue.shelf import Item, LaneHold
from pgqueue.stride import Stride
from pgqueue.tasks import TaskSlots
from pgqueue.threads import ThreadSlots
from pgqueue.weights import Weights

#: How long a job waits, in seconds, while another one of its idempotency key runs.
LEDGER_WAIT = 1.0
#: Where fewer jobs are asked for, `claim_backlog` saves less than its look for keyed jobs costs.
BACKLOG = 32
_ID = attrgetter("id")
_EXTRA = attrgetter("extra")


class Intake:
    """Claims and shelves for one process. `levels[0]` does not exist: SQL counts levels from 1."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        runners: Mapping[str, Runner],
        levels: Sequence[tuple[str, int]],
        hand: Hand,
        quota: Quota,
        threads: ThreadSlots,
        tasks: TaskSlots | None,
        retries: Retries,
        bus: Bus,
    ) -> None:
        self._settings = settings
        self._runners = runners
        self._levels = self.queue_of = levels
        self._hand = hand
        self._quota = quota
        self._threads = threads
        self._tasks = tasks
        self._retries = retries
        self._bus = bus
        self.floors = Floors(levels[1:])
        self._stride = Stride()
        self.cursor = [0] * (len(levels) - 1)
        self._in_order = list(range(len(levels) - 1))
        #: Whose turn it is where queues are served by weight: for jobs with and without an ordering key apart.
        self._turns, self._lane_turns = Weights(settings.weights), Weights(settings.weights)
        self._lane_floors = [0] * (len(levels) - 1)
        self._looked_whole_at = 0.0
        self._routing = Routing(self.floors, quota, 2 * settings.sweep)
        self.keyed = False
        #: Whether a first look is likely to find what the worker is called for: the last jobs had no key, and stood at
        #: the front.
        self.few = False
        #: What is not claimed; queues with a gate are claimed through it (`pgqueue.gate`), not by rounds and sweeps.
        self.paused = Paused(frozenset(), frozenset())
        #: The rank of the queue where the last claim of all queues had all it asked for; None if it found less.
        self.reached: int | None = None
        self._all: Wish | None = None
        self._names = list(runners)
        #: Takes idempotency keys in the ledger; the engine sets it when it is connected.
        self.take: Callable[[Sequence[Keyed]], tuple[set[int], dict[int, int]]] = lambda _: (set(), {})
        #: The queues whose last claim found all it asked for.
        self._backlogged: set[tuple[str, ...]] = set()
        self._to_wake: list[tuple[ThreadSlots | TaskSlots, int]] = []

    def pause(self, paused: Paused) -> None:
        """Leave these queues and names out of the next claims."""
        self.paused = paused
        self._names = [name for name in self._runners if name not in paused.names]

    def drop(self) -> None:
        """Start everything from 0."""
        self.floors.drop()
        self.cursor = [0] * len(self.cursor)
        self._lane_floors = [0] * len(self._lane_floors)

    def wishes(self, front: Sequence[Wish] = (), *, called: bool = False) -> list[Wish]:
        """Return the claims of the next round.

        `front` are those of the round that it is sent behind. `called`: it is the first after a notification.
        """
        starts = self._stride.starts(self.floors, front)
        wishes = []
        for queues, n in self._quota.claims():
            if levels := self._levels_of(queues, self._turns):
                backlog = n >= BACKLOG and queues in self._backlogged
                few = called and self.few and not backlog and not self.keyed
                wishes.append(replace(self._wish(levels, n, starts), queues=queues, backlog=backlog, few=few))
                if queues == self._settings.queues:
                    self._all = wishes[-1]
        return wishes

    def lane_wish(self) -> LaneWish | None:
        """Return the claim of lanes of the next round; every 250 ms it looks at all of them."""
        queues, lanes, depth, total = self._quota.lanes()
        levels = self._levels_of(queues, self._lane_turns)
        if not lanes or not levels:
            return None
        now = time.monotonic()
        if whole := now - self._looked_whole_at > self._settings.sweep:
            self._looked_whole_at = now
            self._lane_floors = [0] * len(self._lane_floors)
        wish = self._wish(levels, lanes, self._lane_floors)
        return LaneWish(
            levels=levels, scope=wish.scope, starts=wish.starts, lanes=lanes, depth=depth, total=total,
            backlog=self._routing.enough and total >= BACKLOG, whole=whole, route=self._routing.due(now),
        )  # fmt: skip

    def sweep_wish(self, queues: Collection[str], n: int) -> Wish:
        """Return a claim of these queues from their start, or from where the last sweep's window ended."""
        return self._wish(self._levels_of(queues, self._turns), n, self.cursor)

    def suspect_wish(self, queues: Collection[str]) -> Wish:
        """Return what a look for suspects covers: they have passed the gate of their queue, if there is one."""
        wanted = set(queues) - self.paused.queues
        return self._wish(
            [n for n, (queue, _) in enumerate(self._levels[1:]) if queue in wanted], 0, self.cursor
        )

    def gate_wish(self, queue: str, n: int, *, whole: bool) -> Wish:
        """Return a claim of one queue, from its floors or from its start."""
        levels = [level for level, (name, _) in enumerate(self._levels[1:]) if name == queue]
        return self._wish(levels, n, [0] * len(self._levels) if whole else self.floors.starts())

    def took(self, wish: Wish, settled: int, answer: Answer) -> int:
        """Shelve the jobs of a claim and move the floors; return how many there were."""
        jobs = self.numbered(wish, answer.jobs)
        self._stride.took(wish, jobs)
        last = (jobs[-1].level - 1, jobs[-1].pos) if jobs else None
        exhausted = len(jobs) < wish.n and not wish.backlog and not wish.few
        (self._backlogged.add if len(jobs) == wish.n else self._backlogged.discard)(wish.queues)
        full = {wish.levels[place]: pos for place, pos in answer.full.items()}
        self.floors.claimed(wish.levels, wish.starts, settled, last, full, exhausted=exhausted)
        self.floors.saw({job.level - 1: job.pos for job in jobs}.items())  # in order: the last of each level
        if wish is self._all:
            full_hand = bool(jobs) and len(jobs) == wish.n and not self._turns
            self.reached = self._settings.queues.index(self._levels[jobs[-1].level][0]) if full_hand else None
        if self._turns:
            self._turns.took([self._levels[job.level][0] for job in jobs], exhausted=exhausted)
        self.shelve(jobs)
        return len(jobs)

    def swept(self, wish: Wish, answer: Answer, lost: Wish, recovered: Sequence[Claimed]) -> int:
        """Shelve what a sweep found: late jobs of `wish`, suspects of `lost`; return how many jobs that were."""
        jobs = self.numbered(wish, answer.jobs)
        full = {wish.levels[place]: pos for place, pos in answer.full.items()}
        last = {job.level - 1: job.pos for job in jobs}
        if jobs and len(jobs) == wish.n:
            self.floors.swept(wish.levels, last)
        if wish.n > 0:  # without room for jobs nothing was looked at
            for level in wish.levels:
                self.cursor[level] = full.get(level, 0)
        if self._turns:
            self._turns.took([self._levels[job.level][0] for job in jobs], exhausted=False)
        self.shelve(jobs)
        self.shelve(self.numbered(lost, recovered), recovered=len(recovered))
        return len(jobs) + len(recovered)

    def took_lanes(self, wish: LaneWish, settled: int, out: Outcomes, *, gated: bool = False) -> int:
        """Shelve the jobs of a lane claim, one item a lane; return how many lanes came."""
        self._routing.took(list(wish.route), out.routed, settled, time.monotonic())
        jobs = sorted(self.numbered(wish, out.lane_jobs), key=_ID)
        lanes = {(lane.queue, lane.key): (wish.levels[lane.level - 1] + 1, lane.pos) for lane in out.lanes}
        holds: dict[int, LaneHold] = {}  # no two lanes have one position
        for job in jobs:
            queue, key = self._levels[job.level][0], job.key or ""
            level, pos = lanes[queue, key] if lanes else (job.level, job.pos)
            hold = holds.get(pos)
            if hold is None:
                hold = holds[pos] = LaneHold(queue, key, job.lease, level, pos)
            hold.jobs.append(job)
        self._hold(jobs)
        for pos, hold in holds.items():
            hold.ids = tuple(map(_ID, hold.jobs))
            self._lane_floors[hold.level - 1] = max(self._lane_floors[hold.level - 1], pos)
            self._hand.lanes[hold.queue, hold.key, pos] = hold
            self._judge_lane(hold)
            if hold.jobs:
                self.dispatch(hold)
            else:
                self._hand.lane_over(hold)
        exhausted = len(holds) < wish.lanes and len(out.lane_jobs) < wish.total
        if not gated:  # a gate lets through what its limit allows, whatever waits
            self._routing.enough = not exhausted
            self._quota.learn_lanes(len(holds), len(out.lane_jobs))
        if self._lane_turns:
            given = [hold.queue for hold in holds.values() for _ in hold.ids]
            self._lane_turns.took(sorted(given, key=self._lane_turns.order().index), exhausted=exhausted)
        if holds:
            self._bus.emit(JobsClaimed(count=len(out.lane_jobs)))
        return len(holds)

    def shelve(self, jobs: list[Claimed], recovered: int = 0) -> None:
        """Put jobs on the shelves of the slots that run them."""
        if not jobs:
            return
        self._hold(jobs)
        self._bus.emit(JobsClaimed(count=len(jobs), recovered=recovered))
        if self._tasks is None and len(self._settings.queues) == 1 and not any(map(_EXTRA, jobs)):
            self._put(self._threads, self._settings.queues[0], cast("list[Item]", jobs))
            return
        runners, levels = self._runners, self._levels
        shelves: dict[tuple[bool, str], list[Item]] = {}
        barred = self._bar(jobs)
        for job in jobs:
            if (verdict := barred.get(job.id) or self._verdict(job)) is not None:
                self._hand.decline(job, verdict)
            else:
                shelves.setdefault((runners[job.name].kind.is_async, levels[job.level][0]), []).append(job)
        for (is_async, queue), items in shelves.items():
            self._put(self._slots(is_async=is_async), queue, items)

    def _hold(self, jobs: Collection[Claimed]) -> None:
        """Note jobs as held. A claim tells itself whether its job is cancelled: what was heard before is over."""
        self._hand.held.update(zip(map(_ID, jobs), jobs, strict=True))
        self._quota.learn_payloads(jobs)
        if self._hand.cancelled:
            self._hand.cancelled.difference_update(map(_ID, jobs))

    def dispatch(self, lane: LaneHold) -> None:
        """Put a lane on the shelf of the slots that run its next job."""
        self._put(self._slots(is_async=self._runners[lane.jobs[0].name].kind.is_async), lane.queue, [lane])

    def _slots(self, *, is_async: bool) -> ThreadSlots | TaskSlots:
        return self._tasks if is_async and self._tasks is not None else self._threads

    def _put(self, slots: ThreadSlots | TaskSlots, queue: str, items: list[Item]) -> None:
        slots.shelf.put(queue, items)
        self._to_wake.append((slots, self._quota.slots_for(len(items))))

    def wake_slots(self) -> None:
        """Put slots to work on what was shelved since the last call.

        Apart from shelving, so that the next round is on its way before handlers take the interpreter.
        """
        while self._to_wake:
            slots, count = self._to_wake.pop()
            slots.wake(count)

    def _judge_lane(self, hold: LaneHold) -> None:
        """Take out what is not to run; what stands behind a job that must wait goes back with it."""
        if not any(map(_EXTRA, hold.jobs)):
            return
        barred = self._bar(hold.jobs)
        jobs, hold.jobs = hold.jobs, deque()
        blocked = False
        for job in jobs:
            verdict = barred.get(job.id) or self._verdict(job)
            if hold.wait or blocked:
                verdict = Released()
            if verdict is None:
                hold.jobs.append(job)
            else:
                self._hand.decline(job, verdict)
            if isinstance(verdict, Snoozed | Retried) and not is_limit(hold.key, job.name):
                hold.wait = verdict.delay
            blocked = blocked or (isinstance(verdict, Buried) and self._hand.blocks(job))

    def _bar(self, jobs: Iterable[Claimed]) -> dict[int, Outcome]:
        """Return what becomes of jobs that may not run now: the retry budget or the ledger is against it."""
        particular = [job for job in jobs if job.extra is not None]
        late = [job for job in particular if deferred(job) and self._verdict(job) is None]
        put_off = {job.id: self._runners[job.name].put_off(job) for job in self._retries.refuse(late)}
        return put_off | self._take_keys([job for job in particular if job.id not in put_off])

    def _take_keys(self, jobs: Iterable[Claimed]) -> dict[int, Outcome]:
        """Take the idempotency keys of jobs that have one; return what becomes of those that may not run."""
        asking = {job.id: job for job in jobs if idempotency_key(job)}
        if not asking:
            return {}
        keyed = [
            Keyed(claim=Claim(j.id, j.lease), name=j.name, key=idempotency_key(j)) for j in asking.values()
        ]
        try:
            taken, before = self.take(keyed)
        except psycopg.errors.LockNotAvailable:  # somebody sits on a key: whoever has one looks again later
            return dict.fromkeys(asking, Snoozed(delay=LEDGER_WAIT))
        except psycopg.Error:  # the round that follows meets the same trouble and deals with it
            return dict.fromkeys(asking, Released())
        for job_id in before:
            job = asking[job_id]
            self._bus.emit(AlreadyApplied(job_id=job_id, name=job.name, key=idempotency_key(job)))
        taken -= before.keys()
        self._hand.keyed |= taken
        waiting = asking.keys() - taken - before.keys()
        barred: dict[int, Outcome] = dict.fromkeys(waiting, Snoozed(delay=LEDGER_WAIT))
        return barred | {i: self._runners[asking[i].name].skipped(asking[i], by) for i, by in before.items()}

    def _verdict(self, job: Claimed) -> Outcome | None:
        """Decide about a job that is not to run at all."""
        if job.extra is None:
            return None
        if unreadable(job):
            failure = Failure(error_type="Unreadable", message="its headers are nested too deeply to be read")
            return Buried(reason="undecodable", failure=failure)
        if cancelled(job):
            return Dropped(begun=False)
        if expired(job):
            failure = Failure(
                error_type="Expired", message="its expires_at had passed before a worker could run it"
            )
            return Buried(reason="expired", failure=failure)
        return self._runners[job.name].lost(job)

    def _wish(self, levels: list[int], n: int, starts: Sequence[int]) -> Wish:
        pairs = [self._levels[level + 1] for level in levels]
        scope = Scope(queues=[q for q, _ in pairs], priorities=[p for _, p in pairs], names=self._names)
        return Wish(levels=levels, scope=scope, starts=[starts[level] for level in levels], n=n)

    def _levels_of(self, queues: Collection[str], weights: Weights) -> list[int]:
        wanted = set(queues) - self.paused.queues - self.paused.gates
        levels = [level for level, (queue, _) in enumerate(self._levels[1:]) if queue in wanted]
        if weights:
            place = {queue: n for n, queue in enumerate(weights.order())}
            levels.sort(key=lambda level: place[self._levels[level + 1][0]])
        return levels

    def numbered(self, wish: Wish | LaneWish, jobs: Sequence[Claimed]) -> list[Claimed]:
        """Number the levels of a partial claim as this process does."""
        levels = wish.levels
        if levels == self._in_order:
            return list(jobs)
        return [job._replace(level=levels[job.level - 1] + 1) for job in jobs]
