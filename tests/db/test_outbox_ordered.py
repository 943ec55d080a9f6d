"""Writers that lock nothing of their own: `ordered` makes them take turns before they draw a number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest

from pgqueue.errors import BadOption
from relay import NewEvent, Outbox
from tests.db.relaying import Stepper, cleared, inversions, stepper
from tests.server import Connection, Server
from tests.waiting import eventually

outbox = Outbox()

Writer = Callable[[Connection, str], object]

SQL = "SELECT pgqueue.outbox_add_ordered(%s, 'e', '{}')"

ORDERED: dict[str, Writer] = {
    "one": lambda conn, key: outbox.add(conn, "e", {}, aggregate_id=key, ordered=True),
    "many": lambda conn, key: outbox.add_many(
        conn, [NewEvent(event_type="e", payload={}, aggregate_id=key)], ordered=True
    ),
    "SQL": lambda conn, key: conn.execute(SQL, [key]),
}


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
def pair(dsn: str) -> Iterator[tuple[Connection, Connection]]:
    """Give two writers."""
    with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second:
        yield first, second


@pytest.fixture
def relay(dsn: str) -> Iterator[Stepper]:
    """Give a relay, one step at each call."""
    made = stepper(dsn)
    yield made
    made.conn.close()


def waits(dsn: str) -> bool:
    """Tell whether some writer waits for an advisory lock."""
    with psycopg.connect(dsn) as watch:
        return bool(
            watch.execute(
                "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
                " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            ).fetchone()
        )


def test_without_a_lock_the_later_commit_with_the_lower_id_is_published_behind(
    pair: tuple[Connection, Connection], relay: Stepper
) -> None:
    first, second = pair
    outbox.add(first, "e", {}, aggregate_id="x")
    outbox.add(second, "e", {}, aggregate_id="x")
    second.commit()
    relay.step()
    first.commit()
    relay.drain()
    assert len(relay.log) == 2
    assert inversions(relay.log)


@pytest.mark.parametrize("write", ORDERED.values(), ids=ORDERED)
def test_ordered_writers_of_one_aggregate_take_turns_before_they_draw_a_number(
    pair: tuple[Connection, Connection], relay: Stepper, dsn: str, write: Writer
) -> None:
    first, second = pair
    write(first, "x")

    def late() -> None:
        write(second, "x")
        second.commit()

    thread = threading.Thread(target=late)
    thread.start()
    eventually(lambda: waits(dsn))
    relay.step()
    first.commit()
    thread.join(60)
    relay.drain()
    assert len(relay.log) == 2
    assert not inversions(relay.log)


def test_ordered_writers_of_different_aggregates_do_not_wait(
    pair: tuple[Connection, Connection], relay: Stepper
) -> None:
    first, second = pair
    second.execute("SET lock_timeout = '60s'")
    for write in ORDERED.values():
        write(first, "x")
        write(second, "y")
    second.commit()
    first.commit()


def test_many_ordered_events_keep_the_order_given_and_lock_their_aggregates_in_one_order(
    pair: tuple[Connection, Connection], dsn: str
) -> None:
    first, second = pair
    names = [f"a{n}" for n in range(30)]
    made: list[list[int]] = []

    def write(conn: Connection, keys: list[str]) -> None:
        for _ in range(10):
            events = [NewEvent(event_type="e", payload={}, aggregate_id=key) for key in keys]
            ids = outbox.add_many(conn, events, ordered=True)
            rows = conn.execute(
                "SELECT aggregate_id FROM pgqueue.outbox WHERE id = ANY (%s) ORDER BY id", [ids]
            )
            assert [row[0] for row in rows] == keys
            conn.commit()
            made.append(ids)

    threads = [
        threading.Thread(target=write, args=(first, names)),
        threading.Thread(target=write, args=(second, names[::-1])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(made) == 20


def test_ordered_without_an_aggregate_is_refused(pair: tuple[Connection, Connection]) -> None:
    first, _ = pair
    with pytest.raises(BadOption, match="aggregate_id"):
        outbox.add(first, "e", {}, ordered=True)
    with pytest.raises(BadOption, match="aggregate_id"):
        outbox.add_many(first, [NewEvent(event_type="e", payload={})], ordered=True)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="aggregate_id"):
        first.execute(SQL, [None])


def test_an_ordered_event_holds_what_was_given(pair: tuple[Connection, Connection]) -> None:
    first, _ = pair
    id_ = outbox.add(
        first, "order.placed", {"n": 1}, aggregate_id="x", aggregate_type="order", version=7, headers={"a": "b"},
        ordered=True,
    )  # fmt: skip
    row = first.execute(
        "SELECT id, event_type, payload, aggregate_id, aggregate_type, aggregate_version, headers FROM pgqueue.outbox"
    ).fetchone()
    assert row == (id_, "order.placed", {"n": 1}, "x", "order", 7, {"a": "b"})
