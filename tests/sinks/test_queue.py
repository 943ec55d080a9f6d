"""The sink that turns events into jobs: exactly one job per subscriber, whatever fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import psycopg
import pytest

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, Event
from relay.sinks import Sink, SinkContext, open_sink
from tests.server import Connection, Server
from tests.sinks.conftest import SOURCE, QueueRig
from tests.waiting import eventually


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
    failed: list[Exception] = []

    def publish() -> None:
        try:
            sink.publish([event])
        except Exception as error:  # noqa: BLE001 - the test looks at it
            failed.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
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
    thread.join(10)
    conn.rollback()
    assert failed
    assert one_row(conn, "SELECT count(*) FROM pgqueue.job") == (0,)
    assert one_row(conn, "SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NULL") == (1,)
    assert list(sink.publish([event])) == [CONFIRMED]
    sink.close()
    assert one_row(conn, "SELECT count(*) FROM pgqueue.job") == (1,)


def test_two_relays_with_the_same_events_enqueue_each_once(rig: QueueRig, conn: Connection) -> None:
    events = [rig.event(f"order-{n % 5}") for n in range(200)]
    sinks = [queue_sink(rig.dsn, "mail") for _ in range(2)]
    begin = threading.Barrier(2)

    def publish(sink: Sink, batches: Sequence[Sequence[Event]]) -> None:
        begin.wait(10)
        for batch in batches:
            assert set(sink.publish(batch)) == {CONFIRMED}
        sink.close()

    cut = [(events[:120], events[120:]), (events[:70], events[70:])]
    threads = [threading.Thread(target=publish, args=pair) for pair in zip(sinks, cut, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    rows = conn.execute("SELECT key, headers->>'id' FROM pgqueue.job ORDER BY id").fetchall()
    assert len(rows) == len({key for _, key in rows}) == 200
    for aggregate in {event.aggregate_id for event in events}:
        got = [key for agg, key in rows if agg == aggregate]
        assert got == [event.idempotency_key for event in events if event.aggregate_id == aggregate]


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
