"""The engine: the loop that writes results and claims jobs, in a thread and on a connection of its own.

Each turn drains what the slots have finished, decides how many jobs to claim, and sends both as one round. With
nothing to claim and free slots it announces itself idle (see `heartbeat.idle`), looks once more, and waits for a
notification (see `pgqueue.rest`) or its poll timer, 10 ms rising to the longest poll. Every 250 ms or so one
process of all sweeps a queue from the start: late commits, and suspects whose worker was lost. A suspect that was
lost twice runs with nothing beside it: the engine lets the rest end first.
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

from pgqueue.claim import Paused
from pgqueue.config import WorkerSettings
from pgqueue.dsn import one_line
from pgqueue.events import Bus, LoopFailed, LoopRecovered
from pgqueue.flights import Flights
from pgqueue.gate import Gates
from pgqueue.hand import Hand
from pgqueue.intake import BACKLOG, Intake
from pgqueue.job import Completed
from pgqueue.listen import listen
from pgqueue.loop import IdlePoll, Trouble
from pgqueue.plan import Outcomes, Plan
from pgqueue.quota import Quota
from pgqueue.release import Releases
from pgqueue.rest import Rest
from pgqueue.results import Results
from pgqueue.retries import Retries
from pgqueue.round import Leases, Rounds
from pgqueue.sweep import Sweeper
from pgqueue.writeoff import WriteOff

#: While an unkeyed backlog is claimed, keyed jobs are looked for so often.
KEYED_EVERY = 0.05
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
        self._keyed_at = self._observe_every = 0.0
        self._dry = self._caught_up = False
        self._below: deque[str] = deque()
        self._rest = Rest(settings, hand, quota, intake, write_off, self._below)
        self._releases = Releases(hand, quota, write_off, slots)
        self._flights = Flights(write_off, quota)
        self._sweeper = Sweeper(settings, hand, quota, intake, self._open)
        self._gates = Gates(settings, hand, quota, intake, leases, self._open)
        self.draining = threading.Event()
        self.abandoning = threading.Event()
        self.stopped = threading.Event()
        #: Monotonic time of the last turn that worked: what the health check looks at.
        self.alive_at = time.monotonic()

    def set_paused(self, paused: Paused) -> None:
        """Leave these queues and names out; read what is not paused any more from 0. Called from any thread."""
        before = self._intake.paused
        if paused == before:
            return
        self._intake.pause(paused)
        self.look_below(
            self._settings.queues
            if before.names - paused.names
            else (before.queues - paused.queues) | (before.gates ^ paused.gates)
        )

    def look_below(self, queues: Collection[str]) -> None:
        """Start these queues from 0: rows below the floors are ready again. Called from any thread."""
        self._below.extend(queues)
        self._hand.wake.set()

    def run(self) -> None:
        """Work until `draining` is set and nothing is in hand any more (or `abandoning` gives back what is)."""
        more = True
        while True:
            if not more:
                self._wait()
            if self.draining.is_set():
                self._releases.unload(running=self.abandoning.is_set())
                if not self._hand.held and not self._hand.lanes and not self._flights:
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

    def _wait(self) -> None:
        """Wait for news, or until it is time to look."""
        rounds = None if self._trouble.active else self._rounds
        try:
            self._rest.wait(rounds, self._pause, alone=self._sweeper.alone)
        except psycopg.OperationalError as error:
            self._failed(error)

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
        if self._write_off.waiting and self._gates.full:
            return 0.001
        if self._write_off.waiting or any(len(s.shelf) for s in self._slots) or self.draining.is_set():
            return self._settings.flush
        if self._sweeper.alone:
            return self._settings.flush
        now = time.monotonic()
        soon = min(self._turn_at, self._gates.soon)
        if self._dry:  # an announcement that lapses leaves the next commit to the poll
            due = self._armed_at + REARM
            soon = min(soon, due if due > now else now + 1.0)
        return min(self._poll.delay(), max(0.001, soon - now))

    def _turn(self) -> bool:
        """Do one round; tell whether to go on without waiting."""
        rounds = self._open()
        if (loaded := self._rest.loaded()) is not None and not self.draining.is_set():
            self._flights.fire(loaded)
            return self._land(rounds, 0, gated=False)
        self._look_round()
        results = self._write_off.collect()
        self._quota.leave([*results.claims(), *self._flights.claims()])
        if self._sweeper.alone and not self._hand.held and not results and not self.draining.is_set():
            return self._sweeper.run_alone()
        self._catch_up(rounds)
        now = time.monotonic()
        if self._sweeper.alone and now >= self._turn_at:
            self._turn_at = now + self._settings.sweep * random.uniform(1.0, 1.5)
            self._sweeper.look_again()
        gated = bool(self._intake.paused.gates) and not self._sweeper.alone and not self.draining.is_set()
        through = self._gates.before() if gated else 0
        plan = self._plan(results, now)
        if plan is None and not self._flights:
            return self._without_round(through)
        if plan is not None:
            self._flights.depart(rounds, plan)
            self._results_at = 0.0
            if plan.plain and not gated and not self._flights.full:
                return True  # there may be room for another behind it
        more = self._land(rounds, through, gated=gated)
        while self._flights and (plan is None or not plan.plain):
            more = self._land(rounds, 0, gated=gated)
        return more or bool(self._flights)

    def _catch_up(self, rounds: Rounds) -> None:
        """Give a free slot to the sweep that found none, before a claim gets it; every other one, as keys need some."""
        if not self._sweeper.owed or self._sweeper.alone or self.draining.is_set() or self._quota.free() <= 0:
            return
        if self._caught_up:
            return
        self._caught_up = True
        while self._flights:
            self._land(rounds, 0, gated=False)
        if self._quota.free() > 0 and self._sweeper.sweep(self._sweeper.owed):
            self._poll.reset()
            self._dry = False

    def _land(self, rounds: Rounds, through: int, *, gated: bool) -> bool:
        """Take in the oldest round under way; tell whether to go on without waiting."""
        landed = self._flights.land(rounds)
        if landed is None:
            return True
        (plan, out), now = landed, time.monotonic()
        freed = self._gates.ended(out.finished)
        got, again = self._took(plan, out)
        if got < BACKLOG:
            self._intake.wake_slots()  # few jobs: they are not to wait for the next round to be sent
        got += through
        if gated and plan.wishes:
            got += self._gates.after(plan.wishes[-1].n - len(out.answers[-1].jobs) if out.answers else 0)
        self._note(plan, out, now)
        self._follow(rounds, plan.results)
        got += self._swept(plan, out, now)
        looked = bool(plan.wishes) or self._gates.looked
        if got:
            self._poll.reset()
        elif looked and not self._dry:
            again = True  # nothing there: announce it, and look once more before waiting
        if looked:
            self._dry = not got
        return again or freed

    def _without_round(self, through: int) -> bool:
        """Note what came through gates in a turn without a round; tell whether one should follow at once."""
        if through:
            self._poll.reset()
            self._dry = False
        return False

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
            slots.set_low_water(self._quota.low_water())
        self._releases.unstall()

    def _plan(self, results: Results, now: float) -> Plan | None:
        """Decide what the next round does; None if there is nothing to do yet."""
        intake, queues = self._intake, self._settings.queues
        claiming = not self._sweeper.alone and not self.draining.is_set()
        called = self._rest.called() and not results
        wishes = intake.wishes(self._flights.front, called=called) if claiming else []
        turn = queues if claiming and now >= self._turn_at else ()
        if not (wishes or turn or (not self._flights and self._flushes(results, now))):
            return None
        if wishes:
            self._caught_up = False
        if look := intake.keyed or now - self._keyed_at >= KEYED_EVERY:
            self._keyed_at = now
        provable = intake.keyed or intake.floors.wants_proof()
        # The first look after a pause is somebody's wait: the observation can ride with the next round.
        every = max(1.0, self._observe_every) if self._dry else self._observe_every
        return Plan(
            results=results,
            wishes=wishes,
            lane_wish=intake.lane_wish() if wishes and intake.keyed else None,
            route_floors=intake.floors.route,
            keyed=look,
            observe=provable and now - self._observed_at >= every,
            arm=queues
            if (wishes or self._gates.looked) and self._dry and now - self._armed_at > REARM
            else (),
            turn=turn,
            sweep_period=self._period,
            settled=intake.floors.horizon.settled,
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

    def _took(self, plan: Plan, out: Outcomes) -> tuple[int, bool]:
        """Shelve what the round has claimed; return how much, and whether the next round should follow at once."""
        intake, settled = self._intake, plan.settled
        got = sum(intake.took(wish, settled, a) for wish, a in zip(plan.wishes, out.answers, strict=False))
        looked = any(wish.few for wish in plan.wishes)
        if got or looked:
            intake.few = got > 0 and not any(answer.full or answer.keyed for answer in out.answers)
        # A first look that finds nothing is followed by a whole one. A lane is given back at once when its last job is
        # written, or its next one would wait for the poll.
        again = (
            (looked and not got) or bool(out.lanes_back) or self._write_off.lanes_ready(plan.results.lanes)
        )
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
            or self._gates.full
        )

    def _drain_below(self) -> list[str]:
        queues = []
        while self._below:
            queues.append(self._below.popleft())
        return queues

    def _open(self) -> Rounds:
        if self._rounds is None or self._rounds.connection.closed:
            if self._rounds is not None:
                self._flights.lose(self._rounds)
            unsure = self._rounds.unsure if self._rounds is not None else set()
            connection = self._connect()
            listen(connection, self._settings.queues)  # first: what is notified later is also committed later
            self._rounds = Rounds(connection, self._leases, self._visibility, self._worker)
            self._intake.take = self._rounds.take
            self._retries.draw = self._rounds.draw
            self._rounds.unsure = unsure
            self._intake.drop()
            self._armed_at = 0.0
            if self._hand.held:
                self._rounds.reclaim(list(self._hand.held.values()), list(self._hand.lanes.values()))
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
        if isinstance(error, psycopg.OperationalError) or not isinstance(error, psycopg.Error):
            rounds.connection.close()
        if rounds.connection.closed:
            return
        if results := self._write_off.collect():
            self._flights.one_by_one(rounds, results, self._bus)
