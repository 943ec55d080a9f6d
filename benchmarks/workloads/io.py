"""10 ms of awaited I/O in every job, 500 jobs at once."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Case, Quantity, Workload


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Drain jobs that await 10 ms."""
    case.fill(n)
    with case.workers(n, mode="io") as workers:
        return {"io": n / case.drain(n, workers)}


WORKLOAD = Workload(
    name="io",
    text="Every job awaits 10 ms, 500 jobs run at once: 50,000 jobs/s would be perfect.",
    quantities=[Quantity(what="io", unit="jobs/s", title="10 ms of awaited I/O, concurrency 500")],
    n=20_000,
    measure=measure,
    mode="io",
)
