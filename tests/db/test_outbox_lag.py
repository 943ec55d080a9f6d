"""The view outbox_lag is sampled by every relay: what it reads must not grow with what is published and kept."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server import Connection


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", ()) for node in nodes(child))]


@pytest.fixture
def published(conn: Connection) -> Connection:
    """Give an outbox of 20,000 published events, 3 that wait, one of them blocked, and 2 parked."""
    conn.execute(
        "INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload, published_at)"
        " SELECT n::text, 'order.placed', '{}', now() FROM generate_series(1, 20000) n"
    )
    conn.execute(
        "INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload, created_at, next_attempt_at, last_error,"
        " parked_at)"
        " VALUES ('a', 'x', '{}', now() - interval '90 s', NULL, NULL, NULL),"
        " ('b', 'x', '{}', now(), NULL, NULL, NULL),"
        " ('c', 'x', '{}', now(), now() + interval '1 h', 'no', NULL), ('d', 'x', '{}', now(), NULL, 'no', now()),"
        " ('e', 'x', '{}', now() - interval '1 d', 'infinity', 'no', now())"
    )
    conn.commit()
    conn.execute("ANALYZE pgqueue.outbox")
    conn.commit()
    return conn


def test_the_lag_counts_what_waits_and_what_is_parked(published: Connection) -> None:
    row = published.execute(
        "SELECT pending, parked, blocked_aggregates, relays, orphan_partitions,"
        " oldest_pending_s - (SELECT extract(epoch FROM now() - o.created_at) FROM pgqueue.outbox o"
        " WHERE o.aggregate_id = 'a') FROM pgqueue.outbox_lag"
    ).fetchone()
    assert row == (3, 2, 2, 0, 64, pytest.approx(0, abs=0.001))


def test_an_outbox_without_a_waiting_event_has_no_age(conn: Connection) -> None:
    lag = "SELECT pending, oldest_pending_s FROM pgqueue.outbox_lag"
    assert conn.execute(lag).fetchone() == (0, 0.0)
    conn.execute(
        "INSERT INTO pgqueue.outbox (event_type, payload, created_at, last_error, parked_at)"
        " VALUES ('x', '{}', now() - interval '1 d', 'no', now())"
    )
    assert conn.execute(lag).fetchone() == (0, 0.0)


def test_the_lag_reads_no_published_event(published: Connection) -> None:
    row = published.execute("EXPLAIN (FORMAT JSON) SELECT * FROM pgqueue.outbox_lag").fetchone()
    assert row is not None
    plan: Any = row[0]
    outbox = [node for node in nodes(plan[0]["Plan"]) if node.get("Relation Name") == "outbox"]
    assert outbox
    assert not [node for node in outbox if node["Node Type"] == "Seq Scan"], outbox


@pytest.mark.parametrize("at", ["-infinity", "infinity", "0044-03-15 BC"])
def test_a_time_that_no_clock_shows_does_not_break_the_lag(conn: Connection, at: str) -> None:
    conn.execute(
        "INSERT INTO pgqueue.outbox (event_type, payload, created_at) VALUES ('x', '{}', %s::text::timestamptz)",
        [at],
    )
    row = conn.execute("SELECT pending, oldest_pending_s >= 0 FROM pgqueue.outbox_lag").fetchone()
    assert row == (1, True)
