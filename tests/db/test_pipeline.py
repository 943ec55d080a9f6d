"""Several statements in one round trip: each has its answer, an error undoes the block, the connection survives."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from pgqueue.pipeline import Pipeline
from pgqueue.statement import Query, Statement, column, scalar, table
from tests.server import Server

Connection = psycopg.Connection[Any]
BIG = 3_000_000


@pytest.fixture(scope="module")
def dsn(server: Server) -> Iterator[str]:
    name = server.migrated()
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def line(dsn: str) -> Iterator[Connection]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


def ask(text: str, *, name: str = "asked", **params: object) -> Statement[Any]:
    return Statement(Query(name, text, tuple(params)), params, scalar)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("text", "plain"),
        ("text", "ünïcode \u2603 \" ' \\ { } , NULL"),
        ("text", ""),
        ("text", None),
        ("int", -7),
        ("bigint", 2**63 - 1),
        ("boolean", True),
        ("boolean", False),
        ("float8", 1e-7),
        ("float8", float("inf")),
        ("float8", -0.1),
        ("interval", timedelta(seconds=0.25)),
        ("interval", timedelta(days=-1, microseconds=1)),
        ("interval", timedelta(days=400, hours=23, microseconds=999_999)),
        ("timestamptz", datetime(2026, 11, 29, 12, 30, 1, 5, tzinfo=UTC)),
        ("text[]", []),
        ("text[]", ["a", "", None, 'say "no"', "back\\slash", "{1,2}", "NULL", "a,b", " c "]),
        ("bigint[]", [1, -2, 2**62]),
        ("bigint[]", [1, None]),
        ("float8[]", [0.5, float("inf"), 1e300]),
        ("boolean[]", [True, False]),
        ("bytea", b"\x00\xff"),
        ("timestamptz[]", [datetime(2026, 1, 1, tzinfo=UTC)]),
    ],
)
def test_a_parameter_arrives_as_psycopg_would_send_it(line: Connection, kind: str, value: object) -> None:
    with Pipeline(line) as p:
        sent = p.send(ask(f"SELECT %(v)s::{kind}", v=value))
    row = line.execute(f"SELECT %s::{kind}".encode(), [value]).fetchone()
    assert row
    assert sent.result() == row[0] == value


def test_text_with_a_null_character_is_refused_before_it_is_sent(line: Connection) -> None:
    """libpq takes text up to the first NUL: half the value would be written, and nobody told."""
    with pytest.raises(psycopg.DataError, match="NUL"), Pipeline(line) as p:
        p.send(ask("SELECT %(v)s::text", v="a\0b"))
    assert line.execute("SELECT 1").fetchone() == (1,)


def test_each_statement_has_its_own_answer_and_its_own_count(line: Connection) -> None:
    with Pipeline(line) as p:
        one = p.send(ask("SELECT 1"))
        many = p.send(Statement(Query("many", "SELECT * FROM generate_series(1, 3)", ()), {}, column))
        none = p.send(Statement(Query("none", "SELECT 1 WHERE false", ()), {}, table))
        wrote = p.send(ask("UPDATE pgqueue.queue SET paused = paused WHERE name = %(v)s", v="nobody"))
    assert (one.result(), many.result(), none.result(), wrote.result()) == (1, [1, 2, 3], [], None)
    assert (one.count, many.count, none.count, wrote.count) == (1, 3, 0, 0)
    assert many.result() == [1, 2, 3]  # an answer can be read again


def test_a_statement_is_prepared_once_whatever_it_is_sent_with(line: Connection) -> None:
    for value in (1, None, 2):
        with Pipeline(line) as p:
            p.send(ask("SELECT %(v)s::int", v=value))
            p.send(ask("SELECT %(v)s::int", v=value))
    row = line.execute("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'SELECT $1::int%'")
    assert row.fetchone() == (1,)


def test_an_error_undoes_its_transaction_and_what_follows_is_not_done(line: Connection) -> None:
    line.execute("CREATE TEMPORARY TABLE t (n int)")

    def fail() -> None:
        with Pipeline(line) as p:
            p.begin()
            p.send(ask("INSERT INTO t VALUES (%(v)s::int)", v=1))
            p.send(ask("SELECT 1 / %(v)s::int", v=0))
            p.send(ask("INSERT INTO t VALUES (%(v)s::int + 1)", v=2))
            p.commit()

    for _ in range(2):  # what was not prepared the first time is prepared the second
        with pytest.raises(psycopg.errors.DivisionByZero):
            fail()
        assert line.info.transaction_status == TransactionStatus.IDLE
    with Pipeline(line) as p:
        p.send(ask("INSERT INTO t VALUES (%(v)s::int + 1)", v=2))
    assert line.execute("SELECT n FROM t").fetchall() == [(3,)]


def test_a_statement_that_cannot_be_prepared_says_so_each_time(line: Connection) -> None:
    for _ in range(2):
        with pytest.raises(psycopg.errors.UndefinedTable), Pipeline(line) as p:
            p.send(ask("SELECT * FROM nowhere"))
    assert line.execute("SELECT 1").fetchone() == (1,)


def test_an_error_of_the_caller_is_not_hidden_by_one_of_the_database(line: Connection) -> None:
    def fail() -> None:
        with Pipeline(line) as p:
            p.send(ask("SELECT 1 / %(v)s::int", v=0))
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fail()
    assert line.execute("SELECT 1").fetchone() == (1,)


def test_an_error_of_the_caller_undoes_the_transaction_it_was_in(line: Connection) -> None:
    """The next block would have gone on with it, and committed it."""

    def fail() -> None:
        with Pipeline(line) as p:
            p.begin()
            p.send(ask("SELECT pg_advisory_xact_lock(4711)::text"))
            p.send(ask("SELECT %(v)s::text", v="nul \0"))
            p.commit()

    with pytest.raises(psycopg.DataError):
        fail()
    assert line.info.transaction_status == TransactionStatus.IDLE
    assert line.execute("SELECT count(*) FROM pg_locks WHERE objid = 4711").fetchone() == (0,)


def test_large_statements_and_large_answers_do_not_wait_for_each_other(line: Connection) -> None:
    """A client that only writes, and a server that waits for it to read, stand still for ever."""
    line.execute("SET statement_timeout = '60s'")
    with Pipeline(line) as p:
        answers = [
            p.send(ask("SELECT %(v)s::text || repeat('y', %(n)s::int)", v="x" * BIG, n=BIG)) for _ in range(6)
        ]
        p.flush()
    assert [len(answer.result()) for answer in answers] == [2 * BIG] * 6


def test_a_connection_that_is_lost_is_an_operational_error_and_closed(dsn: str, line: Connection) -> None:
    def fail() -> None:
        with psycopg.connect(dsn, autocommit=True) as other, Pipeline(line) as p:
            p.begin()
            p.send(ask("SELECT 1"))
            p.flush()
            other.execute("SELECT pg_terminate_backend(%s, 60000)", [line.info.backend_pid])
            p.commit()

    with pytest.raises(psycopg.OperationalError):
        fail()
    assert line.closed
    with pytest.raises(psycopg.OperationalError), Pipeline(line):
        pass


def test_a_notification_that_comes_with_an_answer_is_kept(dsn: str, line: Connection) -> None:
    line.execute("LISTEN news")
    with psycopg.connect(dsn, autocommit=True) as other, Pipeline(line) as p:
        other.execute("NOTIFY news, 'here'")
        p.send(ask("SELECT 1"))
    note = line.pgconn.notifies()
    assert note
    assert note.extra == b"here"


def test_an_encoding_of_the_client_is_respected(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True, client_encoding="latin1") as line:
        with Pipeline(line) as p:
            sent = p.send(ask("SELECT %(v)s::text || '\u00fc'", v="\u00e9"))
        assert sent.result() == "\u00e9\u00fc"
