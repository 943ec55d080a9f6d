"""Write-off: collects what the slots have finished, and strikes off the hand what a round has written."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, TypeVar

from pgqueue.events import Bus, JobFinished, JobsAcked, JobsReleased, JobSucceeded, LeasesLost
from pgqueue.hand import Ended, Hand
from pgqueue.intake import Intake
from pgqueue.job import (
    Claimed,
    Completed,
    Done,
    Fenced,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Written,
    is_limit,
)
from pgqueue.plan import Outcomes
from pgqueue.results import Results
from pgqueue.retries import Retries
from pgqueue.shelf import LaneHold

T = TypeVar("T")

_ID = attrgetter("id")

_WORDS = {
    "Done": "ok",
    "Completed": "ok",
    "Written": "ok",
    "Fenced": "lost",
    "Retried": "retry",
    "Buried": "dead",
    "Snoozed": "snooze",
    "Dropped": "cancelled",
    "Released": "released",
}


class WriteOff:
    """The results of one process that are not in the database yet. Runs in the engine's thread."""

    def __init__(
        self, hand: Hand, intake: Intake, retries: Retries, levels: Sequence[tuple[str, int]], bus: Bus
    ) -> None:
        self._hand = hand
        self._intake = intake
        self._retries = retries
        self._levels = levels
        self._bus = bus
        self._done: list[Claimed] = []
        self._ended: list[tuple[Claimed, Outcome]] = []
        self._lanes: list[LaneHold] = []
        self._locked: frozenset[int] = frozenset()
        #: Jobs given back since the start.
        self.released = 0
        #: Set by a round that gave jobs back: other workers should look below their floors.
        self.nudge = False

    @property
    def waiting(self) -> bool:
        """Tell whether there is anything to write."""
        hand = self._hand
        return bool(self._done or self._ended or self._lanes or hand.done or hand.ended or hand.lanes_over)

    def lanes_ready(self, sent: Sequence[LaneHold]) -> bool:
        """Tell whether a lane can be given back now that was not among those of the last round."""
        return any(lane not in sent for lane in self._ready_lanes())

    def give_back(self, claimed: Claimed) -> None:
        """Return a job to the queue, attempt not counted."""
        self._ended.append((claimed, Released()))

    def give_back_lanes(self) -> None:
        """Return all lanes in hand, whatever their jobs do."""
        for lane in self._hand.lanes.values():
            if lane not in self._lanes:
                self._lanes.append(lane)

    def collect(self) -> Results:
        """Take what the slots have finished, with what earlier rounds could not write; jobs in id order."""
        hand = self._hand
        self._lanes.extend(
            _drain(hand.lanes_over)
        )  # first: what a lane's jobs did was reported before its end
        for lane in _drain(hand.handed_on):
            self._intake.dispatch(lane)
        done = _drain(hand.done)
        self._done.extend(done)
        ended = _drain(hand.ended)
        self._retries.ran(done, ended)
        for one in self._retries.spend(ended):
            self._take(one)
        self._done.sort(key=_ID)
        ended_ids = {claimed.id for claimed, _ in self._ended} if self._lanes else ()
        for lane in self._lanes:
            unstarted = [c for c in lane.jobs if c.id in hand.held and c.id not in ended_ids]
            self._ended.extend((claimed, Released()) for claimed in unstarted)
            lane.jobs.clear()
        done, applied = list(self._done), []
        if hand.keyed:
            applied = [c for c in done if c.id in hand.keyed]
            done = [c for c in done if c.id not in hand.keyed]
        return Results(
            done=done,
            applied=applied,
            ended=list(self._ended),
            lanes=self._ready_lanes(),
            locked=self._locked,
        )

    def _take(self, ended: Ended) -> None:
        """Take one attempt that ended; tell those who listen."""
        self._tell(ended)
        match ended.outcome:
            case Done():
                self._done.append(ended.claimed)
            case Written() | Fenced():
                self._strike(ended)
            case _:
                self._ended.append((ended.claimed, ended.outcome))
        if isinstance(ended.outcome, Retried) and ended.outcome.deferred:
            for lane in self._hand.lanes.values():
                if ended.claimed.id in lane.ids and not is_limit(lane.key, ended.claimed.name):
                    lane.wait = max(lane.wait, ended.outcome.delay)

    def depart(self, results: Results) -> None:
        """Leave out of the next results what is on its way to the database; `landed` or `back` follows."""
        self._done = self._done[len(results.done) + len(results.applied) :]
        self._ended = self._ended[len(results.ended) :]
        if results.lanes:
            sent = set(results.lanes)
            self._lanes = [lane for lane in self._lanes if lane not in sent]

    def back(self, results: Results) -> None:
        """Take back results that are to be written again."""
        self._done = [*results.done, *results.applied, *self._done]
        self._ended = [*results.ended, *self._ended]
        self._lanes = [*results.lanes, *self._lanes]

    def landed(self, results: Results, out: Outcomes) -> None:
        """Forget what a round that had departed has written; take back what it could not."""
        if len(out.finished) < len(results) or len(out.lanes_back) < len(results.lanes):
            self.back(results)
        self.settle(results, out)

    def settle(self, results: Results, out: Outcomes) -> None:
        """Forget what the round has written; keep what it could not."""
        hand, gone = self._hand, out.finished | out.lost
        hand.strike(c for c in results.claims() if c.id in gone)
        self._locked = (self._locked | out.locked) - gone
        if self._done or self._ended:  # what came after this round departed stays, be it of the same job
            written = {id(c) for c in results.claims() if c.id in gone}
            self._done = [c for c in self._done if id(c) not in written]
            self._ended = [(c, o) for c, o in self._ended if id(c) not in written]
        if out.lanes_back:
            self._strike_lanes(out.lanes_back)
        completed = [c for c, o in results.ended if isinstance(o, Completed)]
        if done := len(results.done) + len(results.applied) + len(completed):
            if out.lost or out.locked:
                done = sum(c.id in out.finished for c in (*results.done, *results.applied, *completed))
            self._bus.emit(JobsAcked(count=done))
        if released := sum(isinstance(o, Released) and c.id in out.finished for c, o in results.ended):
            self.released += released
            self.nudge = True
            self._bus.emit(JobsReleased(count=released))
        if out.lost:
            self._bus.emit(LeasesLost(job_ids=tuple(sorted(out.lost))))

    def _strike_lanes(self, lanes: Sequence[LaneHold]) -> None:
        for lane in lanes:
            name = lane.queue, lane.key, lane.pos
            if self._hand.lanes.get(name) is lane:  # not a later hold of the same lane
                del self._hand.lanes[name]
        if self._lanes:
            back = set(lanes)
            self._lanes = [lane for lane in self._lanes if lane not in back]

    def instead(self, claimed: Claimed, outcome: Outcome) -> None:
        """Write another outcome of a job than the one that cannot be written."""
        self._ended = [(c, outcome if c is claimed else o) for c, o in self._ended]

    def forget(self, results: Results) -> None:
        """Drop results that cannot be written."""
        gone = {c.id for c in results.claims()}
        self._done = [c for c in self._done if c.id not in gone]
        self._ended = [(c, o) for c, o in self._ended if c.id not in gone]
        self._hand.strike(results.claims())

    def _strike(self, ended: Ended) -> None:
        """Strike a job off whose handler's own transaction has decided."""
        self._hand.strike([ended.claimed])
        if isinstance(ended.outcome, Written):
            self._bus.emit(JobsAcked(count=1))
        else:
            self._bus.emit(LeasesLost(job_ids=(ended.claimed.id,)))

    def _ready_lanes(self) -> list[LaneHold]:
        """Return the lanes whose jobs are all written, or acked in the coming round for certain.

        A lane that is given back while one of its jobs is still stamped would be overtaken by its next job.
        """
        if not self._lanes:
            return []
        held = self._hand.held
        acked = (
            {c.id for c in self._done} - self._locked - self._hand.keyed
        )  # these two are passed while locked
        return [lane for lane in self._lanes if all(i not in held or i in acked for i in lane.ids)]

    def _tell(self, ended: Ended) -> None:
        outcome: Any = ended.outcome
        failure = getattr(outcome, "failure", None)
        kind = JobSucceeded if isinstance(outcome, Done | Completed | Written) else JobFinished
        self._bus.emit(
            kind(
                job_id=ended.claimed.id,
                name=ended.claimed.name,
                queue=self._levels[ended.claimed.level][0],
                attempt=ended.claimed.attempt,
                outcome=_WORDS[type(outcome).__name__],
                seconds=ended.seconds,
                error=f"{failure.error_type}: {failure.message}" if failure else None,
                delay=outcome.delay if isinstance(outcome, Retried | Snoozed) else None,
            )
        )


def _drain(source: deque[T]) -> list[T]:
    """Take what is there now; only this thread takes."""
    take = source.popleft
    return [take() for _ in range(len(source))]
