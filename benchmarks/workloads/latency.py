"""Pickup latency of an idle worker: from the return of the commit to the start of the handler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.bench import Case, Workload, cost, paced
from benchmarks.figures import quantile
from benchmarks.work import RunFailed, Workers

GAP_S = 0.025
SETTLE_S = 1.0


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Let a worker run one job and become idle; then send n jobs, one a transaction."""
    case.fill(1, rest=False)
    with case.workers(1, timed=1, mode="latency") as workers:
        workers.wait_for(1, 30.0)
        paced(SETTLE_S)
        sent = case.produce("produce", n, GAP_S, first=1)
        return delays(workers, sent, n, "latency")


def delays(
    workers: Workers, sent: Sequence[tuple[int, float, float]], n: int, what: str
) -> Mapping[str, float]:
    """Wait for the n jobs and return the quantiles of their delays, in ms; a start before the commit counts as 0."""
    workers.wait_for(n + 1, 30.0)
    workers.end()
    started = workers.started()
    lost = [number for number, _, _ in sent if number not in started]
    if lost:
        raise RunFailed(f"{len(lost)} of {n} jobs never began")
    waits = [max(0.0, started[number] - committed) * 1000 for number, _, committed in sent]
    return {
        f"{what}.p50": quantile(waits, 0.5),
        f"{what}.p99": quantile(waits, 0.99),
        f"{what}.max": max(waits),
    }


WORKLOAD = Workload(
    name="latency",
    text=f"One idle worker; jobs enqueued one a transaction, {GAP_S * 1000:.0f} ms apart. From the return of the "
    "commit to the start of the handler.",
    quantities=[
        cost("latency.p50", "ms", "pickup latency, median"),
        cost("latency.p99", "ms", "pickup latency, 99th percentile"),
        cost("latency.max", "ms", "pickup latency, longest"),
    ],
    n=500,
    measure=measure,
    most=2_000,
    mode="latency",
)
