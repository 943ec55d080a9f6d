"""One relay process and each broker in turn: a backlog of events, order kept and every one confirmed."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Case, Quantity, Workload
from benchmarks.relay import outbox
from benchmarks.relay.ends import ENDS, end_named
from benchmarks.relay.peers import AGGREGATES, EVENT_BYTES
from benchmarks.relay.run import running

#: The most events of a run: a slow way out would make the others wait.
MOST = {"https": 10_000}


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Fill, start the relay, wait for the last mark, read the broker."""
    outbox.fill(case.dsn, n)
    with running(case, end_named(case.part)) as (end, relays):
        relays.publish(n)
        repeated = outbox.verify(case.dsn, end.arrived())
    times = outbox.marked_at(case.dsn)
    return {
        f"relay.{case.part}": outbox.rate(times),
        "repeated": repeated,
        "relay CPU us": 1e6 * relays.cpu_s / n,
    }


WORKLOAD = Workload(
    name="relay",
    text=f"A backlog of events of {EVENT_BYTES} bytes, {AGGREGATES:,} aggregates, one `outbox-relay` "
    "process. Events a second from the mark of the 2 % to that of the last. Every event is read back from the "
    "broker: none is missing, those of an aggregate are in order, and the outbox agrees.",
    quantities=[Quantity(what=f"relay.{name}", unit="events/s", title=ENDS[name].title) for name in ENDS],
    n=100_000,
    measure=measure,
    things="events",
    parts={name: MOST.get(name, 1_000_000) for name in ENDS},
    chart="one relay, by where the events go",
)
