"""The plan of a round: what one trip to the database is to write and claim, and what it brought."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from pgqueue.claim import Answer, Observation, Scope
from pgqueue.job import Claimed
from pgqueue.lanes import Lane
from pgqueue.pipeline import Pending, Pipeline
from pgqueue.results import Results
from pgqueue.shelf import LaneHold
from pgqueue.statement import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One claim: which levels (their numbers), from where, how many.

    `backlog`: the last one found all it asked for. `few`: a first look for what the worker was called for.
    """

    levels: list[int]
    scope: Scope
    starts: list[int]
    n: int
    queues: tuple[str, ...] = ()
    backlog: bool = False
    few: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneWish:
    """One claim of lanes.

    `backlog`: the last one found all it asked for. `whole`: it is to look at lanes of every kind, and wake those whose
    time has come. `route`: the queues to look for new keys in before it, each with its floor of routing.
    """

    levels: list[int]
    scope: Scope
    starts: list[int]
    lanes: int
    depth: int
    total: int
    backlog: bool = False
    whole: bool = True
    route: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a round is to do.

    `route_floors`: how far the keyed jobs of each queue have lanes. `keyed`: ask whether such jobs wait, which the
    claim of a backlog does not tell. `arm`: queues to announce as idle. `turn`: queues to ask the sweep for,
    `sweep_period` apart. `observe`: look at the sequence afterwards. `settled`: how far its numbers were settled when
    the plan was made. `meanwhile` is called when all is sent, before the wait for the answers.
    """

    results: Results
    wishes: Sequence[Wish] = ()
    lane_wish: LaneWish | None = None
    route_floors: Mapping[str, int] = field(default_factory=dict)
    keyed: bool = True
    observe: bool = False
    arm: Sequence[str] = ()
    turn: Sequence[str] = ()
    sweep_period: timedelta = timedelta(seconds=0.25)
    settled: int = 0
    meanwhile: Callable[[], None] | None = None

    @property
    def plain(self) -> bool:
        """Tell whether it does nothing but acknowledge jobs, give lanes back and claim a backlog."""
        results, lanes = self.results, self.lane_wish
        backlog = lanes.backlog if lanes else all(wish.backlog for wish in self.wishes)
        return (
            bool(self.wishes)
            and backlog
            and not (self.turn or self.arm)
            and not (results.applied or results.ended or results.locked)
        )

    @property
    def most(self) -> int:
        """How many jobs it is to bring. Those with and without a key share the room, as mostly one kind has none."""
        return max(sum(wish.n for wish in self.wishes), self.lane_wish.total if self.lane_wish else 0)


@dataclass(slots=True, kw_only=True)
class Outcomes:
    """What a round brought.

    `finished`: ids written off. `lost`: ids somebody else holds now. `locked`: claims that could not be written yet.
    """

    answers: list[Answer] = field(default_factory=list)
    lane_jobs: list[Claimed] = field(default_factory=list)
    #: The lanes of these jobs, where their positions are not those of their lanes.
    lanes: list[Lane] = field(default_factory=list)
    routed: list[Row] = field(default_factory=list)
    observation: Observation | None = None
    sweep: list[str] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    locked: set[int] = field(default_factory=set)
    #: The lanes of the results that are given back, or were lost; the others somebody had locked.
    lanes_back: list[LaneHold] = field(default_factory=list)


@dataclass(slots=True)
class Sent:
    """The statements of a round that are under way."""

    acks: list[tuple[list[int], Pending[list[int] | None]]] = field(default_factory=list)
    ends: list[tuple[list[int], Pending[list[int]]]] = field(default_factory=list)
    claimed: list[Pending[Answer]] = field(default_factory=list)
    keyed: Pending[bool] | None = None
    lanes: Pending[list[Claimed]] | None = None
    taken: Pending[list[Lane]] | None = None
    routed: Pending[list[Row]] | None = None
    lanes_back: list[tuple[list[LaneHold], Pending[int]]] = field(default_factory=list)
    turned: Pending[list[str]] | None = None
    seen: Pending[Observation] | None = None

    def read(self) -> Outcomes:
        """Read what was claimed and seen."""
        answers = [pending.result() for pending in self.claimed]
        if self.keyed:
            answers[-1] = replace(answers[-1], keyed=self.keyed.result())
        return Outcomes(
            answers=answers,
            lane_jobs=self.lanes.result() if self.lanes else [],
            lanes=self.taken.result() if self.taken else [],
            routed=self.routed.result() if self.routed else [],
            observation=self.seen.result() if self.seen else None,
            sweep=self.turned.result() if self.turned else [],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A round that has been sent."""

    plan: Plan
    sent: Sent
    pipeline: Pipeline
