"""History is published again as copies: each once, in the old order, whatever stops it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from pgqueue.connection import execute
from relay import Outbox, replay
from relay.event import attributes
from relay.publish import read
from relay.replay import Copied, Which
from tests.db.relaying import cleared
from tests.server import Connection, Server

outbox = Outbox()


@pytest.fixture(scope="module")
def shop(server: Server) -> Iterator[str]:
    """Give the DSN of one database for the whole module."""
    name = server.migrated()
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def dsn(shop: str) -> str:
    """Give that database, emptied."""
    with psycopg.connect(cleared(shop), autocommit=True) as conn:
        conn.execute("TRUNCATE pgqueue.outbox_replay")
    return shop


@pytest.fixture
def conn(dsn: str) -> Iterator[Connection]:
    """Give an autocommit connection to a database with published history, and a little that is not published."""
    with psycopg.connect(dsn, autocommit=True) as made:
        made.execute(
            "INSERT INTO pgqueue.outbox"
            " (aggregate_id, event_type, payload, aggregate_version, headers, created_at, published_at)"
            " SELECT 'a' || n % 5, CASE n % 3 WHEN 0 THEN 'order.placed' WHEN 1 THEN 'order.paid' ELSE 'mail.sent' END,"
            " jsonb_build_object('n', n), n, jsonb_build_object('k', n::text),"
            " timestamptz '2026-01-01 00:00Z' + n * interval '1 h', now() FROM generate_series(1, 60) n"
        )
        made.execute(
            "INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload) VALUES ('a0', 'order.placed', '{}')"
        )
        made.execute(
            "INSERT INTO pgqueue.outbox (event_type, payload, parked_at, last_error)"
            " VALUES ('order.placed', '{}', now(), 'no')"
        )
        yield made


def copies(conn: Connection) -> list[Any]:
    """Return (old n, aggregate, header) of the copies in the order of their ids."""
    return conn.execute(
        "SELECT (payload->>'n')::int, aggregate_id, headers FROM pgqueue.outbox WHERE headers ? 'replay_of' ORDER BY id"
    ).fetchall()


def run(conn: Connection, which: Which, *, n: int = 7) -> int:
    """Copy to the end; return the replay's id."""
    begun = execute(conn, replay.begin(which))
    assert begun is not None
    while not step(conn, begun.id, n=n).ended:
        pass
    return begun.id


def step(conn: Connection, id_: int, *, n: int) -> Copied:
    """Copy one page."""
    done = execute(conn, replay.copy(id_, n=n))
    assert done is not None
    return done


@pytest.mark.parametrize(
    ("which", "wanted"),
    [
        (Which(), lambda n: n > 0),
        (Which(event_type="order.paid"), lambda n: n % 3 == 1),
        (Which(event_type="order.*"), lambda n: n % 3 < 2),
        (Which(event_type="order"), lambda n: n < 0),
        (Which(aggregate_id="a2"), lambda n: n % 5 == 2),
        (Which(since=datetime(2026, 1, 2, tzinfo=UTC)), lambda n: n >= 24),
        (Which(until=datetime(2026, 1, 2, tzinfo=UTC), event_type="mail.*"), lambda n: n < 24 and n % 3 == 2),
    ],
)
@pytest.mark.parametrize("window", [10_000, 4])
def test_exactly_what_was_asked_for_is_copied_in_the_old_order(
    conn: Connection, which: Which, wanted: Any, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "WINDOW", window)
    ns = [n for n in range(1, 61) if wanted(n)]
    assert execute(conn, replay.found(which)).events == len(ns)
    id_ = run(conn, which)
    assert [row[0] for row in copies(conn)] == ns
    shown = execute(conn, replay.show(id_))
    assert shown is not None
    assert (shown.copied, shown.which) == (len(ns), which)
    assert shown.ended_at is not None


def test_a_copy_is_the_event_under_a_new_key_that_names_the_old_one_and_keeps_its_time(
    conn: Connection,
) -> None:
    run(conn, Which(aggregate_id="a1", event_type="order.paid"))
    events = execute(conn, read(dict.fromkeys(range(64), 0), 100))
    (copy, *_) = [e for e in events if "replay_of" in e.headers]
    row = conn.execute(
        "SELECT id FROM pgqueue.outbox WHERE payload = '{\"n\": 1}' ORDER BY id LIMIT 1"
    ).fetchone()
    assert row is not None
    context = attributes(copy, "/s")
    assert copy.payload == '{"n": 1}'
    assert context["replayof"] == f"outbox:{row[0]}"
    assert context["id"] == f"outbox:{copy.id}" != context["replayof"]
    assert context["time"] == "2026-01-01T01:00:00.000000Z"
    assert (copy.aggregate_id, copy.version, copy.headers["k"]) == ("a1", 1, "1")
    assert copy.created_at > datetime(2026, 1, 2, tzinfo=UTC), "the lag counts from now"


def test_what_is_published_or_copied_meanwhile_is_not_copied(conn: Connection) -> None:
    begun = execute(conn, replay.begin(Which()))
    assert begun is not None
    step(conn, begun.id, n=20)
    with conn.transaction():
        outbox.add(conn, "order.placed", {"n": 99})
    conn.execute(
        "UPDATE pgqueue.outbox SET published_at = now() WHERE published_at IS NULL AND parked_at IS NULL"
    )
    while not step(conn, begun.id, n=20).ended:
        pass
    assert 99 not in [row[0] for row in copies(conn)]
    conn.execute("UPDATE pgqueue.outbox SET published_at = now() WHERE headers ? 'replay_of'")
    assert execute(conn, replay.found(Which(event_type="mail.sent"))).events == 20


def test_a_batch_that_is_rolled_back_is_copied_again_and_none_twice(conn: Connection) -> None:
    begun = execute(conn, replay.begin(Which()))
    assert begun is not None
    step(conn, begun.id, n=10)
    with conn.transaction(force_rollback=True):
        step(conn, begun.id, n=10)
    while not step(conn, begun.id, n=10).ended:
        pass
    assert [row[0] for row in copies(conn) if row[0]] == list(range(1, 61))


def test_two_at_once_copy_each_event_once_and_in_order(conn: Connection, dsn: str) -> None:
    begun = execute(conn, replay.begin(Which(event_type="order.*")))
    assert begun is not None
    together = threading.Barrier(2)

    def work() -> None:
        with psycopg.connect(dsn, autocommit=True) as own:
            together.wait(60)
            while (done := execute(own, replay.copy(begun.id, n=1))) is not None and not done.ended:
                pass

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [row[0] for row in copies(conn)] == [n for n in range(1, 61) if n % 3 < 2]


def test_one_replay_of_a_type_and_aggregate_is_open_at_a_time(conn: Connection) -> None:
    which = Which(event_type="order.*")
    first = execute(conn, replay.begin(which))
    assert first is not None
    assert execute(conn, replay.begin(which)) is None
    assert execute(conn, replay.unfinished(which)) == first
    assert execute(conn, replay.begin(Which(aggregate_id="a1"))) is not None
    assert execute(conn, replay.leave(which)) == [first.id]
    assert execute(conn, replay.copy(first.id, n=1)) is None
    assert execute(conn, replay.begin(which)) is not None
