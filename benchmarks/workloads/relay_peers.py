"""Our relay beside the outbox libraries of PyPI, all to the same broker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.bench import Case, Quantity, Workload, cost
from benchmarks.relay import outbox
from benchmarks.relay.ends import Kafka, best_kafka
from benchmarks.relay.peers import aggregate
from benchmarks.relay.process import Relays, patience
from benchmarks.relay.run import opened
from benchmarks.server import ask
from benchmarks.work import RunFailed, Workers

#: A library that gets fewer events gets fewer aggregates.
PER_AGGREGATE = 10


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Fill, publish; from the broker's time of the first event to the database having nothing left."""
    with opened(case, best_kafka()) as end:
        if case.system.name == "ours":
            outbox.fill(case.dsn, n)
            with Relays(case.dsn, end.url, end.folder) as relays:
                ended = relays.publish(n)
            outbox.verify(case.dsn, end.arrived())
            inverted = 0
        else:
            case.fill(n, aggregates=n // PER_AGGREGATE)
            with case.workers(1, place=end.place, aggregates=n // PER_AGGREGATE) as workers:
                ended = outbox.wait_until_published(case.dsn, patience(n), _alive(workers), case.system.left)
            inverted = _check(case, end, n)
        began = end.first_at()
    return {"relay_peers": n / (ended - began), "relay_peers.inverted": inverted}


def _alive(workers: Workers) -> Iterator[None]:
    """Go on as long as the peer's program runs."""
    while True:
        for worker in workers.all:
            if worker.process.poll() is not None:
                raise RunFailed(f"the program ended with {worker.process.returncode}: {worker.log()}")
        yield


def _check(case: Case, end: Kafka, n: int) -> int:
    """Check that every event arrived under its key; return how many came after a later one of their aggregate."""
    seen: set[int] = set()
    last: dict[str, int] = {}
    inverted = 0
    for number, key in end.numbered():
        if key != aggregate(number, n // PER_AGGREGATE):
            raise RunFailed(f"event {number} arrived under the key {key}")
        if number in seen:
            continue
        seen.add(number)
        inverted += last.get(key, -1) > number
        last[key] = max(last.get(key, -1), number)
    left = ask(case.dsn, case.system.count_left)
    if len(seen) != n or left:
        raise RunFailed(f"{len(seen)} of {n} events arrived; the database has {left} unfinished")
    return inverted


WORKLOAD = Workload(
    name="relay_peers",
    text="The same Kafka and 10 events for each aggregate; every library with the settings below, which its documents "
    "name for throughput. From the broker's time of the first event until the database says that none is left. Every "
    "event is read back; those that arrive after a later one of their aggregate are counted (ours may have none).",
    quantities=[
        Quantity(what="relay_peers", unit="events/s", title="outbox to Kafka, one process"),
        cost("relay_peers.inverted", "events", "events that arrived after a later one of their aggregate"),
    ],
    n=100_000,
    measure=measure,
    things="events",
    mode="relay",
)
