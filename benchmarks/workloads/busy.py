"""Pickup latency among long transactions: 16 producers whose transactions stay open for 20 ms after the enqueue."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Case, Workload, cost, paced
from benchmarks.workloads.latency import SETTLE_S, delays

CLIENTS = 16
HOLD_S = 0.02


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Start a worker, then 16 producers at once; positions commit out of order all the time."""
    each = max(1, n // CLIENTS)
    case.fill(1, rest=False)
    with case.workers(1, timed=1) as workers:
        workers.wait_for(1, 30.0)
        paced(SETTLE_S)
        sent = case.produce("hold", CLIENTS, each, HOLD_S, first=1)
        return delays(workers, sent, CLIENTS * each, "busy")


WORKLOAD = Workload(
    name="busy",
    text="16 producers at once, each transaction enqueues one job and stays open for 20 ms; one worker.",
    quantities=[
        cost("busy.p50", "ms", "pickup among long transactions, median"),
        cost("busy.p99", "ms", "pickup among long transactions, 99th percentile"),
    ],
    n=1_600,
    measure=measure,
    most=20_000,
)
