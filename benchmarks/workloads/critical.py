"""Critical jobs on their reserved slot, while a backlog of slow bulk jobs waits and fills all other slots."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Case, Workload, cost, paced
from benchmarks.server import ask
from benchmarks.systems.jobs import BULK, CRITICAL, SLOW_S
from benchmarks.work import RunFailed
from benchmarks.workloads.latency import GAP_S, SETTLE_S, delays

JOBS = 400
RUNNING = "SELECT count(*) FROM pgqueue.job WHERE queue = 'bulk' AND lease <> 0"


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Fill the bulk queue, let a worker fill its slots with it; then send critical jobs, one a transaction."""
    case.fill(n, queue=BULK)
    case.fill(1, rest=False, queue=CRITICAL)
    with case.workers(1, timed=1, mode="mixed", queue=f"{CRITICAL}=1,{BULK}") as workers:
        workers.wait_for(1, 60.0)
        paced(SETTLE_S)
        if not ask(case.dsn, RUNNING):
            raise RunFailed("no bulk job runs")
        sent = case.produce("produce", JOBS, GAP_S, first=1, queue=CRITICAL)
        return delays(workers, sent, JOBS, "critical")


WORKLOAD = Workload(
    name="critical",
    text=f"Jobs of {SLOW_S:g} s fill a bulk queue and all slots of one worker but the one reserved for the critical "
    f"queue, whose {JOBS} jobs come one a transaction, {GAP_S * 1000:.0f} ms apart. From the return of the commit "
    "to the start of the handler.",
    quantities=[
        cost("critical.p50", "ms", "critical pickup, median"),
        cost("critical.p99", "ms", "critical pickup, 99th percentile"),
        cost("critical.max", "ms", "critical pickup, longest"),
    ],
    n=1_000_000,
    measure=measure,
    most=2_000_000,
    things="bulk jobs",
)
