from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from pgqueue import App
from tests.server import Connection

app = App()
FAR = 4_102_444_800_000  # ms since 1970: the year 2100


@app.job("ship")
def ship(n: int) -> None: ...


@pytest.fixture
def listener(dsn: str) -> Iterator[Connection]:
    """Give a second connection that listens on all channels."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        for bucket in range(64):
            conn.execute(f"LISTEN pgqueue_{bucket:02d}")
        conn.execute("LISTEN stop")
        yield conn


def idle(conn: Connection, queue: str, until: int = FAR) -> str:
    """Say that somebody idles on a queue; return its channel."""
    row = conn.execute(
        "SELECT b.b, setval(('pgqueue.idle_' || b.b)::regclass, %(until)s)"
        " FROM pgqueue.bucket(%(queue)s) b(b)",
        {"queue": queue, "until": until},
    ).fetchone()
    conn.commit()
    assert row is not None
    return f"pgqueue_{row[0]}"


def heard(conn: Connection, listener: Connection) -> list[str]:
    """Commit, then return the channels that were notified by then."""
    conn.execute("NOTIFY stop")
    conn.commit()
    channels: list[str] = []
    for note in listener.notifies(timeout=60):
        if note.channel == "stop":
            return channels
        assert note.payload == ""
        channels.append(note.channel)
    raise AssertionError("the NOTIFY at the end did not arrive")


def test_an_idle_worker_is_woken_once_per_transaction_at_commit(
    conn: Connection, listener: Connection
) -> None:
    channel = idle(conn, "default")
    ship.enqueue_many(conn, range(1_000))
    ship.enqueue(conn, 1)
    assert heard(conn, listener) == [channel]


@pytest.mark.parametrize(
    "insert",
    [
        lambda conn: ship.enqueue(conn, 1),
        lambda conn: ship.using(dedup_key="k").enqueue(conn, 1),
        lambda conn: ship.using(key="k").enqueue(conn, 1),
        lambda conn: ship.using(run_after=0).enqueue(conn, 1),
        lambda conn: ship.using(run_after=datetime.now(UTC) - timedelta(days=1)).enqueue(conn, 1),
        lambda conn: conn.execute("SELECT pgqueue.enqueue('ship')"),
        lambda conn: conn.execute("INSERT INTO pgqueue.job (name, payload) VALUES ('ship', '1')"),
    ],
)
def test_every_way_to_enqueue_wakes(
    insert: Callable[[Connection], object], conn: Connection, listener: Connection
) -> None:
    channel = idle(conn, "default")
    insert(conn)
    assert heard(conn, listener) == [channel]


def test_nobody_idle_means_no_notify(conn: Connection, listener: Connection) -> None:
    ship.enqueue(conn, 1)
    assert heard(conn, listener) == []
    idle(conn, "default", int(datetime.now(UTC).timestamp() * 1000) - 1)
    ship.enqueue(conn, 1)
    assert heard(conn, listener) == []


def test_a_worker_that_idles_on_another_queue_is_left_alone(conn: Connection, listener: Connection) -> None:
    first, second = idle(conn, "default"), idle(conn, "mail")
    assert first != second
    ship.using(queue="mail").enqueue(conn, 1)
    assert heard(conn, listener) == [second]


def test_a_bulk_wakes_once_and_what_follows_it_wakes_too(conn: Connection, listener: Connection) -> None:
    """A bulk tells the trigger to be quiet, for its own statement only."""
    first, second = idle(conn, "default"), idle(conn, "mail")
    ship.enqueue_many(conn, range(5_000))
    conn.execute("INSERT INTO pgqueue.job (name, queue) VALUES ('ship', 'mail')")
    assert heard(conn, listener) == [first, second]
    ship.using(run_after=60).enqueue_many(conn, range(5_000))
    assert heard(conn, listener) == []
    conn.execute("ALTER TABLE pgqueue.job ADD CHECK (payload::text <> '-1')")
    with pytest.raises(psycopg.errors.CheckViolation), conn.transaction():
        ship.enqueue_many(conn, [*range(5_000), -1])
    conn.execute("INSERT INTO pgqueue.job (name, queue) VALUES ('ship', 'mail')")
    assert heard(conn, listener) == [second]


def test_a_delayed_job_wakes_nobody(conn: Connection, listener: Connection) -> None:
    idle(conn, "default")
    ship.using(run_after=60).enqueue(conn, 1)
    conn.execute("INSERT INTO pgqueue.job (name, run_at) VALUES ('ship', now() + interval '1 h')")
    assert heard(conn, listener) == []


def test_a_taken_dedup_key_wakes_nobody(conn: Connection, listener: Connection) -> None:
    ship.using(dedup_key="k").enqueue(conn, 1)
    idle(conn, "default")
    ship.using(dedup_key="k").enqueue(conn, 1)
    assert heard(conn, listener) == []


def test_a_rollback_wakes_nobody(conn: Connection, listener: Connection) -> None:
    idle(conn, "default")
    ship.enqueue(conn, 1)
    conn.rollback()
    assert heard(conn, listener) == []


def test_notify_off_is_for_one_transaction(conn: Connection, listener: Connection) -> None:
    channel = idle(conn, "default")
    conn.execute("SET LOCAL pgqueue.notify = off")
    ship.enqueue_many(conn, range(10))
    assert heard(conn, listener) == []
    ship.enqueue(conn, 1)
    assert heard(conn, listener) == [channel]


def test_a_payload_longer_than_a_notify_may_be_is_no_matter(conn: Connection, listener: Connection) -> None:
    channel = idle(conn, "default")
    for size in (7_997, 8_001, 1_000_000):
        conn.execute("SELECT pgqueue.enqueue('ship', to_json(repeat('x', %s)))", [size])
    assert heard(conn, listener) == [channel]
