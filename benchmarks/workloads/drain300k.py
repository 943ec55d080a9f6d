"""Drain three times as much: what a short run leaves out, such as dead rows that pile up."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Case, Quantity, Workload
from benchmarks.workloads import drain


def measure(case: Case, n: int) -> Mapping[str, float]:
    """As drain."""
    return {"drain300k": drain.measure(case, n)["drain"]}


WORKLOAD = Workload(
    name="drain300k",
    text="The same with three times as many jobs, for the fast systems.",
    quantities=[Quantity(what="drain300k", unit="jobs/s", title="drain of 300,000, one worker process")],
    n=300_000,
    measure=measure,
    mode="large",
)
