"""Relay processes that are killed, stalled and shared out anew, in front of real brokers that come and go.

The short form is one round for each broker; `make chaos` runs many. The controls show that the checks see what they
are for: they publish through the same sinks in the two ways in which outboxes usually invert and lose events.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from relay import Outbox
from relay.event import CONFIRMED
from tests.db.relaying import inversions, missing
from tests.process.relaying import Producers, RelayProcess, repartition
from tests.server import Connection
from tests.sinks.broker_rigs import BrokerRig
from tests.sinks.ordeal import committed, waiting
from tests.waiting import chaos, eventually

KINDS = ("kafka", "amqp", "nats", "redis", "pulsar", "sqs", "sns", "kinesis")
#: The emulator keeps what it got in memory.
DURABLE = frozenset({"kafka", "amqp", "nats", "redis", "pulsar"})
PARTITIONS = (7, 64, 1, 13)

outbox = Outbox()


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest) -> BrokerRig:
    """Give the rig of each broker in turn."""
    if request.param == "kafka":
        request.getfixturevalue("apache_kafka")
    made: BrokerRig = request.getfixturevalue(f"{request.param}_rig")
    return made


class Fleet:
    """Relay processes in front of one broker."""

    def __init__(self, stack: ExitStack, dsn: str, rig: BrokerRig) -> None:
        self.stack = stack
        self.dsn = dsn
        self.url = rig.url(rig.proxy.port)
        self.count = 0

    def start(self) -> RelayProcess:
        """Start one more."""
        self.count += 1
        made = RelayProcess(self.dsn, Path("/dev/null"), f"relay-{self.count}", sink=self.url)
        self.stack.callback(made.process.wait, 60)
        self.stack.callback(made.process.kill)
        return made


def number(watch: Connection, query: str) -> int:
    """Read one number."""
    row = watch.execute(query.encode()).fetchone()
    assert row is not None
    return int(str(row[0]))


def alive(watch: Connection) -> int:
    """Count live relays."""
    return number(watch, "SELECT count(*) FROM pgqueue.relay WHERE lease_until > clock_timestamp()")


def shared(watch: Connection, relays: int) -> bool:
    """Tell whether so many relays are alive, and nobody else owns a partition."""
    orphans = (
        "SELECT count(*) FROM pgqueue.relay_partition p WHERE NOT EXISTS"
        " (SELECT FROM pgqueue.relay r WHERE r.id = p.owner AND r.lease_until > clock_timestamp())"
    )
    return alive(watch) == relays and number(watch, orphans) == 0


def more(watch: Connection, count: int) -> None:
    """Wait until so many more events are marked."""
    done = "SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NOT NULL"
    so_far = number(watch, done)
    eventually(lambda: number(watch, done) >= so_far + count, 60, look=0.1)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_nothing_is_lost_or_inverted_under_kills_stalls_outages_and_repartition(
    rig: BrokerRig, dsn: str, request: pytest.FixtureRequest
) -> None:
    durable = request.node.callspec.params["rig"] in DURABLE
    producers = Producers(dsn, threads=2, aggregates=40)
    with ExitStack() as stack, psycopg.connect(dsn, autocommit=True) as watch:
        fleet = Fleet(stack, dsn, rig)
        relays = [fleet.start() for _ in range(3)]
        eventually(lambda: shared(watch, 3), 30)
        producers.start()
        try:
            for turn in range(chaos(1, 8)):
                more(watch, 60)
                relays[0].stall()
                eventually(lambda: shared(watch, 2), 20)
                relays[1].kill()
                eventually(lambda: shared(watch, 1), 20)
                more(watch, 30)
                rig.go_away()
                backlog = waiting(dsn)
                eventually(lambda behind=backlog: waiting(dsn) > behind + 30, 30)  # type: ignore[misc]
                relays[0].resume()
                relays.append(fleet.start())
                if durable:
                    rig.broker.kill()
                    rig.broker.start()
                rig.come_back()
                eventually(lambda: shared(watch, 3), 30)
                more(watch, 60)
                going = [relays[0], *relays[2:]]
                assert [relay.stop() for relay in going] == [0] * len(going)
                eventually(lambda: alive(watch) == 0, 20)
                repartition(watch, PARTITIONS[turn % len(PARTITIONS)])
                relays = [fleet.start() for _ in range(3)]
                eventually(lambda: alive(watch) == 3, 30)
        finally:
            producers.stop()
        eventually(lambda: waiting(dsn) == 0, 90, look=0.1)
        assert [relay.stop() for relay in relays] == [0, 0, 0]
    log = rig.log()
    ids = committed(dsn)
    assert len(ids) > 150
    assert set(producers.committed) <= set(ids)
    assert not missing(log, ids)
    assert not inversions(log)


@pytest.fixture
def two(dsn: str) -> Iterator[tuple[Connection, Connection]]:
    """Give two connections."""
    with psycopg.connect(dsn) as one, psycopg.connect(dsn) as other:
        yield one, other


def test_the_checks_see_an_inversion_of_two_relays_that_skip_locked_rows(
    rig: BrokerRig, two: tuple[Connection, Connection]
) -> None:
    slow, quick = two
    ids = [outbox.add(slow, "e", {}, aggregate_id="a") for _ in range(2)]
    slow.commit()
    claim = (
        "SELECT id FROM pgqueue.outbox WHERE published_at IS NULL ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED"
    )
    assert [conn.execute(claim).fetchone() for conn in (slow, quick)] == [(id_,) for id_ in ids]
    publish(rig, ids[1])
    publish(rig, ids[0])
    assert inversions(rig.log()) == [("a", ids[0], ids[1])]
    assert not missing(rig.log(), ids)


def test_the_checks_see_a_loss_of_a_relay_that_remembers_the_last_id(
    rig: BrokerRig, two: tuple[Connection, Connection]
) -> None:
    late, early = two
    ids = [outbox.add(conn, "e", {}, aggregate_id=name) for conn, name in ((late, "a"), (early, "b"))]
    early.commit()
    cursor = 0
    for commit in (late.commit, early.commit):
        for (id_,) in early.execute(
            "SELECT id FROM pgqueue.outbox WHERE id > %s ORDER BY id", [cursor]
        ).fetchall():
            publish(rig, int(str(id_)), "b")
            cursor = int(str(id_))
        commit()
    assert missing(rig.log(), ids) == {ids[0]}


def publish(rig: BrokerRig, id_: int, aggregate: str = "a") -> None:
    """Publish an event of the outbox through the sink, without a relay."""
    rig.count = id_ - 1
    assert rig.sink.publish([rig.event(aggregate)]) == [CONFIRMED]
