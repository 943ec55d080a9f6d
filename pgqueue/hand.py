"""In hand: everything a worker process holds, and the way results travel to the loop that writes them.

Slots (threads, tasks) report here and wake the loop; the loop drains. All containers are dicts and deques whose
single operations are atomic, so nobody waits for a lock per job. Whoever removes a job from `running` owns its
outcome: the slot when the handler returns, the monitor when it gives the attempt up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pgqueue.job import (
    Buried,
    Claim,
    Claimed,
    Done,
    Dropped,
    Fenced,
    Job,
    Outcome,
    Released,
    Retried,
    Snoozed,
    is_limit,
)
from pgqueue.loop import Wake
from pgqueue.shelf import LaneHold


class Running(NamedTuple):
    """One attempt at work. `limit`: seconds it may take; `cancel`: how to stop it, None where that is impossible."""

    claimed: Claimed
    job: Job | None
    started: float
    limit: float
    cancel: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt that ended otherwise than well (or well, where somebody listens for it)."""

    claimed: Claimed
    outcome: Outcome
    seconds: float
    executed: bool = True


class Hand:
    """What this process holds."""

    def __init__(self, wake: Wake) -> None:
        self.wake = wake
        #: Claimed and not yet written off, by id.
        self.held: dict[int, Claimed] = {}
        #: Lanes in hand, by (queue, key, position): a key with a limit has several slots.
        self.lanes: dict[tuple[str, str, int], LaneHold] = {}
        #: Attempts at work, by (id, lease): a later attempt of the same job may run here beside one that has lost
        #: its lease, or was given up and has not returned.
        self.running: dict[tuple[int, int], Running] = {}
        #: Attempts given up whose handler has not returned: each still holds a slot.
        self.given_up: set[Claim] = set()
        self.done: deque[Claimed] = deque()
        self.ended: deque[Ended] = deque()
        self.lanes_over: deque[LaneHold] = deque()
        #: Lanes whose next job another kind of slot must run.
        self.handed_on: deque[LaneHold] = deque()
        #: Jobs that hold their idempotency key in the ledger.
        self.keyed: set[int] = set()
        #: Jobs somebody asked to cancel, and claims whose lease is gone: what has not begun must not.
        self.cancelled: set[int] = set()
        self.lost: frozenset[Claim] = frozenset()
        #: Job types whose death blocks the ordering key: what stands behind goes back unstarted.
        self.blocking: frozenset[str] = frozenset()
        #: Handler seconds and attempts, for the size of the next claim; approximate on purpose.
        self.busy_s = 0.0
        self.attempts = 0

    def finish(self, claimed: Claimed, outcome: Outcome, started: float) -> None:
        """Report how an attempt ended; the caller has removed it from `running`."""
        seconds = time.monotonic() - started
        self.busy_s += seconds
        self.attempts += 1
        self.ended.append(Ended(claimed, self._unless_cancelled(claimed, outcome, begun=True), seconds))

    def decline(self, claimed: Claimed, outcome: Outcome) -> None:
        """Report a job that is not run; it tells nothing about how long jobs take."""
        written = self._unless_cancelled(claimed, outcome, begun=False)
        self.ended.append(Ended(claimed, written, 0.0, executed=False))

    def _unless_cancelled(self, claimed: Claimed, outcome: Outcome, *, begun: bool) -> Outcome:
        if claimed.id in self.cancelled and isinstance(outcome, Retried | Snoozed | Released | Buried):
            return Dropped(begun=begun)
        return outcome

    def own(self, claimed: Claimed) -> bool:
        """Take an attempt out of `running` when its handler has returned; False if it was given up before."""
        if self.given_up and Claim(claimed.id, claimed.lease) in self.given_up:
            self.given_up.discard(Claim(claimed.id, claimed.lease))
            return False
        if self.running.pop((claimed.id, claimed.lease), None) is None:
            self.given_up.discard(Claim(claimed.id, claimed.lease))
            return False
        return True

    def give_up(self, claimed: Claimed) -> bool:
        """Take an attempt out of `running` while its handler goes on; False if the handler was quicker."""
        claim = Claim(claimed.id, claimed.lease)
        self.given_up.add(claim)  # first: the slot must see it, or find the attempt gone
        if self.running.pop(claim, None) is None:
            self.given_up.discard(claim)
            return False
        return True

    def barred(self, claimed: Claimed) -> Outcome | None:
        """Report a job that was cancelled, or is known to be lost, before its handler started; None if it may start."""
        if claimed.id in self.cancelled:
            outcome: Outcome = Dropped(begun=False)
        elif Claim(claimed.id, claimed.lease) in self.lost:
            outcome = Fenced()
        else:
            return None
        self.decline(claimed, outcome)
        return outcome

    def strike(self, claims: Iterable[Claimed]) -> None:
        """Forget claims that are written off; a later claim of the same job stays."""
        held, noted = self.held, bool(self.cancelled or self.keyed)
        for claimed in claims:
            job_id = claimed.id
            if held.get(job_id) is claimed:
                del held[job_id]
                if noted:
                    self.cancelled.discard(job_id)
                    self.keyed.discard(job_id)

    def advance(self, lane: LaneHold, outcome: Outcome) -> bool:
        """Move a lane on after its first job ended; tell whether the next one may run now."""
        if isinstance(outcome, Released):
            return False
        claimed = lane.jobs.popleft()
        if isinstance(outcome, Done):
            return bool(lane.jobs)
        if isinstance(outcome, Buried) and self.blocks(claimed):
            return False
        # What has an order waits as a whole; of a limited type only the job itself waits.
        if isinstance(outcome, Retried | Snoozed) and not is_limit(lane.key, claimed.name):
            lane.wait = max(lane.wait, outcome.delay)  # the budget may have put it off already
            return False
        return bool(lane.jobs)

    def blocks(self, claimed: Claimed) -> bool:
        """Tell whether the ordering key of this job waits for a person if the job dies."""
        return claimed.name in self.blocking and not is_limit(claimed.key or "", claimed.name)

    def lane_over(self, lane: LaneHold) -> None:
        """Report that no further job of this lane will run under this hold."""
        self.lanes_over.append(lane)
        self.wake.set()
