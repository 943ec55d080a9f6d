"""One relay, several sinks: each event to one of them, in order per aggregate across all, whatever fails."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest

from pgqueue.events import Bus, Event
from relay import Outbox
from relay import publishing as publishing_module
from relay.config import RelayConfig
from relay.event import CONFIRMED, Receipt
from relay.event import Event as OutboxEvent
from relay.events import SinkBack, SinkDown
from relay.report import Report
from relay.routes import Routes
from relay.service import Relay
from relay.sinks import SinkUnavailable
from relay.sinks.memory import MemorySink
from tests.db.relaying import cleared, inversions, missing
from tests.server import Connection, Server
from tests.waiting import eventually

outbox = Outbox()


class Noting(MemorySink):
    """Notes (aggregate, id) of what it accepts in a list that several sinks share."""

    def __init__(self, name: str, log: list[tuple[str, int]], *, ordered: bool = False) -> None:
        super().__init__(ordered=ordered)
        self.name = name
        self.log = log

    def publish(self, events: Sequence[OutboxEvent]) -> Sequence[Receipt]:
        """Note what was accepted."""
        receipts = super().publish(events)
        self.log += [(e.key, e.id) for e, r in zip(events, receipts, strict=True) if r == CONFIRMED]
        return receipts


class Running:
    """A relay with two sinks: `b` takes type b, `a` all the rest."""

    def __init__(self, dsn: str, *, ordered: bool = False) -> None:
        self.log: list[tuple[str, int]] = []
        self.a = Noting("a", self.log, ordered=ordered)
        self.b = Noting("b", self.log)
        self.told: list[Event] = []
        bus = Bus()
        bus.subscribe(Event, self.told.append)
        config = RelayConfig(dsn=dsn, name="relay", source="/s", lease=60.0)
        self.relay = Relay(config, Routes({"*": self.a, "b": self.b}), bus)

    def heard(self, kind: type[Event]) -> list[Any]:
        """Return what it told of one kind."""
        return [event for event in self.told if isinstance(event, kind)]


@pytest.fixture(scope="module")
def shop(server: Server) -> Iterator[str]:
    """Give the DSN of one database for the whole module."""
    name = server.migrated()
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def dsn(shop: str) -> str:
    """Give that database, emptied."""
    return cleared(shop)


@pytest.fixture(params=["unordered", "ordered"])
def running(request: pytest.FixtureRequest, dsn: str) -> Iterator[Running]:
    """Give a running relay, stopped at the end."""
    made = Running(dsn, ordered=request.param == "ordered")
    made.relay.start()
    yield made
    made.a.resume()
    made.b.resume()
    made.relay.stop(60)


@pytest.fixture
def writer(dsn: str) -> Iterator[Connection]:
    """Give an autocommit connection."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


def add(writer: Connection, *events: tuple[str, str]) -> list[int]:
    """Write one event for each (aggregate, type), in one transaction."""
    with writer.transaction():
        return [outbox.add(writer, kind, {}, aggregate_id=key) for key, kind in events]


def unpublished(writer: Connection) -> int:
    """Count the events without a mark."""
    row = writer.execute("SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NULL").fetchone()
    assert row is not None
    return int(str(row[0]))


def test_each_event_goes_to_the_sink_of_its_type(running: Running, writer: Connection) -> None:
    ids = add(writer, ("x", "a"), ("x", "b"), ("x", "c"), ("y", "b"))
    eventually(lambda: unpublished(writer) == 0)
    assert sorted(e.id for e in running.a.accepted) == [ids[0], ids[2]]
    assert sorted(e.id for e in running.b.accepted) == [ids[1], ids[3]]


def test_while_one_sink_is_away_the_others_go_on_and_no_attempt_is_spent(
    running: Running, writer: Connection
) -> None:
    running.b.away.set()
    ids = add(writer, ("x", "a"), ("x", "b"), ("x", "a"), ("y", "a"))
    eventually(lambda: unpublished(writer) == 2)
    more = [add(writer, (f"z{n}", "a"))[0] for n in range(20)]
    eventually(lambda: unpublished(writer) == 2)
    assert {e.id for e in running.a.accepted} == {ids[0], ids[3], *more}
    assert not running.b.accepted
    eventually(lambda: running.heard(SinkDown))
    running.b.resume()
    eventually(lambda: unpublished(writer) == 0)
    assert not inversions(running.log)
    assert [e.sink for e in running.heard(SinkBack)] == ["b"]
    assert writer.execute("SELECT max(attempts), count(parked_at) FROM pgqueue.outbox").fetchone() == (0, 0)


def test_what_goes_to_a_target_that_is_gone_waits_for_minutes_and_the_others_go_on(
    running: Running, writer: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(_: Sequence[OutboxEvent]) -> Sequence[Receipt]:
        raise SinkUnavailable("b", "it is gone", retry_after=math.inf)

    monkeypatch.setattr(running.b, "publish", gone)
    add(writer, ("x", "a"), ("y", "b"), ("z", "a"))
    held = "SELECT aggregate_id FROM pgqueue.outbox WHERE next_attempt_at > now() + interval '2 min'"
    eventually(lambda: writer.execute(held).fetchall() == [("y",)])
    eventually(lambda: unpublished(writer) == 1)
    (down,) = running.heard(SinkDown)
    bus = Bus()
    Report(bus)
    bus.emit(down)
    assert caplog.messages == ["sink b is away: it is gone"]


def test_while_every_sink_is_away_all_wait_and_nothing_is_lost(running: Running, writer: Connection) -> None:
    running.a.away.set()
    running.b.away.set()
    add(writer, ("x", "a"), ("y", "b"))
    eventually(lambda: {e.sink for e in running.heard(SinkDown)} == {"a", "b"})
    running.a.resume()
    running.b.resume()
    eventually(lambda: unpublished(writer) == 0, 20)


def test_more_held_aggregates_than_fit_make_all_wait_and_none_is_lost(
    running: Running, writer: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing_module, "MOST_HELD", 5)
    running.b.away.set()
    ids = add(writer, *[(f"k{n}", "ab"[n % 2]) for n in range(60)])
    eventually(lambda: len(running.heard(SinkDown)) >= 3)
    held = writer.execute("SELECT count(*) FROM pgqueue.outbox WHERE next_attempt_at > now()").fetchone()
    assert held is not None
    assert int(str(held[0])) <= 5
    running.b.resume()
    eventually(lambda: unpublished(writer) == 0, 20)
    assert not missing(running.log, ids)


def test_sinks_that_come_and_go_invert_and_lose_nothing(running: Running, writer: Connection) -> None:
    chance = random.Random(7)
    ids: list[int] = []
    running.a.reject = lambda e: "no" if e.attempts == 0 and e.id % 97 == 0 else None
    for _ in range(40):
        for sink in (running.a, running.b):
            if chance.random() < 0.3:
                sink.away.set()
            else:
                sink.resume()
        if chance.random() < 0.2:
            running.b.lose_replies = 1
        ids += add(writer, *[(f"k{chance.randrange(8)}", chance.choice("abc")) for _ in range(15)])
        if not (running.a.away.is_set() or running.b.away.is_set()):
            last = ids[-1]
            eventually(lambda: any(id_ == last for _, id_ in running.log), 20)  # noqa: B023 - called before the next
    running.a.resume()
    running.b.resume()
    eventually(lambda: unpublished(writer) == 0, 60)
    assert not missing(running.log, ids)
    assert not inversions(running.log)
