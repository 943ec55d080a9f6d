"""The goals, and whether the figures of a run meet them. Each is a ratio within one run, or a bound."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.figures import Figure, find, ratios
from benchmarks.system import PEERS, RELAY_PEERS

PYTHON_PEERS = ("pgqueuer", "awa", "oban", "chancy", "procrastinate", "dbos")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Our quantity `what`, divided by `by` of the best of `than` (nothing: as it is), is to be at least or at most."""

    text: str
    what: str
    by: tuple[str, ...] = ()
    than: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        """Tell whether a value is within the bound."""
        return value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0)

    @property
    def bound(self) -> str:
        """The goal as a number."""
        times = " x" if self.by else ""
        return (
            f">= {self.at_least:,g}{times}" if self.at_least is not None else f"<= {self.at_most:,g}{times}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was measured for a goal: the middle of the runs, their spread, whether it is met, by how many not."""

    goal: Goal
    value: float
    low: float
    high: float
    met: bool
    missed: int
    runs: int
    against: str

    @property
    def text(self) -> str:
        """The verdict in words."""
        if self.met:
            return f"yes by median; {self.missed} of {self.runs} runs missed it" if self.missed else "yes"
        kept = f", by median; {self.runs - self.missed} of {self.runs} runs met it"
        return f"**no**{kept if self.missed < self.runs else ''}"


GOALS = (
    Goal(text="drain, one process, by graphile-worker", what="drain", by=("drain",), than=("graphile",), at_least=2),
    Goal(text="drain, one process, by pgqueuer", what="drain", by=("drain",), than=("pgqueuer",), at_least=4),
    Goal(text="drain, one process, by pgmq's bare loop", what="drain", by=("drain",), than=("pgmq",), at_least=1.2),
    Goal(text="drain, one process, by the limit line", what="drain", by=("drain",), than=("limit",), at_least=0.6),
    Goal(
        text="drain, 300,000, by graphile-worker", what="drain300k", by=("drain300k",), than=("graphile",), at_least=2,
    ),
    Goal(text="drain, 300,000, by pgqueuer", what="drain300k", by=("drain300k",), than=("pgqueuer",), at_least=4),
    Goal(text="drain, 300,000, by pgmq's loop", what="drain300k", by=("drain300k",), than=("pgmq",), at_least=1.2),
    Goal(text="drain, 300,000, by the limit line", what="drain300k", by=("drain300k",), than=("limit",), at_least=0.6),
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
    Goal(text="1 M waiting: buffers of a claim by those at 10,000", what="backlog.buffers.share", at_most=1.05),
    Goal(text="1 M waiting: time of a claim by that at 10,000", what="backlog.ms.share", at_most=1.25),
    Goal(text="5 M waiting: buffers of a claim by those at 10,000", what="backlog.buffers.share.five", at_most=1.05),
    Goal(text="5 M waiting: time of a claim by that at 10,000", what="backlog.ms.share.five", at_most=1.25),
    Goal(text="WAL per job, B", what="wal", at_most=750),
    Goal(text="claims that are HOT updates", what="wal.hot", at_least=0.98),
    Goal(text="worker memory, MB", what="memory", at_most=80),
    Goal(text="start to first job, s", what="memory.first", at_most=0.5),
    Goal(text="keyed by unkeyed", what="keyed", by=("keyed.without",), than=("ours",), at_least=0.6),
    Goal(text="a hot key with 40 % of the backlog, jobs/s", what="hot", at_least=10_000),
    Goal(text="critical among 1 M slow jobs, longest pickup, ms", what="critical.max", at_most=100),
    Goal(text="heartbeats of 20 minutes: time, last by first", what="heartbeat.ms", at_most=2),
    Goal(text="heartbeats of 20 minutes: buffers, last by first", what="heartbeat.buffers", at_most=2),
    Goal(text="relay to Kafka, events/s", what="relay.kafka", at_least=25_000),
    Goal(text="relay to NATS JetStream, events/s", what="relay.nats", at_least=25_000),
    Goal(text="relay to RabbitMQ, events/s", what="relay.rabbitmq", at_least=8_000),
    Goal(text="relay to Redis Streams, events/s", what="relay.redis", at_least=15_000),
    Goal(text="relay to queue:, events/s", what="relay.queue", at_least=20_000),
    Goal(text="relay to https:, events/s", what="relay.https", at_least=1_500),
    Goal(text="two relays by one, 10 ms away", what="relay2.two", by=("relay2.one",), than=("ours",), at_least=1.5),
    Goal(text="commit to confirmation by Kafka, median, ms", what="relay_latency.kafka.p50", at_most=4),
    Goal(text="commit to confirmation by Kafka, 99th percentile, ms", what="relay_latency.kafka.p99", at_most=10),
    Goal(text="commit to confirmation by NATS, median, ms", what="relay_latency.nats.p50", at_most=4),
    Goal(text="commit to confirmation by NATS, 99th percentile, ms", what="relay_latency.nats.p99", at_most=10),
    Goal(text="relay under an old snapshot: last tenth by first", what="relay_snapshot.last", at_least=0.8),
    Goal(
        text="outbox to Kafka by the best peer", what="relay_peers", by=("relay_peers",), than=RELAY_PEERS, at_least=3,
    ),
)  # fmt: skip


def judge(figures: Sequence[Figure], machines: Mapping[str, str] | None = None) -> list[Verdict]:
    """Return a verdict for every goal that was measured, in the order of GOALS.

    `machines`: where each quantity was measured; what was measured elsewhere is not compared.
    """
    verdicts, machines = [], machines or {}
    for goal in GOALS:
        own = find(figures, goal.what, "ours")
        if own is None:
            continue
        values, against = own.values, ""
        if goal.by:
            beside = [what for what in goal.by if machines.get(what) == machines.get(goal.what)]
            rivals = [f for what in beside for s in goal.than if (f := find(figures, what, s)) is not None]
            if not rivals:
                continue
            better = max if rivals[0].more_is_better else min
            rival = better(rivals, key=lambda f: f.median)
            values, against = ratios(own, rival), rival.system
        value = statistics.median(values)
        verdicts.append(
            Verdict(
                goal=goal, value=value, low=min(values), high=max(values), met=goal.met(value),
                missed=sum(not goal.met(run) for run in values), runs=len(values), against=against,
            )
        )  # fmt: skip
    return verdicts
