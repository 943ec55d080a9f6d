"""The gates: the claim of queues that have a limit or a rate over all workers.

Such a queue is claimed by one worker at a time, in a transaction of its own: the gate says how many jobs may begin,
that many are claimed, and the gate notes them. It is a row of the queue, locked meanwhile; whoever finds it locked
passes by. Queues without a gate, and workers that serve none, have no part in this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import psycopg

from pgqueue.claim import Answer, claim
from pgqueue.config import MAX_CLAIM, WorkerSettings
from pgqueue.hand import Hand
from pgqueue.intake import Intake
from pgqueue.job import Claimed
from pgqueue.lanes import LaneSize, lane_claim, route
from pgqueue.limits import adopt, gate, gate_pass
from pgqueue.pipeline import Pending, Pipeline
from pgqueue.plan import LaneWish, Outcomes, Wish
from pgqueue.quota import Quota
from pgqueue.round import BRIEFLY, Leases, Rounds
from pgqueue.statement import Row

#: Seconds until the next look at a queue in which nothing waits, or whose limit is reached.
PAUSE: Final = 0.02
NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What was claimed through a gate."""

    wish: Wish
    answer: Answer
    lane_wish: LaneWish | None
    lane_jobs: list[Claimed]

    def ids(self) -> list[int]:
        return [job.id for job in (*self.answer.jobs, *self.lane_jobs)]


class Gates:
    """Claims through gates for one process. Everything here runs in the engine's thread."""

    def __init__(
        self,
        settings: WorkerSettings,
        hand: Hand,
        quota: Quota,
        intake: Intake,
        leases: Leases,
        rounds: Callable[[], Rounds],
    ) -> None:
        self._settings = settings
        self._visibility = timedelta(seconds=settings.visibility)
        self._hand = hand
        self._quota = quota
        self._intake = intake
        self._leases = leases
        self._rounds = rounds
        #: Queues whose jobs in hand have their permits.
        self._known: set[str] = set()
        self._due: dict[str, float] = {}
        self._whole_at: dict[str, float] = {}
        #: Queues where jobs with a key may wait, and those where these are claimed first next time.
        self._keyed: set[str] = set()
        self._lanes_first: set[str] = set()
        #: Monotonic time of the next look that should not wait for the poll.
        self.soon = NEVER
        #: Whether this turn found room and looked at a queue.
        self.looked = False
        #: Whether a limit was reached: what ends is written at once then, somebody waits for its permit.
        self.full = False

    def before(self) -> int:
        """Claim, before a round does, from the gates whose turn it is; return how many jobs came.

        Strict order: those that no queue without a gate stands before. Where the last round found all it took in
        queues behind a gate, that gate is first this once: else it would get what such queues leave over, nothing.
        """
        self.soon, self.looked = NEVER, False
        self._known &= self._intake.paused.gates
        got, reached, open_before = 0, self._intake.reached, False
        for rank, queue in enumerate(self._settings.queues):
            if queue not in self._intake.paused.gates:
                open_before = open_before or queue not in self._intake.paused.queues
            elif not open_before or (reached is not None and reached > rank):
                if open_before:
                    self._intake.reached = None
                got += self._look(queue)
        return got

    def after(self, room: int) -> int:
        """Claim from all gates what the claim of a round has left room for; return how many jobs came."""
        got = 0
        for queue in self._settings.queues:
            if queue in self._intake.paused.gates and got < room:
                got += self._look(queue, room - got)
        return got

    def _look(self, queue: str, most: int = MAX_CLAIM) -> int:
        """Claim from one queue if it is due and there is room."""
        if queue in self._intake.paused.queues:
            return 0
        if queue not in self._known:
            self._adopt(queue)
        now, room = time.monotonic(), min(most, MAX_CLAIM, self._quota.room(queue))
        if room < 1:
            return 0
        if (due := self._due.get(queue, 0.0)) > now:
            self.soon = min(self.soon, due)
            return 0
        self.looked = True
        return self._through(queue, room, now)

    def ended(self, finished: Collection[int]) -> bool:
        """Note that jobs of this process have ended; tell whether a limit that was reached may not be any more."""
        if not finished:
            return False
        self._due.clear()
        was, self.full = self.full, False
        return was

    def _adopt(self, queue: str) -> None:
        """Give jobs that began before the queue had a limit their permits: they count."""
        ranks = self._intake.queue_of
        held = [job.id for job in list(self._hand.held.values()) if ranks[job.level][0] == queue]
        if held:
            with Pipeline(self._rounds().connection) as p:
                p.send(adopt(queue, held))
        self._known.add(queue)

    def _through(self, queue: str, room: int, now: float) -> int:
        """Claim up to `room` jobs of a queue through its gate, and shelve them when that is committed."""
        connection = self._rounds().connection
        settled = self._intake.floors.horizon.settled
        whole = now >= self._whole_at.get(queue, 0.0)
        routed: Pending[list[Row]] | None = None
        with Pipeline(connection) as p:
            if queue in self._keyed:
                p.begin()
                routed = p.send(route({queue: self._intake.floors.route[queue]}))
                p.commit()
            p.begin()
            # A process that is stopped between these round trips may not keep the queue from all others.
            p.run("SET LOCAL idle_in_transaction_session_timeout = '5s'")
            p.run(BRIEFLY)
            asked = p.send(gate(queue, room))
        n, wait = asked.result()
        try:
            found = self._claim(connection, queue, n, whole=whole) if n >= 1 else None
            with Pipeline(connection) as p:
                if found is not None and (ids := found.ids()):
                    p.send(gate_pass(queue, ids))
                p.commit()
        except BaseException:
            if not connection.closed:
                connection.execute("ROLLBACK")
            raise
        if found is None:
            self._due[queue] = now + max(PAUSE, wait)
            self.full = self.full or not wait
            if wait:
                self.soon = min(self.soon, self._due[queue])
            return 0
        if whole:
            self._whole_at[queue] = now + self._settings.sweep
        self.full = self.full or n < room
        if n < room or len(found.ids()) < n:
            self._due[queue] = now + PAUSE
        return self._shelve(settled, found, routed.result() if routed else [])

    def _shelve(self, settled: int, found: _Found, routed: list[Row]) -> int:
        """Shelve what was claimed, the horizon having been at `settled` before; return how much that was."""
        got = self._intake.took(found.wish, settled, found.answer)
        if found.lane_wish is not None:
            out = Outcomes(lane_jobs=found.lane_jobs, routed=routed)
            got += self._intake.took_lanes(found.lane_wish, settled, out, gated=True)
        return got

    def _claim(self, connection: psycopg.Connection[Any], queue: str, n: int, *, whole: bool) -> _Found:
        """Claim jobs without a key and lanes, n jobs in all; who is first takes turns, as both may have a backlog."""
        keyed = queue in self._keyed
        lanes_first = keyed and queue in self._lanes_first
        self._lanes_first ^= {queue}
        lane_wish, lane_jobs = self._claim_lanes(connection, queue, n) if lanes_first else (None, [])
        wish = self._intake.gate_wish(queue, n - len(lane_jobs), whole=whole)
        floors = {queue: self._intake.floors.route[queue]}
        with Pipeline(connection) as p:
            asked = p.send(
                claim(wish.scope, wish.starts, wish.n, self._leases.new(), self._visibility, floors)
            )
        answer = asked.result()
        if keyed and not lanes_first and (left := n - len(answer.jobs)):
            lane_wish, lane_jobs = self._claim_lanes(connection, queue, left)
        (self._keyed.add if answer.keyed else self._keyed.discard)(queue)
        return _Found(wish=wish, answer=answer, lane_wish=lane_wish, lane_jobs=lane_jobs)

    def _claim_lanes(
        self, connection: psycopg.Connection[Any], queue: str, n: int
    ) -> tuple[LaneWish | None, list[Claimed]]:
        wish = self._intake.gate_wish(queue, n, whole=True)
        _, lanes, depth, _ = self._quota.lanes()
        size = LaneSize(lanes=max(1, min(lanes, n)), depth=depth, total=n)
        with Pipeline(connection) as p:
            asked = p.send(lane_claim(wish.scope, wish.starts, size, self._leases.new(), self._visibility))
        lane_wish = LaneWish(
            levels=wish.levels, scope=wish.scope, starts=wish.starts, lanes=size.lanes, depth=depth, total=n,
            route={queue: self._intake.floors.route[queue]},
        )  # fmt: skip
        return lane_wish, asked.result()
