"""The sweep: looks at queues from their start, for late commits and for jobs whose worker was lost.

Keyed jobs are found by routing above a proven floor. Once a minute a sweep looks for them from the start too, a window
at a time, so that one below the floor (a row restored by hand, a lane somebody deleted) waits for no restart.

A sweep that finds no free slot owes its look: the next slot that is free is given to it before the next claim, or jobs
that run for long would keep a backlog of them in front of what only a sweep can find.

A job that lost its worker is a suspect: it may be what killed it. The first time it runs with seven others at
most, and the next few are taken when these have ended; from the second time it runs with nothing beside it. For that
one process of a fleet stops claiming and empties its hand. If that takes five minutes, it leaves it to another one,
and works for as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from pgqueue.claim import elect, resign
from pgqueue.config import MAX_CLAIM, WorkerSettings
from pgqueue.floors import WINDOW
from pgqueue.hand import Hand
from pgqueue.intake import Intake
from pgqueue.lanes import route
from pgqueue.pipeline import Pipeline
from pgqueue.quota import Quota
from pgqueue.round import Rounds
from pgqueue.stray import strays

#: Seconds between two looks at all keyed jobs of a queue.
WHOLE: Final = 60.0
#: Seconds after which a process that cannot empty its hand for a suspect goes on claiming, and for how long.
EMPTYING: Final = 300.0


class Sweeper:
    """Sweeps for one process. Everything here runs in the engine's thread."""

    def __init__(
        self, settings: WorkerSettings, hand: Hand, quota: Quota, intake: Intake, rounds: Callable[[], Rounds]
    ) -> None:
        self._settings = settings
        self._hand = hand
        self._quota = quota
        self._intake = intake
        self._rounds = rounds
        self._suspects: frozenset[int] = frozenset()
        self._suspected: Sequence[str] = ()
        self._one: int | None = None
        #: When the keyed jobs of a queue are looked at from the start, and how far the look under way has come.
        self._route_at: dict[str, float] = {}
        self._route_from: dict[str, int] = {}
        #: Queues whose last sweep found no free slot.
        self.owed: Sequence[str] = ()
        #: On which connection this process was elected, since when it empties its hand, until when it does not stand.
        self._elected_on: object = None
        self._alone_since = self._rests_until = 0.0

    @property
    def alone(self) -> bool:
        """Whether a suspect waits for the rest to end, or runs with nothing beside it: nothing else is claimed."""
        return self._elected_on is not None

    def sweep(self, queues: Sequence[str]) -> int:
        """Look at these queues from the start; return how many jobs were taken."""
        began = time.monotonic()
        free = self._quota.free()
        self.owed = queues if free <= 0 else ()
        wish, lost = (
            self._intake.sweep_wish(queues, max(0, min(free, MAX_CLAIM))),
            self._intake.suspect_wish(queues),
        )
        if not lost.levels:
            return 0
        ceilings = [self._intake.floors.ceiling[level] for level in lost.levels]
        recovering = free > 0 and self._suspects.isdisjoint(self._hand.held)
        answer, recovered, waiting = self._rounds().sweep(
            wish, lost, ceilings, recovering=recovering, alone=False
        )
        self._stand(waiting=waiting)
        if recovering:
            self._suspects, self._suspected = frozenset(c.id for c in recovered), queues
        got = self._intake.swept(wish, answer, lost, recovered)
        self._route(queues, began)
        cost = time.monotonic() - began
        if 20 * cost > self._settings.sweep:
            self._rounds().postpone(queues, 20 * cost)
        return got

    def _route(self, queues: Sequence[str], now: float) -> None:
        """Give keyed jobs their lanes, from the start of these queues, where that is due or under way."""
        for queue in queues:
            if queue not in self._route_from and now >= self._route_at.get(queue, 0.0):
                self._route_at[queue], self._route_from[queue] = now + WHOLE, 0
        looks = {queue: self._route_from[queue] for queue in queues if queue in self._route_from}
        if not looks:
            return
        with Pipeline(self._rounds().connection) as p:
            windows = p.send(strays(looks))
        lacking = {}
        for window in windows.result():
            if window.missing:
                lacking[window.queue] = looks[window.queue]
            if window.jobs < WINDOW or window.last >= self._intake.floors.route[window.queue]:
                del self._route_from[window.queue]  # what stands above the floor every round looks at
            else:
                self._route_from[window.queue] = window.last
        if lacking:
            with Pipeline(self._rounds().connection) as p:
                p.begin()
                p.send(route(lacking))
                p.commit()

    def more(self) -> int:
        """Take the next suspects if the last ones have ended: that needs no turn."""
        if not self._suspects or not self._suspects.isdisjoint(self._hand.held):
            return 0
        return self.sweep(self._suspected)

    def look_again(self) -> None:
        """See whether the suspect still waits for the rest to end: another process may have run it meanwhile."""
        if self._one in self._hand.held:
            return
        if self._hand.held and time.monotonic() - self._alone_since > EMPTYING:
            self._rests_until = time.monotonic() + EMPTYING
        wish = self._intake.suspect_wish(self._settings.queues)
        ceilings = [self._intake.floors.ceiling[level] for level in wish.levels]
        self._stand(waiting=self._rounds().waits_alone(wish, ceilings))

    def run_alone(self) -> bool:
        """Take one suspect, now that nothing else is in hand; tell whether to go on without waiting."""
        wish = self._intake.suspect_wish(self._settings.queues)
        ceilings = [self._intake.floors.ceiling[level] for level in wish.levels]
        _, found, _ = self._rounds().sweep(wish, wish, ceilings, recovering=False, alone=True)
        if not found:
            self._stand(waiting=False)
            return True
        self._one = found[0].id
        self._intake.shelve(self._intake.numbered(wish, found), recovered=1)
        return False

    def _stand(self, *, waiting: bool) -> None:
        """Stand for a suspect that waits, unless another process of these queues does; leave it when none waits."""
        connection, queues, now = self._rounds().connection, self._settings.queues, time.monotonic()
        elected = self._elected_on is connection
        if waiting and not elected and now >= self._rests_until:
            with Pipeline(connection) as p:
                vote = p.send(elect(queues))
            elected = vote.result()
            self._alone_since = now
        elif elected and (not waiting or now < self._rests_until):
            with Pipeline(connection) as p:
                p.send(resign(queues))
            elected = False
        self._elected_on = connection if elected else None
