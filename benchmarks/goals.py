"""The goals, and whether the figures of a run meet them. Each is a ratio within one run, or a bound."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.figures import Figure, find, ratios
from benchmarks.system import PEERS

PYTHON_PEERS = ("pgqueuer", "awa", "oban", "chancy", "procrastinate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Our quantity `what`, divided by `by` of the best of `than` (nothing: as it is), is to be at least or at most."""

    text: str
    what: str
    by: tuple[str, ...] = ()
    than: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None

    @property
    def bound(self) -> str:
        """The goal as a number."""
        times = " x" if self.by else ""
        return (
            f">= {self.at_least:,g}{times}" if self.at_least is not None else f"<= {self.at_most:,g}{times}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was measured for a goal: the middle of the runs, their spread, and whether it is met."""

    goal: Goal
    value: float
    low: float
    high: float
    met: bool
    against: str


GOALS = (
    Goal(text="drain, one process, by graphile-worker", what="drain", by=("drain",), than=("graphile",), at_least=2),
    Goal(text="drain, one process, by pgqueuer", what="drain", by=("drain",), than=("pgqueuer",), at_least=4),
    Goal(text="drain, one process, by pgmq's bare loop", what="drain", by=("drain",), than=("pgmq",), at_least=1.2),
    Goal(text="drain, one process, by the limit line", what="drain", by=("drain",), than=("limit",), at_least=0.6),
    Goal(
        text="drain, two processes, by graphile-worker's best", what="drain2", by=("drain", "drain2"),
        than=("graphile",), at_least=2,
    ),
    Goal(text="async handlers by def handlers", what="async", by=("async.def",), than=("ours",), at_least=0.5),
    Goal(text="async handlers by graphile-worker", what="async", by=("async",), than=("graphile",), at_least=1.2),
    Goal(text="10 ms of awaited I/O by the best Python peer", what="io", by=("io",), than=PYTHON_PEERS, at_least=2),
    Goal(text="pickup latency, median, ms", what="latency.p50", at_most=1),
    Goal(text="pickup latency, 99th percentile, ms", what="latency.p99", at_most=5),
    Goal(
        text="pickup median by graphile-worker", what="latency.p50", by=("latency.p50",), than=("graphile",), at_most=1,
    ),
    Goal(text="pickup p99 by graphile-worker", what="latency.p99", by=("latency.p99",), than=("graphile",), at_most=1),
    Goal(text="pickup p99 among 16 producers of 20 ms transactions, ms", what="busy.p99", at_most=10),
    Goal(text="business commits beside an idle worker by those without wake-up", what="commit.share", at_least=0.85),
    Goal(text="bulk enqueue, jobs/s", what="bulk", at_least=150_000),
    Goal(text="bulk enqueue by the best peer", what="bulk", by=("bulk",), than=PEERS, at_least=1),
    Goal(text="old snapshot held: last tenth by first", what="snapshot.last", at_least=0.9),
    Goal(text="large backlog: buffers of a claim by those at 10,000", what="backlog.buffers.share", at_most=1.05),
    Goal(text="large backlog: time of a claim by that at 10,000", what="backlog.ms.share", at_most=1.25),
    Goal(text="WAL per job, B", what="wal", at_most=750),
    Goal(text="claims that are HOT updates", what="wal.hot", at_least=0.98),
    Goal(text="worker memory, MB", what="memory", at_most=80),
    Goal(text="start to first job, s", what="memory.first", at_most=0.5),
    Goal(text="keyed by unkeyed", what="keyed", by=("keyed.without",), than=("ours",), at_least=0.6),
    Goal(text="heartbeats of 20 minutes: time, last by first", what="heartbeat.ms", at_most=2),
)  # fmt: skip


def judge(figures: Sequence[Figure]) -> list[Verdict]:
    """Return a verdict for every goal that was measured, in the order of GOALS."""
    verdicts = []
    for goal in GOALS:
        own = find(figures, goal.what, "ours")
        if own is None:
            continue
        values, against = own.values, ""
        if goal.by:
            rivals = [f for what in goal.by for s in goal.than if (f := find(figures, what, s)) is not None]
            if not rivals:
                continue
            better = max if rivals[0].more_is_better else min
            rival = better(rivals, key=lambda f: f.median)
            values, against = ratios(own, rival), rival.system
        value = statistics.median(values)
        met = value >= goal.at_least if goal.at_least is not None else value <= (goal.at_most or 0)
        verdicts.append(
            Verdict(goal=goal, value=value, low=min(values), high=max(values), met=met, against=against)
        )
    return verdicts
