"""A replication slot that the server has given up, because it would have kept more log than it may."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pgqueue.embedded import Embedded, EmbeddedUnavailable
from pgqueue.events import Bus
from pgqueue.migrate import upgrade
from relay import Outbox
from relay.config import RelayConfig
from relay.service import Relay
from relay.sinks.memory import MemorySink
from tests.db.relaying import inversions, missing
from tests.server import FAST, Connection, in_memory
from tests.waiting import eventually

outbox = Outbox()

SMALL = {
    "wal_level": "logical",
    "max_slot_wal_keep_size": "1MB",
    "max_wal_size": "32MB",
    "min_wal_size": "32MB",
    "shared_buffers": "32MB",
}


@pytest.fixture
def dsn() -> Iterator[str]:
    """Give the DSN of a migrated database on a server that keeps little log for slots."""
    try:
        with Embedded(settings=FAST | SMALL, scratch=in_memory()) as own:
            upgrade(own.dsn())
            yield own.dsn()
    except EmbeddedUnavailable as error:
        pytest.skip(f"server: {error}")


def status(conn: Connection) -> object:
    """Return what the server says of the slot."""
    row = conn.execute("SELECT wal_status, active FROM pg_replication_slots").fetchone()
    return None if row is None else row


def add(conn: Connection, count: int) -> list[int]:
    """Write events for a few aggregates."""
    with conn.transaction():
        return [outbox.add(conn, "e", {}, aggregate_id=f"a{n % 3}") for n in range(count)]


def left(conn: Connection) -> bool:
    """Tell whether an event has no mark."""
    return (
        conn.execute("SELECT FROM pgqueue.outbox WHERE published_at IS NULL LIMIT 1").fetchone() is not None
    )


def started(dsn: str, sink: MemorySink) -> Relay:
    """Start a relay that follows the log."""
    relay = Relay(RelayConfig(dsn=dsn, name="relay", source="/s", wal=True), sink, Bus())
    relay.start()
    return relay


def test_a_slot_that_the_server_gave_up_is_made_anew_and_nothing_is_lost(dsn: str) -> None:
    sink = MemorySink()
    with psycopg.connect(dsn, autocommit=True) as conn:
        relay = started(dsn, sink)
        ids = add(conn, 10)
        eventually(lambda: not left(conn))
        assert relay.stop(60)
        eventually(lambda: status(conn) == ("reserved", False))
        ids += add(conn, 50)
        for _ in range(6):
            conn.execute(
                "CREATE TABLE public.filler AS SELECT repeat('x', 500) FROM generate_series(1, 20000)"
            )
            conn.execute("DROP TABLE public.filler")
            conn.execute("SELECT pg_switch_wal()")
            conn.execute("CHECKPOINT")
        eventually(lambda: status(conn) == ("lost", False))
        relay = started(dsn, sink)
        eventually(lambda: not left(conn), 20)
        ids += add(conn, 10)
        eventually(lambda: not left(conn))
        assert relay.stop(60)
        eventually(lambda: status(conn) == ("reserved", False))
    log = [(event.key, event.id) for event in sink.accepted]
    assert not missing(log, ids)
    assert not inversions(log)
