"""Memory of a worker, and how long it takes to its first job, with a large backlog waiting."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Case, Workload, cost

SHARE = 5


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Fill, start a worker, let it run a fifth of the backlog; the peak of its resident memory."""
    case.fill(n)
    with case.workers(n) as workers:
        workers.wait_for(n // SHARE, 60.0 + n / 1000)
        worker = workers.all[0]
        return {
            "memory": worker.resident_bytes() / 1e6,
            "memory.first": workers.first_at - worker.started_at,
        }


WORKLOAD = Workload(
    name="memory",
    text="A backlog waits; a worker starts and runs a fifth of it. Peak of its resident memory (4 bytes a job run are "
    "the benchmark's own record), and the time from the start of the process to its first handler.",
    quantities=[
        cost("memory", "MB", "worker memory, peak"),
        cost("memory.first", "s", "process start to first job"),
    ],
    n=1_000_000,
    measure=measure,
)
