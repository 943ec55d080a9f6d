"""What a job costs the server: HOT claims and few bytes of WAL. These counters do not vary with the load."""

from __future__ import annotations

from typing import Any, TypeVar

import psycopg
import pytest

from pgqueue.claim import claim, suspects
from pgqueue.finish import ack, release
from pgqueue.heartbeat import heartbeat
from pgqueue.job import Claim
from pgqueue.statement import Statement
from tests.factories import (
    EVERYTHING,
    MINUTE,
    QUEUE,
    Connection,
    Holder,
    enqueue,
    explain,
    ids,
    lose,
    nodes,
    scope,
    token,
    wipe,
)
from tests.waiting import eventually

T = TypeVar("T")

CLAIMED = ("lease", "deadline", "attempt", "claimed_at")
JOBS = 400


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


def updates(connection: Connection) -> tuple[int, int]:
    """Return how many rows of the job table were updated, and how many of them HOT, in this transaction."""
    found = connection.execute(
        "SELECT pg_stat_get_xact_tuples_updated(c), pg_stat_get_xact_tuples_hot_updated(c)"
        " FROM (SELECT 'pgqueue.job'::regclass) t(c)"
    ).fetchone()
    assert found
    return int(found[0]), int(found[1])


@pytest.mark.parametrize("size", [150, 1_000, 1_900, 4_000, 8_000])
@pytest.mark.parametrize("batch", [1, 100])
def test_every_claim_is_a_hot_update_whatever_the_size_of_the_payload(
    dsn: str, conn: Connection, size: int, batch: int
) -> None:
    """One indexed or growing column costs three times the WAL and an index entry per claim."""
    for part in range(20):
        enqueue(conn, 20, payload=f"{part:03}" + "x" * size)
    conn.commit()
    with Holder(dsn) as holder:
        holder.begin()
        taken = 0
        while jobs := holder.claim(batch):
            taken += len(jobs)
        assert taken == JOBS
        assert updates(holder.connection) == (JOBS, JOBS)
        holder.commit()


def test_a_heartbeat_a_rescue_and_a_release_are_hot_updates_too(dsn: str, conn: Connection) -> None:
    """Tried again while somebody holds back what the server may clean up, as who makes a replication slot does."""

    def counted(holder: Holder, statement: Statement[list[T]]) -> tuple[list[T], float]:
        """Run in a transaction of its own, so that the next one may reuse the space; return the HOT share."""
        holder.begin()
        before = updates(holder.connection)
        found = holder.run(statement)
        after = updates(holder.connection)
        holder.commit()
        assert len(found) == after[0] - before[0] == 100
        return found, (after[1] - before[1]) / 100

    def shares(holder: Holder) -> tuple[float, float, float]:
        """Return the HOT shares of a heartbeat, a rescue and a release."""
        wipe(dsn)
        enqueue(conn, 100, payload="x" * 300)
        conn.commit()
        jobs = holder.claim()
        conn.execute("UPDATE pgqueue.job SET deadline = clock_timestamp() + interval '1 s'")
        conn.commit()
        _, beaten = counted(holder, heartbeat([token(job) for job in jobs], MINUTE))
        lose(conn, ids(jobs))
        conn.commit()
        found, rescued = counted(holder, suspects(scope(), [EVERYTHING], 100, 99, MINUTE, low=0, high=0))
        _, released = counted(holder, release(found))
        return beaten, rescued, released

    with Holder(dsn) as holder:
        eventually(lambda: shares(holder) == (1.0, 1.0, 1.0), 5, look=0.5)


def test_no_column_that_a_claim_writes_is_indexed_or_may_be_null(conn: Connection) -> None:
    indexed = conn.execute(
        "SELECT a.attname FROM pg_catalog.pg_attribute a WHERE a.attrelid = 'pgqueue.job'::regclass"
        " AND a.attname = ANY (%s) AND EXISTS (SELECT FROM pg_catalog.pg_depend d"
        " JOIN pg_catalog.pg_index i ON i.indexrelid = d.objid"
        " WHERE d.refobjid = a.attrelid AND d.refobjsubid = a.attnum AND d.classid = 'pg_class'::regclass)",
        [list(CLAIMED)],
    ).fetchall()
    assert indexed == []
    nullable = conn.execute(
        "SELECT attname FROM pg_catalog.pg_attribute WHERE attrelid = 'pgqueue.job'::regclass"
        " AND attname = ANY (%s) AND NOT attnotnull",
        [list(CLAIMED)],
    ).fetchall()
    assert nullable == []


def test_a_claim_writes_no_other_column(dsn: str, conn: Connection) -> None:
    (job_id,) = enqueue(conn, headers={"a": 1}, max_attempts=3)
    conn.commit()
    before = conn.execute("SELECT to_jsonb(j) FROM pgqueue.job j").fetchone()
    with Holder(dsn) as holder:
        holder.claim()
    after = conn.execute("SELECT to_jsonb(j) FROM pgqueue.job j WHERE id = %s", [job_id]).fetchone()
    assert before
    assert after
    assert {name for name in after[0] if after[0][name] != before[0][name]} == set(CLAIMED)


def test_enqueue_claim_and_ack_write_at_most_750_bytes_of_wal_per_job(dsn: str, conn: Connection) -> None:
    """Payload of 150 bytes, batches of 100; page images are left out: they depend on when the checkpoint was."""
    enqueue(conn, JOBS, payload="x" * 148)
    conn.commit()
    with Holder(dsn) as holder:
        holder.run(ack(holder.claim()))  # the pages are there, and prepared statements too
        with psycopg.connect(dsn, autocommit=True) as other:
            other.execute("VACUUM pgqueue.job")
            full = other.execute("SHOW full_page_writes").fetchone()
        costs = []
        for _ in range(3):  # the position is the server's: others may write in between
            before, images = position(conn), page_images(conn, holder.connection)
            for _ in range(JOBS // 100):
                enqueue(conn, 100, payload="x" * 148)
                conn.commit()
            while jobs := holder.claim(100):
                holder.run(ack(jobs))
            more = page_images(conn, holder.connection) - images if full == ("on",) else 0
            costs.append((position(conn) - before - 8_192 * more) / JOBS)
    assert 0 < min(costs) <= 750 + whole_rows(conn), costs


def test_a_claim_and_an_ack_write_at_most_350_bytes_of_wal_per_job(dsn: str, conn: Connection) -> None:
    enqueue(conn, 100, payload="x" * 148)
    conn.commit()
    with Holder(dsn) as holder:
        plan = explain(holder.connection, claim(scope(), [0], 100, 77, MINUTE, {QUEUE: 0}))
        bytes_, images = totals(plan)
        jobs = conn.execute("SELECT id, lease FROM pgqueue.job WHERE lease = 77").fetchall()
        assert len(jobs) == 100
        conn.commit()
        other, more = totals(explain(holder.connection, ack([Claim(*row) for row in jobs])))
    assert (bytes_ + other - 8_192 * (images + more)) / 100 <= 350 + whole_rows(conn)


def whole_rows(connection: Connection) -> int:
    """Return what logical decoding adds per job: under it a claim logs the whole new row, not the difference."""
    return 200 if connection.execute("SHOW wal_level").fetchone() == ("logical",) else 0


def totals(plan: dict[str, Any]) -> tuple[int, int]:
    """Return the WAL bytes and page images of a plan: its nodes count what stands below them."""
    top = max(nodes(plan), key=lambda node: node["WAL Bytes"])
    return int(top["WAL Bytes"]), int(top["WAL FPI"])


def position(connection: Connection) -> int:
    """Return how much WAL was ever written."""
    found = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
    connection.commit()
    assert found
    return int(found[0])


def page_images(connection: Connection, *others: Connection) -> int:
    """Return how many full-page images were ever written, those of the other connections included."""
    for other in (*others, connection):
        other.execute("SELECT pg_stat_force_next_flush()")
    connection.commit()
    found = connection.execute("SELECT wal_fpi FROM pg_stat_wal").fetchone()
    connection.commit()
    assert found
    return int(found[0])
