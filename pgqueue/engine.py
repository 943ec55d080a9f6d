"""The engine: the loop that writes results and claims jobs, in a thread and on a connection of its own.

Each turn drains what the slots have finished, decides how many jobs to claim, and sends both as one round. With
nothing to claim and free slots it announces itself idle (see `heartbeat.idle`), looks once more, and waits for a
notification or its poll timer, 10 ms rising to the longest poll. Every 250 ms or so one process of all sweeps a
queue from the start: late commits, and suspects whose worker was lost. A suspect that was lost twice runs with
nothing beside it: the engine lets the rest end first.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import psycopg

from pgqueue.config import WorkerSettings
from pgqueue.dsn import one_line
from pgqueue.events import Bus, LoopFailed, LoopRecovered
from pgqueue.hand import Hand
from pgqueue.intake import Intake
from pgqueue.job import Buried, Claimed, Completed
from pgqueue.loop import IdlePoll, Trouble
from pgqueue.quota import Quota
from pgqueue.retries import Retries
from pgqueue.round import Leases, Outcomes, Plan, Results, Rounds
from pgqueue.run import failure_of
from pgqueue.shelf import Item, LaneHold, Shelf
from pgqueue.sweep import Sweeper
from pgqueue.writeoff import WriteOff

#: Shelved jobs that nobody has started for so long go back to the queue: others may have a free slot.
STALL = 2.0
#: An announcement of idleness holds for 5 s.
REARM = 4.0


class Engine:
    """Claims for one worker process. Everything here runs in the engine's thread unless it says otherwise."""

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        hand: Hand,
        quota: Quota,
        intake: Intake,
        write_off: WriteOff,
        retries: Retries,
        slots: Sequence[Any],
        leases: Leases,
        connect: Callable[[], psycopg.Connection[Any]],
        bus: Bus,
        worker: str,
    ) -> None:
        self._settings = settings
        self._hand = hand
        self._quota = quota
        self._intake = intake
        self._write_off = write_off
        self._retries = retries
        self._slots = slots
        self._leases = leases
        self._connect = connect
        self._bus = bus
        self._worker = worker
        self._visibility = timedelta(seconds=settings.visibility)
        self._period = timedelta(seconds=settings.sweep)
        self._rounds: Rounds | None = None
        self._poll = IdlePoll(settings.poll)
        self._trouble = Trouble()
        self._observed_at = self._armed_at = self._turn_at = self._retry_at = self._results_at = 0.0
        self._observe_every = 0.0
        self._moved = (0, 0.0)
        self._dry = False
        self._below: deque[str] = deque()
        self._unloaded = False
        #: What the round under way writes: in doubt if the connection breaks.
        self._sent: Results | None = None
        self._sweeper = Sweeper(settings, hand, quota, intake, self._open)
        self.draining = threading.Event()
        self.abandoning = threading.Event()
        self.stopped = threading.Event()
        #: Monotonic time of the last turn that worked: what the health check looks at.
        self.alive_at = time.monotonic()

    def set_paused(self, queues: frozenset[str], names: frozenset[str]) -> None:
        """Leave these queues and names out; read what is not paused any more from 0. Called from any thread."""
        before_queues, before_names = self._intake.paused_queues, self._intake.paused_names
        if (queues, names) == (before_queues, before_names):
            return
        self._intake.pause(queues, names)
        self.look_below(self._settings.queues if before_names - names else before_queues - queues)

    def look_below(self, queues: Collection[str]) -> None:
        """Start these queues from 0: rows below the floors are ready again. Called from any thread."""
        self._below.extend(queues)
        self._hand.wake.set()

    def run(self) -> None:
        """Work until `draining` is set and nothing is in hand any more (or `abandoning` gives back what is)."""
        more = True
        while True:
            if not more:
                if not self._hand.wake.is_set():
                    self._intake.wake_slots()
                self._hand.wake.wait(self._pause())
            if self.draining.is_set():
                self._unload()
                if not self._hand.held and not self._hand.lanes:
                    break
            if self._trouble.active and time.monotonic() < self._retry_at:
                more = False
            elif (went := self._try()) is not None:
                more = went
            elif self.abandoning.is_set():
                break  # no database to give the jobs back to: their leases run out
            else:
                more = False
        if self._rounds is not None:
            self._rounds.connection.close()
        self.stopped.set()

    def _try(self) -> bool | None:
        """Do one round; tell whether to go on without waiting, None if the database failed it."""
        try:
            more = self._turn()
        except Exception as error:  # noqa: BLE001 - a loop that ends would keep its jobs for ever
            self._failed(error)
            return None
        self.alive_at = time.monotonic()
        if (seconds := self._trouble.over()) is not None:
            self._bus.emit(LoopRecovered(loop="claim", seconds=seconds))
        return more

    def _pause(self) -> float:
        """Return how long to wait for news."""
        if self._trouble.active:
            return min(0.1, max(0.001, self._retry_at - time.monotonic()))
        if self._write_off.waiting or any(len(s.shelf) for s in self._slots) or self.draining.is_set():
            return self._settings.flush
        if self._sweeper.alone:
            return self._settings.flush
        return min(self._poll.delay(), max(0.001, self._turn_at - time.monotonic()))

    def _turn(self) -> bool:
        """Do one round; tell whether to go on without waiting."""
        rounds = self._open()
        self._look_round()
        results = self._write_off.collect()
        self._quota.leaving = len(results.done) + len(results.applied) + len(results.ended)
        if self._sweeper.alone and not self._hand.held and not results and not self.draining.is_set():
            return self._sweeper.run_alone()
        now = time.monotonic()
        if self._sweeper.alone and now >= self._turn_at:
            self._turn_at = now + self._settings.sweep * random.uniform(1.0, 1.5)
            self._sweeper.look_again()
        plan = self._plan(results, now)
        if plan is None:
            return False
        settled = self._intake.floors.horizon.settled
        self._sent = results
        out = rounds.run(plan)
        self._sent = None
        rounds.unsure.clear()
        self._write_off.settle(results, out)
        self._results_at = 0.0
        got, again = self._took(plan, settled, out)
        self._note(plan, out, now)
        self._follow(rounds, results)
        got += self._swept(plan, out, now)
        if got:
            self._poll.reset()
        elif plan.wishes and not self._dry:
            again = True  # nothing there: announce it, and look once more before waiting
        if plan.wishes:
            self._dry = not got
        return again

    def _note(self, plan: Plan, out: Outcomes, now: float) -> None:
        """Note when what was done last, and what was seen."""
        if plan.observe and out.observation is not None:
            self._observed_at, self._observe_every = now, min(0.25, 20 * out.observation.cost)
            self._intake.floors.observed(out.observation.last, out.observation.holders, now)
        if plan.arm:
            self._armed_at = now

    def _swept(self, plan: Plan, out: Outcomes, now: float) -> int:
        """Sweep if it is this process's turn; return how many jobs that brought."""
        if not plan.turn:
            return self._sweeper.more() if plan.wishes else 0
        # Jitter: processes in step would leave all turns of a bucket to one of them.
        self._turn_at = now + self._settings.sweep * random.uniform(1.0, 1.5)
        return self._sweeper.sweep(out.sweep) if out.sweep else 0

    def _look_round(self) -> None:
        """Take in what other threads have left."""
        if self._below:
            self._intake.floors.lower(self._drain_below())
        self._quota.learn()
        for slots in self._slots:
            slots.set_low_water(self._quota.prefetch() // 2)
        self._unstall(time.monotonic())

    def _plan(self, results: Results, now: float) -> Plan | None:
        """Decide what the next round does; None if there is nothing to do yet."""
        intake, queues = self._intake, self._settings.queues
        claiming = not self._sweeper.alone and not self.draining.is_set()
        wishes = intake.wishes() if claiming else []
        turn = queues if claiming and now >= self._turn_at else ()
        if not (wishes or turn or self._flushes(results, now)):
            return None
        provable = intake.keyed or intake.floors.wants_proof()
        return Plan(
            results=results,
            wishes=wishes,
            lane_wish=intake.lane_wish() if wishes and intake.keyed else None,
            route_floors=intake.floors.route,
            observe=provable and now - self._observed_at >= self._observe_every,
            arm=queues if wishes and self._dry and now - self._armed_at > REARM else (),
            turn=turn,
            sweep_period=self._period,
            meanwhile=intake.wake_slots,
        )

    def _follow(self, rounds: Rounds, results: Results) -> None:
        """Do what follows the results; after shelving, as it may fail."""
        if any(isinstance(o, Completed) and o.batched for _, o in results.ended):
            try:
                rounds.fold_batches()
            except psycopg.Error:  # the pulse tries again within a second, and tells
                if rounds.connection.closed:
                    raise
        if self._write_off.nudge:
            rounds.nudge(self._settings.queues)
            self._write_off.nudge = False

    def _took(self, plan: Plan, settled: int, out: Outcomes) -> tuple[int, bool]:
        """Shelve what the round has claimed; return how much, and whether the next round should follow at once."""
        intake = self._intake
        got = sum(intake.took(wish, settled, a) for wish, a in zip(plan.wishes, out.answers, strict=False))
        again = bool(out.lanes_back)
        if out.answers:
            again = again or (out.answers[-1].keyed and not intake.keyed)
            intake.keyed = out.answers[-1].keyed or bool(self._hand.lanes)
        if plan.lane_wish is not None:
            got += intake.took_lanes(plan.lane_wish, settled, out)
        return got, again

    def _flushes(self, results: Results, now: float) -> bool:
        """Tell whether results are written now: no later than 20 ms after they came, at once if nothing runs."""
        if not results:
            self._results_at = 0.0
            return False
        if not self._results_at:
            self._results_at = now
        return (
            now - self._results_at >= self._settings.flush
            or len(self._hand.held) <= self._quota.leaving
            or bool(results.lanes)
        )

    def _unstall(self, now: float) -> None:
        """Wake slots that missed work; give back shelved jobs that nobody here will start soon."""
        waiting = [s for s in self._slots if len(s.shelf)]
        if not waiting:
            self._moved = (self._hand.attempts, now)
            return
        if self._hand.attempts != self._moved[0]:
            self._moved = (self._hand.attempts, now)
            self._quota.stalled = False
        for slots in waiting:
            if slots.has_idle:
                slots.wake_all()
            elif now - self._moved[1] > STALL:
                self._quota.stalled = True
                self._give_back(slots.shelf)

    def _unload(self) -> None:
        """Give back what was not started; at the end of the grace period, what still runs."""
        if not self._unloaded:
            self._unloaded = True
            for slots in self._slots:
                slots.stop()
        for slots in self._slots:
            self._give_back(slots.shelf)
        if self.abandoning.is_set():
            for attempt in list(self._hand.running):
                if (running := self._hand.running.pop(attempt, None)) is not None:
                    self._write_off.give_back(running.claimed)
            self._write_off.give_back_lanes()

    def _give_back(self, shelf: Shelf) -> None:
        for item in shelf.clear():
            self._return(item)

    def _return(self, item: Item) -> None:
        if isinstance(item, LaneHold):
            self._hand.lane_over(item)
        elif isinstance(item, Claimed):
            self._write_off.give_back(item)

    def _drain_below(self) -> list[str]:
        queues = []
        while self._below:
            queues.append(self._below.popleft())
        return queues

    def _open(self) -> Rounds:
        if self._rounds is None or self._rounds.connection.closed:
            unsure = self._rounds.unsure if self._rounds is not None else set()
            self._rounds = Rounds(self._connect(), self._leases, self._visibility, self._worker)
            self._intake.take = self._rounds.take
            self._retries.draw = self._rounds.draw
            self._rounds.unsure = unsure
            self._intake.drop()
            self._armed_at = 0.0
        return self._rounds

    def _failed(self, error: Exception) -> None:
        """Wait before the next try; a statement that fails on its own is tried result by result."""
        wait = self._trouble.failed()
        self._retry_at = time.monotonic() + wait
        self._bus.emit(
            LoopFailed(loop="claim", error=f"{type(error).__name__}: {one_line(error)}", retry_in=wait)
        )
        rounds = self._rounds
        if rounds is None:
            return
        if rounds.connection.closed and (sent := self._sent) is not None:
            rounds.unsure.update(c.id for c in (*sent.done, *sent.applied, *(c for c, _ in sent.ended)))
        self._sent = None
        if isinstance(error, psycopg.OperationalError) or not isinstance(error, psycopg.Error):
            rounds.connection.close()
        if rounds.connection.closed:
            return
        if results := self._write_off.collect():
            self._one_by_one(rounds, results)

    def _one_by_one(self, rounds: Rounds, results: Results) -> None:
        """Write results apart from each other, so that one that cannot be written does not keep the others."""
        singles = [
            *(Results(done=[c]) for c in results.done),
            *(Results(applied=[c]) for c in results.applied),
            *(Results(ended=[e]) for e in results.ended),
        ]
        for single in singles:
            try:
                out = rounds.run(Plan(results=single))
            except psycopg.Error as error:
                if rounds.connection.closed:
                    return
                if single.ended and isinstance(single.ended[0][1], Completed):
                    # What follows it cannot be enqueued: a person has to see that, and can replay it.
                    why = Buried(reason="permanent", failure=failure_of(error))
                    self._write_off.instead(single.ended[0][0], why)
                    continue
                self._bus.emit(
                    LoopFailed(
                        loop="claim", error=f"result dropped, its lease will run out: {error}", retry_in=0.0
                    )
                )
                self._write_off.forget(single)
            else:
                self._write_off.settle(single, out)
