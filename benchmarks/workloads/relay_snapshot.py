"""A pinned snapshot: no dead row can be removed while the events flow."""

from __future__ import annotations

from collections.abc import Mapping

import psycopg

from benchmarks.bench import Case, Quantity, Workload
from benchmarks.relay import outbox
from benchmarks.relay.ends import Null
from benchmarks.relay.run import running


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Take a snapshot, fill, publish; compare the first and the last tenth of the marks."""
    with case.connect() as pin:
        pin.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        pin.execute("SELECT count(*) FROM pg_catalog.pg_class")
        outbox.fill(case.dsn, n)
        with running(case, Null) as (end, relays):
            relays.publish(n)
            outbox.verify(case.dsn, end.arrived())
    times = outbox.marked_at(case.dsn)
    return {
        "relay_snapshot": outbox.rate(times),
        "relay_snapshot.last": outbox.last_tenth_by_first(times),
    }


WORKLOAD = Workload(
    name="relay_snapshot",
    text="A REPEATABLE READ session holds its snapshot from before the events are written to the end; one relay "
    "publishes to no broker, so that Postgres is what is measured.",
    quantities=[
        Quantity(what="relay_snapshot", unit="events/s", title="publish under an old snapshot"),
        Quantity(
            what="relay_snapshot.last",
            unit="last tenth / first tenth",
            title="events of the last tenth by the first",
        ),
    ],
    n=300_000,
    measure=measure,
    things="events",
    most=1_000_000,
)
