"""Drain by two worker processes."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Case, Quantity, Workload


def measure(case: Case, n: int) -> Mapping[str, float]:
    """As drain, with two processes started together."""
    case.fill(n)
    with case.workers(n, 2) as workers:
        return {"drain2": n / case.drain(n, workers)}


WORKLOAD = Workload(
    name="drain2",
    text="The backlog of `drain`, two worker processes, for the fast systems.",
    quantities=[Quantity(what="drain2", unit="jobs/s", title="drain, two worker processes")],
    n=100_000,
    measure=measure,
    mode="large",
)
