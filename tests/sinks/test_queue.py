"""The sink that turns events into jobs: exactly one job per subscriber, whatever fails."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from msgspec import structs

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, Event
from relay.sinks import Sink, SinkContext, SinkUnavailable, open_sink, queue
from tests.db.relaying import inversions
from tests.process.relaying import Producers, RelayProcess
from tests.server import Connection, Server
from tests.sinks.conftest import SOURCE, QueueRig
from tests.waiting import chaos, eventually


@pytest.fixture
def rig(server: Server, dsn: str) -> QueueRig:
    """Give the queue rig alone."""
    return QueueRig(server, dsn)


def queue_sink(dsn: str, *names: str, keep: bool = True) -> Sink:
    """Return a sink whose every event has these subscribers."""
    return open_sink("queue:", SinkContext(source=SOURCE, dsn=dsn, subscribers=lambda _: names, keep=keep))


def one_row(conn: Connection, query: str) -> Sequence[object]:
    """Read one row in a transaction of its own."""
    row = conn.execute(query.encode()).fetchone()
    conn.rollback()
    assert row is not None
    return row


def publishing(sink: Sink, event: Event) -> tuple[threading.Thread, list[SinkUnavailable]]:
    """Publish in a thread; the list gets the error if the sink is away."""
    failed: list[SinkUnavailable] = []

    def publish() -> None:
        try:
            sink.publish([event])
        except SinkUnavailable as error:
            failed.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    return thread, failed


def test_each_subscriber_gets_one_job_in_event_order_with_the_aggregate_as_key(
    rig: QueueRig, conn: Connection
) -> None:
    events = [rig.event("order-1", f'{{"n": {n}}}') for n in range(3)]
    sink = queue_sink(rig.dsn, "mail", "stock")
    assert list(sink.publish(events)) == [CONFIRMED] * 3
    sink.close()
    rows = conn.execute(
        "SELECT name, key, payload->>'n', headers->>'id' FROM pgqueue.job ORDER BY id"
    ).fetchall()
    for name in ("mail", "stock"):
        assert [row[1:] for row in rows if row[0] == name] == [
            ("order-1", str(n), events[n].idempotency_key) for n in range(3)
        ]
    assert len(rows) == 6


@pytest.mark.parametrize("odd", ['a="b"', "back\\slash\\", "{curly,}", "Zürich \n\t", "NULL", "%s", "'", ""])
def test_headers_arrive_whatever_characters_they_hold(rig: QueueRig, conn: Connection, odd: str) -> None:
    aggregate = f"order-{odd}" if odd else "order"
    sink = queue_sink(rig.dsn, "mail")
    given = structs.replace(rig.event(aggregate), headers={"tracestate": odd})
    assert list(sink.publish([given, rig.event("order-2")])) == [CONFIRMED] * 2
    sink.close()
    query = "SELECT headers->>'tracestate', headers->>'subject', key FROM pgqueue.job ORDER BY id LIMIT 1"
    assert one_row(conn, query) == (odd, f"order/{aggregate}", aggregate)


def test_a_subscriber_with_a_limit_gets_its_jobs_without_an_ordering_key(
    rig: QueueRig, conn: Connection
) -> None:
    with psycopg.connect(rig.dsn, autocommit=True) as declare:
        declare.execute("INSERT INTO pgqueue.job_type (name, slots) VALUES ('limited', 2)")
        sink = queue_sink(rig.dsn, "limited", "mail")
        assert list(sink.publish([rig.event("order-1"), rig.event("order-2")])) == [CONFIRMED] * 2
        sink.close()
        declare.execute("DELETE FROM pgqueue.job_type")
    rows = conn.execute("SELECT name, key FROM pgqueue.job ORDER BY name, id").fetchall()
    assert rows == [
        ("limited", "@limited"),
        ("limited", "@limited"),
        ("mail", "order-1"),
        ("mail", "order-2"),
    ]


def test_an_event_without_subscriber_is_published_too(rig: QueueRig, conn: Connection) -> None:
    sink = queue_sink(rig.dsn)
    assert list(sink.publish([rig.event()])) == [CONFIRMED]
    sink.close()
    assert one_row(conn, "SELECT count(*) FILTER (WHERE published_at IS NULL) FROM pgqueue.outbox") == (0,)


def test_publish_and_mark_are_one_transaction(rig: QueueRig, conn: Connection) -> None:
    """While the enqueue waits for a lock, neither the mark nor a job is visible; killed there, neither happens."""
    event = rig.event()
    sink = queue_sink(rig.dsn, "mail")
    conn.execute("LOCK TABLE pgqueue.job IN ACCESS EXCLUSIVE MODE")
    thread, failed = publishing(sink, event)
    with psycopg.connect(rig.dsn, autocommit=True) as watch:
        waiting = (
            "SELECT pid FROM pg_stat_activity"
            " WHERE wait_event_type = 'Lock' AND application_name = 'relay queue:'"
        )
        found = eventually(lambda: watch.execute(waiting).fetchone())
        assert found is not None
        assert watch.execute("SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NULL").fetchone() == (
            1,
        )
        watch.execute("SELECT pg_terminate_backend(%s)", [found[0]])
    thread.join(60)
    conn.rollback()
    assert failed
    assert one_row(conn, "SELECT count(*) FROM pgqueue.job") == (0,)
    assert one_row(conn, "SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NULL") == (1,)
    assert list(sink.publish([event])) == [CONFIRMED]
    sink.close()
    assert one_row(conn, "SELECT count(*) FROM pgqueue.job") == (1,)


def test_events_of_a_relay_that_stalls_inside_its_transaction_are_handed_over_by_another(
    rig: QueueRig, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "STALLED_MS", 200)
    event = rig.event()
    inside, over = threading.Event(), threading.Event()

    def stalled(_: str) -> list[str]:
        inside.set()
        assert over.wait(100)
        return ["mail"]

    slow = open_sink("queue:", SinkContext(source=SOURCE, dsn=rig.dsn, subscribers=stalled))
    thread, failed = publishing(slow, event)
    assert inside.wait(60)
    monkeypatch.undo()
    sink = queue_sink(rig.dsn, "mail")
    assert list(sink.publish([event])) == [CONFIRMED]
    sink.close()
    over.set()
    thread.join(60)
    assert failed
    slow.close()
    assert one_row(conn, "SELECT count(*) FROM pgqueue.job") == (1,)


def test_an_event_that_somebody_holds_locked_is_told_of(
    rig: QueueRig, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "LOCKED_MS", 100)
    event = rig.event()
    conn.execute("SELECT FROM pgqueue.outbox FOR UPDATE")
    sink = queue_sink(rig.dsn, "mail")
    with pytest.raises(SinkUnavailable, match="lock timeout"):
        sink.publish([event])
    conn.rollback()
    assert list(sink.publish([event])) == [CONFIRMED]
    sink.close()


def test_two_relays_with_the_same_events_enqueue_each_once(rig: QueueRig, conn: Connection) -> None:
    events = [rig.event(f"order-{n % 5}") for n in range(200)]
    sinks = [queue_sink(rig.dsn, "mail") for _ in range(2)]
    begin = threading.Barrier(2)

    def publish(sink: Sink, batches: Sequence[Sequence[Event]]) -> None:
        begin.wait(60)
        for batch in batches:
            assert set(sink.publish(batch)) == {CONFIRMED}
        sink.close()

    cut = [(events[:120], events[120:]), (events[:70], events[70:])]
    threads = [threading.Thread(target=publish, args=pair) for pair in zip(sinks, cut, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    rows = conn.execute("SELECT key, headers->>'id' FROM pgqueue.job ORDER BY id").fetchall()
    assert len(rows) == len({key for _, key in rows}) == 200
    for aggregate in {event.aggregate_id for event in events}:
        got = [key for agg, key in rows if agg == aggregate]
        assert got == [event.idempotency_key for event in events if event.aggregate_id == aggregate]


def test_events_of_several_types_become_jobs_in_event_order_for_each_aggregate(
    rig: QueueRig, conn: Connection
) -> None:
    chance = random.Random(7)
    events = [
        rig.event(chance.choice(("a", "b", "c", None)), event_type=chance.choice(("paid", "placed", "sent")))
        for _ in range(60)
    ]
    subscribers = {"paid": ["pay"], "placed": ["place", "count"], "sent": ["count"]}
    sink = open_sink("queue:", SinkContext(source=SOURCE, dsn=rig.dsn, subscribers=subscribers.__getitem__))
    assert set(sink.publish(events)) == {CONFIRMED}
    sink.close()
    rows = conn.execute(
        "SELECT name, key, headers->>'id', headers->>'type' FROM pgqueue.job ORDER BY id"
    ).fetchall()
    number = {event.idempotency_key: event.id for event in events}
    assert len(rows) == sum(len(subscribers[event.event_type]) for event in events)
    for aggregate in "abc":
        mine = [(str(name), number[str(id_)], str(kind)) for name, key, id_, kind in rows if key == aggregate]
        for name in ("pay", "place", "count"):
            own = [id_ for who, id_, _ in mine if who == name]
            assert own == sorted(own)
        # An event of another type is never overtaken.
        for place, (_, id_, kind) in enumerate(mine):
            assert not [later for _, later, other in mine[place + 1 :] if later < id_ and other != kind]


@pytest.mark.chaos
def test_each_event_becomes_one_job_though_relays_are_killed_and_stalled(dsn: str) -> None:
    producers = Producers(dsn, threads=2)
    with ExitStack() as stack, psycopg.connect(dsn, autocommit=True) as watch:

        def start(number: int) -> RelayProcess:
            made = RelayProcess(dsn, Path("/dev/null"), f"relay-{number}", sink="queue:")
            stack.callback(made.process.wait, 60)
            stack.callback(made.process.kill)
            return made

        def more(count: int) -> None:
            query = "SELECT count(*) FROM pgqueue.job"
            row = watch.execute(query).fetchone()
            assert row is not None
            eventually(lambda: watch.execute(f"{query} HAVING count(*) >= {row[0] + count}").fetchone(), 30)

        relays = [start(number) for number in range(2)]
        there = "SELECT FROM pgqueue.relay WHERE name = 'relay-0'"
        eventually(lambda: watch.execute(there).fetchone() is not None, 30)
        producers.start()
        try:
            for turn in range(chaos(3, 30)):
                more(100)
                relays[0].stall()
                relays[1].kill()
                relays[1] = start(turn + 2)
                more(100)
                relays[0].resume()
        finally:
            producers.stop()
        unmarked = "SELECT FROM pgqueue.outbox WHERE published_at IS NULL LIMIT 1"
        eventually(lambda: watch.execute(unmarked).fetchone() is None, 30)
        # The last one may not have come far enough to end in order: then the signal ends it.
        assert relays[0].stop() == 0
        assert relays[1].stop() in (0, -signal.SIGTERM)
        rows = watch.execute("SELECT key, headers->>'id' FROM pgqueue.job ORDER BY id").fetchall()
        log = [(str(key), int(str(id_).removeprefix("outbox:"))) for key, id_ in rows]
        ids = [int(str(row[0])) for row in watch.execute("SELECT id FROM pgqueue.outbox").fetchall()]
    assert sorted(id_ for _, id_ in log) == sorted(ids)
    assert set(producers.committed) <= set(ids)
    assert not inversions(log)


def test_retention_0_deletes_what_was_handed_over(rig: QueueRig, conn: Connection) -> None:
    sink = queue_sink(rig.dsn, "mail", keep=False)
    sink.publish([rig.event(), rig.event()])
    sink.close()
    assert one_row(
        conn, "SELECT (SELECT count(*) FROM pgqueue.outbox), (SELECT count(*) FROM pgqueue.job)"
    ) == (0, 2)


def test_the_sink_needs_to_know_the_subscribers() -> None:
    with pytest.raises(ConfigError, match=r"outbox-relay shop\.jobs:app"):
        open_sink("queue:", SinkContext(source=SOURCE))
