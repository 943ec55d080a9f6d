"""Dead letters are found by what they are, quickly, also among very many."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from pgqueue import dead
from pgqueue.connection import execute
from pgqueue.dead import Filter
from pgqueue.statement import Query, Statement, table
from tests.factories import explain, nodes, wipe
from tests.server import Connection, Server

LETTER = """
INSERT INTO pgqueue.dead_job
  (id, queue, name, priority, attempt, lost, payload, enqueued_at, reason, error_type, error, died_at)
SELECT %(id)s::bigint, %(queue)s::text, %(name)s::text, 5, 1, 0, %(payload)s::json, now(), %(reason)s::text,
  %(error_type)s::text, %(error)s::text, now() - %(ago)s::interval
"""
MANY = """
INSERT INTO pgqueue.dead_job
  (id, queue, name, priority, attempt, lost, payload, enqueued_at, reason, error_type, error, traceback, died_at)
SELECT g, 'q' || g %% 3, 'job-' || g %% 5, 5, 1, 0, '{"order": {"id": 1}}', now(), 'exhausted',
  'shop.Error' || g %% 12, 'order ' || g, repeat('  File "shop.py", line 1', 20), now() - g * interval '1 s'
FROM generate_series(1, %s) g
"""
HOSTILE = ["a'b", 'a"b', "a$$b", "a.b", "a\\b", "a\nb", "a%sb", "a%(x)sb", "a;b--", "😀"]


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


@pytest.fixture(scope="module")
def many(server: Server) -> Iterator[str]:
    """Give a database with 100,000 dead letters of 12 error types."""
    name = server.migrated()
    with psycopg.connect(server.dsn(name), autocommit=True) as connection:
        connection.execute(MANY, [100_000])
        connection.execute("ANALYZE pgqueue.dead_job")
    yield server.dsn(name)
    server.drop(name)


def letter(conn: Connection, job_id: int, **given: Any) -> int:
    """Write a dead letter."""
    usual = {
        "queue": "mail", "name": "send", "payload": "{}", "reason": "exhausted", "error_type": "KeyError",
        "error": "'x'", "ago": timedelta(0),
    }  # fmt: skip
    conn.execute(LETTER, usual | {"id": job_id} | given)
    return job_id


def found(conn: Connection, **given: Any) -> list[int]:
    """Return the ids that a filter finds, in order."""
    which = Filter(**given)
    letters = execute(conn, dead.letters(which))
    assert execute(conn, dead.tell(which)).jobs == len(letters)
    assert sum(g.jobs for g in execute(conn, dead.groups(which))) == len(letters)
    return sorted(d.id for d in letters)


def test_groups_tell_count_times_places_and_a_sample(conn: Connection) -> None:
    letter(conn, 1, ago=timedelta(hours=3))
    letter(conn, 2, queue="bulk", name="pdf", ago=timedelta(hours=1), error="'y'")
    letter(conn, 3, error_type="Timeout", reason="timeout", ago=timedelta(hours=2))
    letter(conn, 4, error_type=None, error=None, reason="worker lost", ago=timedelta(hours=9))
    first, second, third = execute(conn, dead.groups())
    assert (first.error_type, first.jobs, first.queues, first.names) == (
        *("KeyError", 2),
        *(("bulk", "mail"), ("pdf", "send")),
    )
    assert (first.sample, first.error, first.reasons) == (2, "'y'", ("exhausted",))
    assert first.last_seen - first.first_seen == timedelta(hours=2)
    assert (second.error_type, second.sample) == ("Timeout", 3)
    assert (third.error_type, third.error) == (None, None)
    assert [g.error_type for g in execute(conn, dead.groups(n=1))] == ["KeyError"]


def test_a_filter_finds_by_each_property(conn: Connection) -> None:
    letter(conn, 1, ago=timedelta(hours=3))
    letter(conn, 2, queue="bulk", name="pdf", ago=timedelta(hours=1))
    letter(conn, 3, error_type="Timeout", reason="timeout", ago=timedelta(hours=2))
    now = datetime.now(UTC)
    assert found(conn) == [1, 2, 3]
    assert found(conn, ids=[1, 3, 9]) == [1, 3]
    assert found(conn, error_type="KeyError") == [1, 2]
    assert found(conn, reason="timeout") == [3]
    assert found(conn, queue="bulk") == [2]
    assert found(conn, name="send", error_type="KeyError") == [1]
    assert found(conn, since=timedelta(hours=2, minutes=30)) == [2, 3]
    assert found(conn, until=timedelta(hours=2, minutes=30)) == [1]
    assert found(conn, since=now - timedelta(hours=2, minutes=30), until=now - timedelta(hours=1.5)) == [3]
    assert found(conn, ids=[]) == []


def test_a_filter_looks_into_the_payload(conn: Connection) -> None:
    letter(conn, 1, payload='{"order": {"id": 17, "paid": true}, "mail": "a@b"}')
    letter(conn, 2, payload='{"order": {"id": "17"}, "mail": null}')
    letter(conn, 3, payload="[1, 2]")
    letter(conn, 4, payload='"17"')
    assert found(conn, matching={"order.id": "17"}) == [1, 2]
    assert found(conn, matching={"order.id": "17", "mail": "a@b"}) == [1]
    assert found(conn, matching={"order.paid": "true"}) == [1]
    assert found(conn, matching={"mail": ""}) == []
    assert found(conn, matching={"1": "2"}) == [3]
    assert found(conn, matching={"nowhere": "17"}) == []


@pytest.mark.parametrize("payload", [r'{"order": "a\u0000"}', r'{"order": "\ud800"}'])
def test_a_payload_that_postgres_cannot_read_spoils_no_search(conn: Connection, payload: str) -> None:
    """kestra 10653, dashjoin 488: one NUL, and nothing could be read or written."""
    letter(conn, 1, payload=payload)
    letter(conn, 2, payload='{"order": "a"}')
    assert found(conn, matching={"order": "a"}) == [2]
    shown = execute(conn, dead.show(1))
    assert shown is not None
    assert shown.payload == payload
    assert execute(conn, dead.discard(Filter(ids=[1]))).ids == (1,)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_only_ever_a_value(conn: Connection, name: str) -> None:
    """pg-boss 859, pgmq 295: names reached SQL."""
    letter(conn, 1, queue=name, name=name, error_type=name, error=name)
    letter(conn, 2)
    assert found(conn, queue=name, name=name, error_type=name) == [1]
    (group,) = execute(conn, dead.groups(Filter(queue=name)))
    assert (group.error_type, group.queues) == (name, (name,))


def test_show_tells_everything(conn: Connection) -> None:
    letter(conn, 5, payload='{"n": 1.50}')
    conn.execute("UPDATE pgqueue.dead_job SET headers = '{\"a\": 1}', expires_at = 'infinity', key = 'k'")
    shown = execute(conn, dead.show(5))
    assert shown is not None
    assert (shown.payload, shown.headers, shown.key, shown.expires_at) == ('{"n": 1.50}', {"a": 1}, "k", None)
    assert shown.history == ()
    assert execute(conn, dead.show(6)) is None


def test_the_rate_counts_the_last_ten_minutes_only(conn: Connection) -> None:
    letter(conn, 1, ago=timedelta(minutes=11))
    letter(conn, 2, ago=timedelta(minutes=9))
    letter(conn, 3)
    letter(conn, 4, queue="bulk")
    assert execute(conn, dead.rate()) == [("mail", "KeyError", 2), ("bulk", "KeyError", 1)]


def test_a_hundred_thousand_letters_are_read_once_and_never_sorted(many: str) -> None:
    """procrastinate 1242, que 240: looking got slow with what had piled up."""
    with psycopg.connect(many) as conn:
        assert len(execute(conn, dead.groups())) == 12
        plan = explain(conn, dead.groups())
        scans = [n for n in nodes(plan) if n.get("Relation Name") == "dead_job" and n["Actual Rows"] > 1_000]
        assert len(scans) == 1
        assert not [n for n in nodes(plan) if n["Node Type"] == "Sort" and n["Actual Rows"] > 1_000]
        assert not [n for n in nodes(plan) if n.get("Temp Written Blocks") or n.get("Disk Usage")]


def test_the_view_of_errors_reads_a_hundred_thousand_letters_once_and_sorts_none(many: str) -> None:
    with psycopg.connect(many) as conn:
        found = conn.execute("SELECT jobs, queues, names FROM pgqueue.dead_by_error").fetchall()
        assert sum(row[0] for row in found) == 100_000
        plan = explain(conn, Statement(Query("view", "SELECT * FROM pgqueue.dead_by_error", ()), {}, table))
        assert not [n for n in nodes(plan) if n["Node Type"] == "Sort" and n["Actual Rows"] > 1_000]
        assert not [n for n in nodes(plan) if n.get("Temp Written Blocks") or n.get("Disk Usage")]


def test_the_newest_letters_and_the_next_batch_are_found_by_an_index(many: str) -> None:
    with psycopg.connect(many) as conn:
        for statement in (
            dead.letters(),
            dead.letters(Filter(error_type="shop.Error3")),
            dead.rate(),
            dead.discard(Filter(error_type="shop.Error3"), n=10),
            dead.replay(Filter(queue="q1"), n=10, after=50_000),
            dead.show(17),
        ):
            plan = explain(conn, statement)
            assert not [
                n
                for n in nodes(plan)
                if n["Node Type"] == "Seq Scan" and n.get("Relation Name") == "dead_job"
            ]
            assert max(n["Actual Rows"] * n["Actual Loops"] for n in nodes(plan)) < 1_000
            conn.rollback()
