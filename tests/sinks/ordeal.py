"""Relays under faults of their broker, with producers at work; then the check: nothing lost, nothing inverted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

import psycopg

from pgqueue.events import Bus
from relay.config import RelayConfig
from relay.events import EventsPublished, SinkDown
from relay.service import Relay
from tests.db.relaying import cleared, inversions, missing
from tests.process.relaying import Producers
from tests.sinks.broker_rigs import BrokerRig
from tests.sinks.events import SOURCE
from tests.waiting import eventually

RELAYS = 2
BETWEEN = 150


@dataclass(slots=True)
class Seen:
    """What the relays told."""

    published: int = 0
    down: list[str] = field(default_factory=list)

    def listen(self, bus: Bus) -> None:
        """Note what a relay tells."""
        bus.subscribe(EventsPublished, self._count)
        bus.subscribe(SinkDown, lambda told: self.down.append(told.problem))

    def one_more_down(self) -> None:
        """Wait until a relay says that its broker is away."""
        before = len(self.down)
        eventually(lambda: len(self.down) > before, 20)

    def _count(self, told: EventsPublished) -> None:
        self.published += told.count


Fault = Callable[[Seen], None]


def endure(rig: BrokerRig, dsn: str, faults: Iterable[Fault], *, drain_s: float = 40.0) -> Seen:
    """Let relays publish through the rig's proxy while each fault comes in turn; check what arrived.

    A fault begins when the last one is over and some more events were confirmed.
    """
    cleared(dsn)
    seen = Seen()
    producers = Producers(dsn, threads=2, aggregates=40)
    with ExitStack() as stack:
        for number in range(RELAYS):
            sink = rig.open(send_timeout=2.0)
            bus = Bus()
            seen.listen(bus)
            config = RelayConfig(
                dsn=dsn, name=f"r{number}", source=SOURCE, lease=1.0, send_timeout=2.0, batch=100, pause=0
            )
            relay = Relay(config, sink, bus)
            relay.start()
            stack.callback(relay.stop, 60)
        producers.start()
        try:
            for fault in faults:
                some_more = seen.published + BETWEEN
                eventually(lambda more=some_more: seen.published >= more, drain_s)  # type: ignore[misc]
                fault(seen)
        finally:
            producers.stop()
        eventually(lambda: waiting(dsn) == 0, drain_s, look=0.1)
    log = rig.log()
    ids = committed(dsn)
    assert len(ids) > BETWEEN
    assert not inversions(log)
    assert not missing(log, ids)
    return seen


def waiting(dsn: str) -> int:
    """Count the events that are not published, parked ones too."""
    with psycopg.connect(dsn) as conn:
        row = conn.execute("SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NULL").fetchone()
    assert row is not None
    return int(row[0])


def committed(dsn: str) -> list[int]:
    """Return every event, and see that none of them spent an attempt."""
    with psycopg.connect(dsn) as conn:
        rows = conn.execute("SELECT id, attempts FROM pgqueue.outbox").fetchall()
    assert not [id_ for id_, attempts in rows if attempts]
    return [id_ for id_, _ in rows]


def network_faults(rig: BrokerRig) -> list[Fault]:
    """Return the faults of the network, each healed when its call returns."""
    proxy = rig.proxy

    def lose_replies(_: Seen) -> None:
        lost = proxy.lose_replies()
        assert lost.wait(80)
        proxy.heal()

    def cut_mid_batch(_: Seen) -> None:
        assert proxy.cut_after(3000).wait(80)

    def freeze(seen: Seen) -> None:
        proxy.freeze()
        seen.one_more_down()
        proxy.heal()

    def refuse(seen: Seen) -> None:
        proxy.refuse()
        seen.one_more_down()
        proxy.accept()

    def slow(seen: Seen) -> None:
        proxy.delay = 0.02
        some_more = seen.published + 20
        eventually(lambda: seen.published >= some_more, 20)
        proxy.heal()

    return [lose_replies, cut_mid_batch, lose_replies, cut_mid_batch, freeze, refuse, slow, lose_replies]


def restart(rig: BrokerRig) -> Fault:
    """Return a fault: kill the broker with SIGKILL and start it again."""

    def again(_: Seen) -> None:
        rig.broker.kill()
        rig.broker.start()

    return again
