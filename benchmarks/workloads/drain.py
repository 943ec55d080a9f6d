"""Drain: a backlog of jobs that do nothing, one worker process."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Case, Quantity, Workload


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Fill, bring to rest, start a worker; the clock runs from the first handler to the database being done."""
    case.fill(n)
    with case.workers(n) as workers:
        return {"drain": n / case.drain(n, workers)}


WORKLOAD = Workload(
    name="drain",
    text="A backlog of no-op jobs, one worker process (`def` handlers where the system has threads). The clock runs "
    "from the first handler's start until the database says that every job is done.",
    quantities=[Quantity(what="drain", unit="jobs/s", title="drain, one worker process")],
    n=100_000,
    measure=measure,
    mode="drain",
)
