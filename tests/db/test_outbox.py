"""Events are rows of the caller's transaction, whatever handle it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pgqueue.errors import NotInTransaction
from relay import NewEvent, Outbox
from tests.db.forms import ASYNC, KINDS, Form, opened
from tests.server import Connection, Server

NASTY = "a\"b'; DROP TABLE pgqueue.outbox; --$$ $1 %s %(x)s :y .\\n\n\t🦆"

outbox = Outbox()


@pytest.fixture(scope="module")
def shop(server: Server) -> Iterator[str]:
    """Give the DSN of one database for the whole module."""
    name = server.migrated()
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def watch(shop: str) -> Iterator[Connection]:
    """Give a second connection to that database, whose outbox is empty."""
    with psycopg.connect(shop, autocommit=True, options="-c search_path=") as conn:
        conn.execute("TRUNCATE pgqueue.outbox")
        yield conn


@pytest.fixture(params=KINDS)
def form(request: pytest.FixtureRequest, watch: Connection, shop: str) -> Iterator[Form]:
    """Give each kind of handle in turn."""
    with opened(request.param, shop) as made:
        yield made


def add(form: Form, *args: Any, **options: Any) -> int:
    """Write one event."""
    return form._call(outbox.aadd if form.kind in ASYNC else outbox.add, *args, **options)  # type: ignore[no-any-return]


def add_many(form: Form, events: list[NewEvent]) -> list[int]:
    """Write many events."""
    return form._call(outbox.aadd_many if form.kind in ASYNC else outbox.add_many, events)  # type: ignore[no-any-return]


def count(watch: Connection) -> int:
    """Count the events that others see."""
    row = watch.execute("SELECT count(*) FROM pgqueue.outbox").fetchone()
    assert row is not None
    return int(str(row[0]))


def test_an_event_appears_with_the_commit_and_holds_what_was_given(form: Form, watch: Connection) -> None:
    options = {
        "aggregate_id": NASTY,
        "aggregate_type": NASTY[:40],
        "version": 2**63 - 1,
        "headers": {"k": NASTY},
    }
    id_ = add(form, "order.placed", {"text": NASTY, "n": [1, None]}, **options)
    assert count(watch) == 0
    form.commit()
    row = watch.execute(
        "SELECT id, event_type, payload, aggregate_id, aggregate_type, aggregate_version, headers, published_at,"
        " attempts, part BETWEEN 0 AND 63 FROM pgqueue.outbox"
    ).fetchone()
    assert row == (
        id_, "order.placed", {"text": NASTY, "n": [1, None]}, NASTY, NASTY[:40], 2**63 - 1, {"k": NASTY}, None, 0, True,
    )  # fmt: skip


def test_the_smallest_event_is_the_row_that_a_plain_insert_writes(form: Form, watch: Connection) -> None:
    add(form, "order.placed", {"a": 1}, aggregate_id="order-1")
    form.commit()
    watch.execute(
        "INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload)"
        " VALUES ('order-1', 'order.placed', '{\"a\": 1}')"
    )
    rows = watch.execute(
        "SELECT to_jsonb(o) - ARRAY['id', 'created_at'] FROM pgqueue.outbox o ORDER BY o.id"
    ).fetchall()
    assert rows[0] == rows[1]


def test_a_rollback_leaves_no_event(form: Form, watch: Connection) -> None:
    add(form, "order.placed", {})
    form.rollback()
    assert count(watch) == 0


def test_a_savepoint_that_rolls_back_takes_its_events_along(form: Form, watch: Connection) -> None:
    kept = add(form, "order.placed", {})
    form.execute("SAVEPOINT s")
    add(form, "order.placed", {})
    form.execute("ROLLBACK TO SAVEPOINT s")
    last = add(form, "order.paid", {})
    form.commit()
    assert watch.execute("SELECT id FROM pgqueue.outbox ORDER BY id").fetchall() == [(kept,), (last,)]


def test_many_events_get_rising_ids_in_the_order_given(form: Form, watch: Connection) -> None:
    events = [
        NewEvent(event_type=f"e{i}", payload=i, aggregate_id=None if i % 3 else i, version=i)
        for i in range(300)
    ]
    ids = add_many(form, events)
    form.commit()
    assert ids == sorted(ids)
    rows = watch.execute(
        "SELECT id, event_type, payload, aggregate_id FROM pgqueue.outbox ORDER BY id"
    ).fetchall()
    assert rows == [(ids[i], f"e{i}", i, None if i % 3 else str(i)) for i in range(300)]


def test_no_events_are_no_trouble(form: Form, watch: Connection) -> None:
    assert add_many(form, []) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_handle_that_would_commit_at_once_is_refused(kind: str, watch: Connection, shop: str) -> None:
    with opened(kind, shop, autocommit=True) as form:
        with pytest.raises(NotInTransaction):
            add(form, "order.placed", {})
        with pytest.raises(NotInTransaction):
            add_many(form, [NewEvent(event_type="e", payload=1)])
    assert count(watch) == 0


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_stricter_isolation_level_makes_no_difference(isolation: str, watch: Connection, shop: str) -> None:
    with psycopg.connect(shop) as conn:
        conn.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}".encode())
        outbox.add(conn, "order.placed", {}, aggregate_id="order-1")
    assert count(watch) == 1


def test_a_long_writer_delays_nobody_elses_event(watch: Connection, shop: str) -> None:
    with psycopg.connect(shop) as long, psycopg.connect(shop) as quick:
        outbox.add(long, "order.placed", {}, aggregate_id="order-1")
        outbox.add(quick, "order.placed", {}, aggregate_id="order-1")
        quick.commit()
        assert count(watch) == 1
        long.rollback()


def notified(listener: Connection, writer: Connection) -> list[str]:
    """Return what was notified so far; the last of it is an end that the writer notifies now."""
    writer.execute("NOTIFY pgqueue_outbox, 'end'")
    writer.commit()
    told: list[str] = []
    for note in listener.notifies(timeout=60):
        told.append(note.payload)
        if note.payload == "end":
            break
    return told


def test_events_notify_only_while_a_relay_idles(watch: Connection, shop: str) -> None:
    with psycopg.connect(shop, autocommit=True) as listener, psycopg.connect(shop) as writer:
        listener.execute("LISTEN pgqueue_outbox")
        outbox.add(writer, "order.placed", {})
        writer.commit()
        assert notified(listener, writer) == ["end"]
        listener.execute(
            "SELECT setval('pgqueue.outbox_idle', (extract(epoch FROM clock_timestamp()) * 1000)::bigint + 600000)"
        )
        outbox.add(writer, "order.placed", {})
        writer.commit()
        assert notified(listener, writer) == ["", "end"]
        writer.execute("SET LOCAL pgqueue.notify = off")
        outbox.add(writer, "order.placed", {})
        writer.commit()
        assert notified(listener, writer) == ["end"]
