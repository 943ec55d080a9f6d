"""Bulk enqueue: one producer, one connection, the system's own bulk interface."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Case, Quantity, Workload
from benchmarks.server import ask
from benchmarks.work import RunFailed


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Enqueue n jobs and count the rows."""
    seconds = case.fill(n, rest=False)
    found = ask(case.dsn, case.system.count_left)
    if found != n:
        raise RunFailed(f"{found} of {n} jobs are there")
    return {"bulk": n / seconds}


WORKLOAD = Workload(
    name="bulk",
    text="One producer, one connection, the system's bulk interface; every call is a transaction of its own.",
    quantities=[Quantity(what="bulk", unit="jobs/s", title="bulk enqueue")],
    n=100_000,
    measure=measure,
    mode="bulk",
)
