"""An old snapshot: another session pins the horizon, so that no dead row can be removed while the jobs flow."""

from __future__ import annotations

from collections.abc import Mapping

import psycopg

from benchmarks.bench import Case, Quantity, Workload


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Take a snapshot, fill, drain; compare the first and the last tenth of the handlers."""
    with case.connect() as pin:
        pin.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        pin.execute("SELECT count(*) FROM pg_catalog.pg_class")
        case.fill(n)
        with case.workers(n) as workers:
            seconds = case.drain(n, workers)
            first, last = workers.tenths(n)
    return {"snapshot": n / seconds, "snapshot.last": last / first}


WORKLOAD = Workload(
    name="snapshot",
    text="A REPEATABLE READ session holds its snapshot from before the enqueue to the end; one worker drains.",
    quantities=[
        Quantity(what="snapshot", unit="jobs/s", title="drain under an old snapshot"),
        Quantity(
            what="snapshot.last", unit="last tenth / first tenth", title="rate of the last tenth by the first"
        ),
    ],
    n=500_000,
    measure=measure,
    rounds=3,
    mode="snapshot",
)
