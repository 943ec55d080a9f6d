"""The whole relay in this process: threads, leases, trouble with the sink and with the database."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pgqueue.events import Bus, Event, LoopFailed, LoopRecovered
from pgqueue.loop import IdlePoll
from relay import Outbox, publishing, upkeep
from relay.config import RelayConfig
from relay.cycle import cycle
from relay.event import Event as OutboxEvent
from relay.event import Receipt, Unavailable
from relay.events import (
    EventsDeferred,
    EventsPublished,
    OutboxSampled,
    PartitionsLost,
    Pruned,
    SinkBack,
    SinkDown,
)
from relay.prune import PAGE
from relay.publish import RejectionPolicy
from relay.service import Relay
from relay.sinks import SinkUnavailable
from relay.sinks.memory import MemorySink
from tests.db.relaying import cleared, inversions
from tests.server import Connection, Server
from tests.waiting import eventually

outbox = Outbox()


class Started:
    """A relay that runs, with everything it told."""

    def __init__(self, relay: Relay, sink: Any, told: list[Event]) -> None:
        self.relay = relay
        self.sink = sink
        self.told = told

    def heard(self, kind: type[Event]) -> list[Any]:
        """Return what it told of one kind."""
        return [event for event in self.told if isinstance(event, kind)]

    def keys(self) -> list[str]:
        """Return the keys in the order of acceptance, repetitions included."""
        return [event.idempotency_key for event in self.sink.accepted]

    @property
    def parts(self) -> int:
        """How many partitions it believes to own."""
        return len(self.relay._publishing._floors.parts)


Starter = Callable[..., Started]


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


@pytest.fixture
def start(dsn: str) -> Iterator[Starter]:
    """Give a function that starts relays, all stopped at the end."""
    with ExitStack() as stack:

        def begin(sink: Any = None, **options: Any) -> Started:
            told: list[Event] = []
            bus = Bus()
            bus.subscribe(Event, told.append)
            chosen = MemorySink() if sink is None else sink
            given: dict[str, Any] = {"dsn": dsn, "name": "relay", "source": "/s", "lease": 60.0}
            config = RelayConfig(**(given | options))
            relay = Relay(config, chosen, bus)
            relay.start()
            stack.callback(relay.stop, 60)
            if hasattr(chosen, "resume"):
                stack.callback(chosen.resume)
            return Started(relay, chosen, told)

        yield begin


@pytest.fixture
def watch(dsn: str) -> Iterator[Connection]:
    """Give an autocommit connection."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


def add(watch: Connection, *aggregates: str | None) -> list[int]:
    """Write one event for each aggregate named, in one transaction."""
    with watch.transaction():
        return [outbox.add(watch, "e", {"n": n}, aggregate_id=a) for n, a in enumerate(aggregates)]


def unpublished(watch: Connection) -> int:
    """Count the events without a mark."""
    row = watch.execute("SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NULL").fetchone()
    assert row is not None
    return int(str(row[0]))


def drained(watch: Connection) -> None:
    """Wait until every event is marked."""
    eventually(lambda: unpublished(watch) == 0, 20)


def attempts(watch: Connection) -> set[object]:
    """Return the attempts spent on any event."""
    return {row[0] for row in watch.execute("SELECT attempts FROM pgqueue.outbox")}


def test_what_was_committed_is_published_and_marked(start: Starter, watch: Connection) -> None:
    ids = add(watch, "a", "b", None)
    relay = start()
    drained(watch)
    assert sorted(relay.keys()) == [f"outbox:{id_}" for id_ in ids]
    assert sum(event.count for event in relay.heard(EventsPublished)) == 3


def test_the_first_sample_counts_the_partitions_that_were_just_taken(start: Starter) -> None:
    relay = start()
    eventually(lambda: relay.heard(OutboxSampled))
    assert relay.heard(OutboxSampled)[0].orphan_partitions == 0


def test_an_idle_relay_is_woken_by_the_commit(
    start: Starter, watch: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IdlePoll, "delay", lambda _: 60.0)
    relay = start()
    eventually(lambda: relay.parts == 64)
    eventually(lambda: watch.execute("SELECT is_called FROM pgqueue.outbox_idle").fetchone() == (True,))
    began = time.monotonic()
    for n in range(5):
        eventually(lambda: relay.relay._wake._waiting)
        add(watch, f"a{n}")
        eventually(lambda n=n: len(relay.sink.accepted) == n + 1, look=0.001)  # type: ignore[misc]
    assert time.monotonic() - began < 40, "five times a third of a lease would take longer"


def shares(relays: Sequence[Started]) -> list[int]:
    """Let relays share the partitions now, a third of a lease early; return how many each believes to own."""
    for one in relays:
        one.relay._publishing._rebalance_at = 0.0
        one.relay._wake.set()
    return sorted(one.parts for one in relays)


def test_relays_share_the_partitions_and_take_over_from_one_that_leaves(
    start: Starter, watch: Connection
) -> None:
    relays = [start() for _ in range(3)]
    eventually(lambda: shares(relays) == [20, 22, 22])
    owners = "SELECT count(DISTINCT owner) FROM pgqueue.relay_partition"
    assert watch.execute(owners).fetchone() == (3,)
    assert relays[0].relay.stop(60)
    assert watch.execute("SELECT count(*) FROM pgqueue.relay").fetchone() == (2,)
    eventually(lambda: shares(relays[1:]) == [32, 32])
    add(watch, *[f"a{n}" for n in range(200)])
    drained(watch)
    assert all(len(r.sink.accepted) > 20 for r in relays[1:])


def test_a_stop_finishes_the_batch_marks_it_and_gives_everything_back(
    start: Starter, watch: Connection
) -> None:
    relay = start(sink := MemorySink())
    eventually(lambda: relay.parts == 64)
    sink.stalled.set()
    add(watch, "a", "b")
    eventually(sink.in_publish.is_set)
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(relay.relay.stop(60)))
    stopping.start()
    sink.resume()
    stopping.join(60)
    assert stopped == [True]
    assert unpublished(watch) == 0
    assert watch.execute("SELECT count(owner) FROM pgqueue.relay_partition").fetchone() == (0,)
    assert watch.execute("SELECT count(*) FROM pgqueue.relay").fetchone() == (0,)


def test_no_transaction_is_open_while_the_sink_stalls(
    start: Starter, watch: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "PRUNE_EVERY_S", 1e9)  # that is a transaction, of its own
    relay = start(sink := MemorySink())
    eventually(lambda: relay.parts == 64)
    sink.stalled.set()
    add(watch, "a")
    eventually(sink.in_publish.is_set)
    states = (
        "SELECT state, xact_start FROM pg_catalog.pg_stat_activity"
        " WHERE application_name LIKE 'relay %' AND datname = current_database()"
    )
    for _ in range(20):
        rows = watch.execute(states).fetchall()
        assert len(rows) == 2
        assert all("in transaction" not in str(state) for state, _ in rows)
    assert watch.execute(states.replace("relay %", "relay publish")).fetchall() == [("idle", None)]
    sink.resume()
    drained(watch)


def fill(watch: Connection, count: int) -> None:
    """Write events of fifty aggregates in one statement."""
    watch.execute(
        "INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload)"
        " SELECT (i %% 50)::text, 'e', '{}' FROM generate_series(1, %s) i",
        [count],
    )


class Looks:
    """The looks that a relay took, counted; `broken` makes the first one that is taken ahead fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, broken: bool = False) -> None:
        self.count = 0
        self.ahead = 0
        self.broken = broken
        monkeypatch.setattr(publishing, "cycle", self.take)

    def take(self, *args: Any, **options: Any) -> Any:
        """Take a look."""
        if threading.current_thread().name == "relay-ahead":
            self.ahead += 1
            if self.broken and self.ahead == 1:
                raise psycopg.OperationalError("the connection is lost")
        seen = cycle(*args, **options)
        self.count += 1
        return seen


def published_once_and_in_order(relay: Started, count: int) -> None:
    """Check what the sink accepted."""
    keys = [(event.key, event.id) for event in relay.sink.accepted]
    assert len(keys) == len(set(keys)) == count
    assert not inversions(keys)


def test_with_a_backlog_the_next_batch_is_read_while_the_sink_works(
    start: Starter, watch: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(MemorySink):
        def publish(self, events: Sequence[OutboxEvent]) -> Sequence[Receipt]:
            receipts = super().publish(events)
            if self.calls == 3:  # the first batch comes before anything is proven
                eventually(lambda: looks.count > self.calls)
            return receipts

    fill(watch, 2_000)
    looks = Looks(monkeypatch)
    relay = start(Slow(ordered=True))
    drained(watch)
    assert looks.ahead
    published_once_and_in_order(relay, 2_000)


def test_what_was_confirmed_while_a_look_ahead_failed_is_marked_and_not_sent_again(
    start: Starter, watch: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(watch, 2_000)
    looks = Looks(monkeypatch, broken=True)
    relay = start(MemorySink(ordered=True))
    drained(watch)
    assert looks.ahead > 1
    assert relay.heard(LoopFailed)
    published_once_and_in_order(relay, 2_000)


@pytest.mark.parametrize("ordered", [True, False])
def test_rejections_and_lost_replies_amid_a_backlog_invert_and_lose_nothing(
    start: Starter, watch: Connection, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    refused: set[int] = set()

    def once(event: OutboxEvent) -> str | None:
        if event.id % 37 or event.id in refused:
            return None
        refused.add(event.id)
        return "not now"

    fill(watch, 3_000)
    looks = Looks(monkeypatch)
    sink = MemorySink(ordered=ordered, reject=once)
    sink.lose_replies = 2
    relay = start(sink, batch=200, rejection=RejectionPolicy(base=0, cap=0))
    drained(watch)
    assert looks.ahead
    keys = [(event.key, event.id) for event in relay.sink.accepted]
    assert len(set(keys)) == 3_000
    assert not inversions(keys)


def test_an_outage_longer_than_all_attempts_spends_none_and_drains_afterwards(
    start: Starter, watch: Connection
) -> None:
    sink = MemorySink()
    sink.away.set()
    relay = start(sink, rejection=RejectionPolicy(max_attempts=2, base=0.05, cap=0.1))
    add(watch, *["a"] * 5, *["b"] * 5, None)
    eventually(lambda: len(relay.heard(SinkDown)) >= 5, 20)
    assert attempts(watch) == {0}
    assert unpublished(watch) == 11
    assert sink.calls < 40, "a broker that is away is not hammered"
    assert sink.closed >= 5
    sink.resume()
    drained(watch)
    assert not inversions([(e.key, e.id) for e in sink.accepted])
    assert len(relay.heard(SinkBack)) == 1
    assert attempts(watch) == {0}


def test_a_lost_reply_repeats_events_under_the_same_key(start: Starter, watch: Connection) -> None:
    sink = MemorySink()
    sink.lose_replies = 2
    relay = start(sink)
    ids = add(watch, "a", "b", "c")
    drained(watch)
    assert len(relay.keys()) > 3
    assert set(relay.keys()) == {f"outbox:{id_}" for id_ in ids}


def test_an_aggregate_without_an_answer_does_not_stop_the_others(start: Starter, watch: Connection) -> None:
    muted = {"a"}
    sink = MemorySink(mute=lambda e: "HTTP 500" if e.key in muted else None)
    relay = start(sink, rejection=RejectionPolicy(max_attempts=2, base=0.1, cap=0.2))
    first = add(watch, "a", "a", *[f"b{n}" for n in range(20)])
    eventually(lambda: unpublished(watch) == 2)
    eventually(lambda: relay.heard(EventsDeferred))
    add(watch, "c")
    eventually(lambda: unpublished(watch) == 2)
    assert attempts(watch) == {0}
    muted.clear()
    drained(watch)
    assert [e.id for e in sink.accepted if e.key == "a"] == first[:2]


class Later(MemorySink):
    """A sink that asks to be left alone for so long: for one aggregate, or all in all."""

    def __init__(self, asked: float, *, key: str | None = None, raises: bool = False) -> None:
        super().__init__()
        self.asked = asked
        self.key = key
        self.raises = raises

    def publish(self, events: Sequence[OutboxEvent]) -> Sequence[Receipt]:
        """Refuse for the moment."""
        if self.raises:
            raise SinkUnavailable(self.name, "later", retry_after=self.asked)
        receipts = super().publish([event for event in events if self.key not in (None, event.key)])
        accepted = iter(receipts)
        return [
            Unavailable("later", self.asked) if self.key in (None, event.key) else next(accepted)
            for event in events
        ]


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize(("asked", "waits"), [(200.0, 200.0), (10_000.0, 300.0)])
def test_a_sink_is_left_alone_for_as_long_as_it_asks_up_to_five_minutes(
    start: Starter, watch: Connection, asked: float, waits: float, raises: bool
) -> None:
    relay = start(Later(asked, raises=raises))
    add(watch, "a", "b")
    eventually(lambda: relay.heard(SinkDown))
    assert [down.retry_in for down in relay.heard(SinkDown)] == [waits]


@pytest.mark.parametrize(("asked", "waits"), [(200.0, 200), (10_000.0, 300)])
def test_an_event_waits_for_as_long_as_the_sink_asks_up_to_five_minutes_while_others_go(
    start: Starter, watch: Connection, asked: float, waits: int
) -> None:
    relay = start(Later(asked, key="a"), rejection=RejectionPolicy(base=0.1, cap=0.2))
    late, *_ = add(watch, "a", "a", *[f"b{n}" for n in range(20)])
    eventually(lambda: unpublished(watch) == 2)
    seconds = eventually(
        lambda: watch.execute(
            "SELECT extract(epoch FROM next_attempt_at - clock_timestamp())::int FROM pgqueue.outbox"
            " WHERE id = %s AND next_attempt_at IS NOT NULL",
            [late],
        ).fetchone()
    )
    assert waits - 100 < int(str(seconds[0])) <= waits
    assert not relay.heard(SinkDown)


class Broken(MemorySink):
    """A sink with a fault: one event makes it raise something of its own."""

    def publish(self, events: Sequence[OutboxEvent]) -> Sequence[Receipt]:
        """Raise when the poison is among the events."""
        if any(event.key == "poison" for event in events):
            raise ZeroDivisionError("a fault of the sink")
        return super().publish(events)


@pytest.mark.parametrize("ordered", [False, True])
def test_an_event_that_breaks_the_sink_does_not_stop_the_others(
    start: Starter, watch: Connection, ordered: bool
) -> None:
    relay = start(Broken(ordered=ordered), rejection=RejectionPolicy(max_attempts=2, base=0.1, cap=0.2))
    add(watch, "poison", *["a"] * 3, *["b"] * 3)
    eventually(lambda: unpublished(watch) == 1)
    add(watch, "a", "c")
    eventually(lambda: unpublished(watch) == 1)
    assert not inversions([(e.key, e.id) for e in relay.sink.accepted])


class Severing(MemorySink):
    """A sink during whose publish the relay's connections to the database are cut."""

    def __init__(self, watch: Connection) -> None:
        super().__init__()
        self.watch = watch
        self.cut = threading.Event()

    def publish(self, events: Sequence[OutboxEvent]) -> Sequence[Receipt]:
        """Accept, and cut if told to."""
        receipts = super().publish(events)
        if self.cut.is_set():
            self.cut.clear()
            self.watch.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity"
                " WHERE application_name LIKE 'relay %' AND datname = current_database()"
            )
        return receipts


def test_what_was_confirmed_is_marked_after_a_lost_connection_and_not_sent_again(
    start: Starter, watch: Connection
) -> None:
    relay = start(sink := Severing(watch))
    eventually(lambda: relay.parts == 64)
    sink.cut.set()
    with psycopg.connect(watch.info.dsn, password=watch.info.password or None) as writer:
        ids = add(writer, "a", "b", "c")
        writer.commit()
    eventually(lambda: not sink.cut.is_set())
    drained(watch)
    more = add(watch, "a", "d")
    drained(watch)
    assert sorted(relay.keys()) == sorted(f"outbox:{id_}" for id_ in ids + more)
    eventually(lambda: len(relay.heard(LoopRecovered)) >= 1)


def test_a_relay_that_hangs_in_its_sink_loses_its_partitions_and_inverts_nothing(
    start: Starter, watch: Connection
) -> None:
    log: list[OutboxEvent] = []
    slow, quick = MemorySink(), MemorySink()
    slow.accepted = quick.accepted = log
    stalled = start(slow, lease=1.0, send_timeout=0.2)
    eventually(lambda: stalled.parts == 64)
    slow.stalled.set()
    add(watch, *[f"a{n % 7}" for n in range(50)])
    eventually(slow.in_publish.is_set)
    eventually(lambda: stalled.relay.stalled() is not None)
    other = start(quick, lease=1.0, send_timeout=0.2)
    eventually(lambda: other.parts == 64)
    drained(watch)
    add(watch, *[f"a{n % 7}" for n in range(50)])
    drained(watch)
    slow.resume()
    eventually(lambda: stalled.heard(PartitionsLost))
    eventually(lambda: stalled.relay.stalled() is None)
    eventually(lambda: sorted([stalled.parts, other.parts]) == [32, 32])
    add(watch, *[f"a{n % 7}" for n in range(50)])
    drained(watch)
    assert not inversions([(e.key, e.id) for e in log])
    assert len({e.id for e in log}) == 150


def test_a_table_that_somebody_locks_is_waited_for(start: Starter, watch: Connection, dsn: str) -> None:
    relay = start()
    eventually(lambda: relay.parts == 64)
    with psycopg.connect(dsn) as migration:
        migration.execute("LOCK TABLE pgqueue.outbox IN ACCESS EXCLUSIVE MODE")
        eventually(lambda: relay.heard(LoopFailed))
        migration.rollback()
    add(watch, "a")
    drained(watch)
    eventually(lambda: relay.heard(LoopRecovered))


def test_the_defaults_of_the_role_do_not_matter(start: Starter, watch: Connection) -> None:
    row = watch.execute("SELECT current_database()").fetchone()
    assert row is not None
    name = sql.Identifier(str(row[0]))
    settings = {
        "default_transaction_isolation": "serializable",
        "default_transaction_read_only": "on",
        "statement_timeout": "1s",
        "idle_session_timeout": "100ms",
        "idle_in_transaction_session_timeout": "100ms",
        "search_path": "",
    }
    for setting, value in settings.items():
        watch.execute(sql.SQL("ALTER DATABASE {} SET {} = {}").format(name, sql.Identifier(setting), value))
    try:
        sink = MemorySink()
        relay = start(sink)
        eventually(lambda: relay.parts == 64)
        sink.stalled.set()
        add(watch, "a", "b")
        eventually(sink.in_publish.is_set)
        eventually(lambda: watch.execute(IDLE_FOR_A_WHILE).fetchone())
        sink.resume()
        drained(watch)
        assert not relay.heard(LoopFailed)
    finally:
        for setting in settings:
            watch.execute(sql.SQL("ALTER DATABASE {} RESET {}").format(name, sql.Identifier(setting)))


IDLE_FOR_A_WHILE = (
    "SELECT true FROM pg_catalog.pg_stat_activity WHERE application_name = 'relay publish'"
    " AND datname = current_database() AND state_change < clock_timestamp() - interval '300 ms'"
)


def test_old_events_are_pruned_while_the_relay_runs(start: Starter, watch: Connection) -> None:
    relay = start(retention=timedelta(microseconds=1))
    add(watch, "a", "b")
    drained(watch)

    def pruned() -> list[Any]:
        relay.relay._upkeep._prune_at = 0
        return relay.heard(Pruned)

    eventually(pruned)
    assert watch.execute("SELECT count(*) FROM pgqueue.outbox").fetchone() == (0,)


def test_events_that_stay_do_not_hide_the_old_ones_behind_them(start: Starter, watch: Connection) -> None:
    watch.execute(
        "INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload, created_at, parked_at, last_error)"
        " SELECT i::text, 'e', '{}', now() - interval '9 days', now(), 'x' FROM generate_series(1, %s) i",
        [2 * PAGE],
    )
    fill(watch, 2 * PAGE + 10)
    watch.execute(
        "UPDATE pgqueue.outbox SET created_at = now() - interval '9 days', published_at = now() - interval '8 days'"
        " WHERE parked_at IS NULL"
    )
    relay = start(retention=timedelta(days=7))

    def pruned() -> bool:
        relay.relay._upkeep._prune_at = 0
        return watch.execute("SELECT count(*) FROM pgqueue.outbox").fetchone() == (2 * PAGE,)

    eventually(pruned)


def test_an_app_without_a_database_waits_for_it(start: Starter, dsn: str) -> None:
    relay = start(dsn=dsn.replace("/pgqueue_", "/nowhere_pgqueue_"))
    eventually(lambda: relay.told[2:])
    assert relay.relay.stalled() is None
    assert relay.relay.stop(60)
