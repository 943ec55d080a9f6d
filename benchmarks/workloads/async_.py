"""Drain with `async def` handlers, beside our own `def` handlers in the same round."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Case, Quantity, Workload


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Drain with asynchronous handlers; for ours once more with threads, on the same database."""
    case.fill(n)
    with case.workers(n, mode="async") as workers:
        found = {"async": n / case.drain(n, workers)}
    if case.system.name == "ours":
        case.fill(n)
        with case.workers(n) as workers:
            found["async.def"] = n / case.drain(n, workers)
    return found


WORKLOAD = Workload(
    name="async",
    text="The same backlog, `async def` handlers; ours with `def` handlers in the same round.",
    quantities=[
        Quantity(what="async", unit="jobs/s", title="drain, asynchronous handlers"),
        Quantity(what="async.def", unit="jobs/s", title="the same with `def` handlers"),
    ],
    n=100_000,
    measure=measure,
    mode="async",
)
