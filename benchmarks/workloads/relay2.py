"""Two relay processes beside one, where neither the broker nor Postgres is the limit."""

from __future__ import annotations

import time
from collections.abc import Mapping

from benchmarks.bench import Case, Quantity, Workload
from benchmarks.relay import outbox
from benchmarks.relay.ends import Slow
from benchmarks.relay.process import patience
from benchmarks.relay.run import running
from benchmarks.server import ask
from benchmarks.work import RunFailed

COUNTS = {"one": 1, "two": 2}
LOOK_S = 0.05
#: How many relays own partitions, and whether each owns as many as the others.
SHARED = """
SELECT ARRAY[count(*), max(n) - min(n), sum(n)] FROM (
  SELECT count(*) AS n FROM pgqueue.relay_partition WHERE owner IS NOT NULL GROUP BY owner) AS o
"""


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Let the relays share the partitions out, then write everything in one transaction."""
    count = COUNTS[case.part]
    with running(case, Slow, count) as (end, relays):
        until = time.monotonic() + patience(0)
        for _ in relays.alive():
            if ask(case.dsn, SHARED) == [count, 0, 64]:
                break
            if time.monotonic() > until:
                raise RunFailed("the relays do not share the partitions")
            time.sleep(LOOK_S)
        outbox.fill(case.dsn, n, rest=False)
        relays.publish(n)
        repeated = outbox.verify(case.dsn, end.arrived())
    return {f"relay2.{case.part}": outbox.rate(outbox.marked_at(case.dsn)), "repeated": repeated}


WORKLOAD = Workload(
    name="relay2",
    text=f"One relay, and two. The sink is no broker: it confirms each batch {Slow.milliseconds:.0f} ms after it was "
    "sent, so that waiting is what takes the time. The relays share the partitions out before the backlog is written.",
    quantities=[
        Quantity(what="relay2.one", unit="events/s", title="one relay"),
        Quantity(what="relay2.two", unit="events/s", title="two relays"),
    ],
    n=100_000,
    measure=measure,
    things="events",
    parts=dict.fromkeys(COUNTS, 1_000_000),
    chart="one relay and two, 10 ms to the broker",
)
