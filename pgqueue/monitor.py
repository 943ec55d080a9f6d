"""The monitor: stops attempts that should not go on.

Over its time: a task is cancelled, a child process killed, a thread given up (its result is ignored, its slot
stays taken until the handler returns; both are told). Cancelled: the handler is told, and whatever it does the
job never runs again. Lease lost: the handler is told; its result would be refused anyway.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from pgqueue.events import Bus, HandlerOverran, HandlerReturned
from pgqueue.hand import Hand, Running
from pgqueue.job import Claim
from pgqueue.processes import ProcessRunner
from pgqueue.run import Runner


class Monitor:
    """Watches the running attempts of one process. Runs in the pulse's thread."""

    def __init__(self, hand: Hand, runners: Mapping[str, Runner], bus: Bus) -> None:
        self._hand = hand
        self._runners = runners
        self._bus = bus
        #: Attempts whose handlers go on after their timeout, as told.
        self._overrun: dict[Claim, Running] = {}

    @property
    def overrun(self) -> int:
        """How many slots are kept by handlers that go on after their timeout."""
        return len(self._overrun)

    def look(self) -> None:
        """Give up the attempts that are over their time; tell whose handlers go on, and which of these have ended."""
        now = time.monotonic()
        for claim in [c for c in self._overrun if c not in self._hand.given_up]:
            running = self._overrun.pop(claim)
            self._bus.emit(
                HandlerReturned(
                    job_id=claim.id,
                    name=running.claimed.name,
                    attempt=running.claimed.attempt,
                    seconds=now - running.started,
                    overrun=len(self._overrun),
                )
            )
        for running in list(self._hand.running.values()):
            if now - running.started > running.limit:
                runner = self._runners[running.claimed.name]
                if isinstance(runner, ProcessRunner) and now - runner.began(running.claimed) <= running.limit:
                    continue  # its child was still starting
                self._give_up(running)

    def cancel(self, ids: Iterable[int]) -> None:
        """Tell the handlers of these jobs to stop; the jobs never run again."""
        asked = [claimed for i in ids if (claimed := self._hand.held.get(i)) is not None]
        # All of them before any handler ends and the next one starts.
        self._hand.cancelled.update(claimed.id for claimed in asked)
        for claimed in asked:
            if (running := self._hand.running.get((claimed.id, claimed.lease))) is not None:
                self._tell(running)

    def lost(self, claims: Iterable[Claim]) -> None:
        """Take in all claims in hand whose lease is gone: what runs is told to stop, what waits does not start."""
        before, self._hand.lost = self._hand.lost, frozenset(claims)
        for claim in self._hand.lost - before:
            if (running := self._hand.running.get(claim)) is not None:
                self._tell(running)

    def _tell(self, running: Running) -> None:
        if running.job is not None:
            running.job.ask_to_stop()
        runner = self._runners[running.claimed.name]
        if running.cancel is not None:
            running.cancel()
        elif isinstance(runner, ProcessRunner):
            runner.kill(running.claimed)

    def _give_up(self, running: Running) -> None:
        """Decide the outcome in the handler's place: whoever removes the attempt from `running` decides."""
        claimed = running.claimed
        if not self._hand.give_up(claimed):
            return
        if running.job is not None:
            running.job.ask_to_stop()
        runner = self._runners[claimed.name]
        outcome = runner.timed_out(claimed, running.limit)
        lane = next(
            (
                hold
                for hold in list(self._hand.lanes.values())
                if hold.lease == claimed.lease and claimed.id in hold.ids
            ),
            None,
        )
        self._hand.finish(claimed, outcome, running.started)
        if lane is not None:
            self._hand.advance(lane, outcome)
            self._hand.lane_over(lane)
        if running.cancel is not None:
            running.cancel()
        elif isinstance(runner, ProcessRunner):
            runner.kill(claimed)
        else:
            self._goes_on(running)
        self._hand.wake.set()

    def _goes_on(self, running: Running) -> None:
        """Tell that a thread has been given up, unless its handler has returned meanwhile."""
        claimed = running.claimed
        claim = Claim(claimed.id, claimed.lease)
        if claim not in self._hand.given_up:
            return
        self._overrun[claim] = running
        self._bus.emit(
            HandlerOverran(
                job_id=claimed.id,
                name=claimed.name,
                attempt=claimed.attempt,
                limit=running.limit,
                overrun=len(self._overrun),
            )
        )
