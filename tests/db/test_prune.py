"""Prune: what nobody needs goes in bounded batches; what is needed stays; counters are folded without loss."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest

from pgqueue.finish import Failed, ack, retry
from pgqueue.prune import chores, fold
from tests.factories import Connection, Holder, enqueue, retried, token, wipe

WEEK = timedelta(days=7)


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


def prune(holder: Holder) -> None:
    for statement in chores(WEEK):
        holder.run(statement)


def column(conn: Connection, query: str) -> list[object]:
    found = [row[0] for row in conn.execute(query.encode())]
    conn.commit()
    return found


def tallies(conn: Connection) -> list[tuple[object, ...]]:
    found = conn.execute(
        "SELECT queue, name, outcome, sum(n)::int, count(*)::int FROM pgqueue.tally_minute"
        " GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"
    ).fetchall()
    conn.commit()
    return [tuple(row) for row in found]


def test_counters_are_folded_into_minutes_without_loss(conn: Connection, a: Holder) -> None:
    conn.execute(
        "INSERT INTO pgqueue.tally (at, queue, name, outcome, n, wait_s)"
        " SELECT timestamptz '2026-01-01 00:00:30+00' + (i % 3) * interval '1 min', 'q', 'work', 'ok', 2, 0.5"
        " FROM generate_series(1, 300) i"
    )
    conn.commit()
    a.run(fold())
    assert column(conn, "SELECT count(*) FROM pgqueue.tally") == [0]
    assert tallies(conn) == [("q", "work", "ok", 600, 3)]
    assert column(conn, "SELECT sum(wait_s) FROM pgqueue.tally_minute") == [150.0]
    conn.execute(
        "INSERT INTO pgqueue.tally (at, queue, name, outcome, n)"
        " VALUES ('2026-01-01 00:00:59+00', 'q', 'work', 'ok', 1)"
    )
    conn.commit()
    a.run(fold())
    assert tallies(conn) == [("q", "work", "ok", 601, 3)]


def test_a_fold_passes_counters_that_are_being_folded_and_takes_a_bounded_page(
    conn: Connection, a: Holder, dsn: str
) -> None:
    conn.execute(
        "INSERT INTO pgqueue.tally (queue, name, outcome, n) SELECT 'q', 'n' || i % 50, 'ok', 1"
        " FROM generate_series(1, 30000) i"
    )
    conn.commit()
    with Holder(dsn, 2) as b:
        b.connection.execute("SET statement_timeout = '60s'")
        a.begin()
        a.run(fold())
        assert column(conn, "SELECT count(*) FROM pgqueue.tally_minute") == [0]
        b.begin()
        b.connection.execute("SET LOCAL lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            b.run(fold())  # its minutes are being written: it gives up instead of waiting, and loses nothing
        b.rollback()
        a.commit()
        assert column(conn, "SELECT count(*) FROM pgqueue.tally") == [10_000]
        b.run(fold())
    assert column(conn, "SELECT count(*) FROM pgqueue.tally") == [0]
    assert column(conn, "SELECT sum(n)::int FROM pgqueue.tally_minute") == [30_000]


def test_acknowledged_jobs_are_counted_with_their_wait(conn: Connection, a: Holder) -> None:
    enqueue(conn, 3)
    conn.execute("UPDATE pgqueue.job SET enqueued_at = now() - interval '10 s'")
    conn.commit()
    a.run(ack(a.claim()))
    a.run(fold())
    assert tallies(conn) == [("default", "work", "ok", 3, 1)]
    (wait,) = column(conn, "SELECT wait_s FROM pgqueue.tally_minute")
    assert isinstance(wait, float)
    assert 30 < wait < 300


def test_dedup_keys_go_when_they_are_free_and_not_before(conn: Connection, a: Holder) -> None:
    (living,) = enqueue(conn)
    conn.execute(
        "INSERT INTO pgqueue.dedup (queue, key, job_id, until) VALUES"
        " ('q', 'window open', 1, now() + interval '1 h'), ('q', 'window over', 1, now() - interval '1 s'),"
        " ('q', 'job lives', %s, NULL), ('q', 'job gone', 999999, NULL)",
        [living],
    )
    conn.commit()
    prune(a)
    assert column(conn, "SELECT key FROM pgqueue.dedup ORDER BY key") == ["job lives", "window open"]


def test_a_dedup_key_that_somebody_takes_over_is_left_to_him(conn: Connection, a: Holder) -> None:
    conn.execute(
        "INSERT INTO pgqueue.dedup (queue, key, job_id, until) VALUES ('q', 'k', 1, now() - interval '1 s')"
    )
    conn.commit()
    conn.execute("UPDATE pgqueue.dedup SET job_id = 2, until = now() + interval '1 h'")
    a.connection.execute("SET statement_timeout = '60s'")
    prune(a)
    conn.commit()
    assert column(conn, "SELECT job_id FROM pgqueue.dedup") == [2]


def test_ledger_rows_go_after_their_retention(conn: Connection, a: Holder) -> None:
    conn.execute(
        "INSERT INTO pgqueue.effect (name, key, job_id, lease, applied_at) VALUES"
        " ('n', 'old', 1, 1, now() - interval '8 days'), ('n', 'young', 1, 1, now() - interval '6 days'),"
        " ('n', 'running', 1, 1, NULL)"
    )
    conn.commit()
    prune(a)
    assert column(conn, "SELECT key FROM pgqueue.effect ORDER BY key") == ["running", "young"]


def test_signals_go_with_their_jobs(conn: Connection, a: Holder) -> None:
    (living,) = enqueue(conn)
    conn.execute(
        "INSERT INTO pgqueue.job_signal (job_id, sent_at) VALUES (%s, now() - interval '1 h'),"
        " (999998, now() - interval '1 h'), (999999, now())",
        [living],
    )
    conn.commit()
    prune(a)
    assert column(conn, "SELECT job_id FROM pgqueue.job_signal ORDER BY 1") == [living, 999_999]


def test_the_attempts_of_a_job_that_succeeded_go_and_those_of_a_living_one_stay(
    conn: Connection, a: Holder
) -> None:
    living, done = enqueue(conn, 2)
    conn.commit()
    jobs = a.claim()
    a.run(retry([Failed(claim=token(job), outcome=retried(0.0)) for job in jobs], "w"))
    conn.execute(
        "UPDATE pgqueue.job SET run_at = NULL, pos = nextval('pgqueue.pos_seq') WHERE id = %s", [done]
    )
    conn.commit()
    a.run(ack(a.claim()))
    prune(a)
    assert column(conn, "SELECT job_id FROM pgqueue.attempt_log") == [living]


def test_process_starts_that_vanished_go_after_a_day(conn: Connection, a: Holder) -> None:
    conn.execute(
        "INSERT INTO pgqueue.worker (nonce, host, pid, version, queues, names, concurrency, beat_at)"
        " VALUES (1, 'h', 1, '1', '{}', '{}', 1, now() - interval '25 h'),"
        " (2, 'h', 2, '1', '{}', '{}', 1, now() - interval '23 h')"
    )
    conn.commit()
    prune(a)
    assert column(conn, "SELECT nonce FROM pgqueue.worker") == [2]


@pytest.mark.parametrize(("table", "page"), [("dedup", 1000), ("attempt_log", 2000)])
def test_a_chore_deletes_a_bounded_batch(conn: Connection, a: Holder, table: str, page: int) -> None:
    insert = {
        "dedup": "(queue, key, job_id, until) SELECT 'q', i::text, i, now() - interval '1 s'",
        "attempt_log": "(job_id, attempt, outcome, lease) SELECT -i, 1, 'retry', 1",
    }[table]
    conn.execute(f"INSERT INTO pgqueue.{table} {insert} FROM generate_series(1, 2500) i".encode())
    conn.commit()
    prune(a)
    assert column(conn, f"SELECT count(*) FROM pgqueue.{table}") == [2500 - page]


def test_minute_counters_of_long_ago_go_and_later_ones_stay(conn: Connection, a: Holder) -> None:
    """tuist 11336: a table that nothing is ever deleted from is found when it is large."""
    conn.execute(
        "INSERT INTO pgqueue.tally_minute (minute, queue, name, outcome, n)"
        " SELECT date_trunc('minute', now()) - d * interval '1 day', 'q', 'work', 'ok', d"
        " FROM generate_series(1, 100) d"
    )
    conn.commit()
    prune(a)
    assert column(conn, "SELECT max(n)::int FROM pgqueue.tally_minute") == [89]
    assert column(conn, "SELECT count(*)::int FROM pgqueue.tally_minute") == [89]
