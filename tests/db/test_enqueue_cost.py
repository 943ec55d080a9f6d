from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.orm import Session

from pgqueue import App
from tests.server import Connection

app = App()


@dataclass
class Receipt:
    order_id: int


@app.job("send-receipt")
def send_receipt(receipt: Receipt) -> None: ...


def answers(conn: Connection, act: Any) -> int:
    """Count how often the server became ready again while `act` ran: the round trips."""
    with tempfile.TemporaryFile("w+b") as trace:
        conn.pgconn.trace(trace.fileno())
        act()
        conn.pgconn.untrace()
        trace.seek(0)
        return trace.read().count(b"ReadyForQuery")


@pytest.mark.parametrize(
    "options", [{}, {"dedup_key": "k"}, {"key": "k", "priority": 1, "run_after": 5, "headers": {"a": 1}}]
)
def test_an_enqueue_is_one_round_trip(options: dict[str, Any], conn: Connection) -> None:
    conn.execute("SELECT 1")
    job = send_receipt.using(**options)
    assert answers(conn, lambda: job.enqueue(conn, Receipt(1))) == 1


def test_many_are_one_round_trip_too(conn: Connection) -> None:
    conn.execute("SELECT 1")
    assert answers(conn, lambda: send_receipt.enqueue_many(conn, map(Receipt, range(1_000)))) == 1


def test_a_name_declared_elsewhere_is_looked_up_once(conn: Connection) -> None:
    conn.execute("INSERT INTO pgqueue.job_type (name) VALUES ('pdf')")
    producer = App()
    assert answers(conn, lambda: producer.enqueue(conn, "pdf")) == 2
    assert answers(conn, lambda: producer.enqueue(conn, "pdf")) == 1


def test_a_session_sends_one_statement_and_sees_it_in_its_events(session: Session) -> None:
    sent: list[str] = []
    session.execute(sqlalchemy.text("SELECT 1"))
    sqlalchemy.event.listen(session.connection(), "before_cursor_execute", lambda *call: sent.append(call[2]))
    send_receipt.enqueue_many(session, [Receipt(1), Receipt(2)])
    assert len(sent) == 1
    assert "pgqueue.enqueue_many" in sent[0]


def test_the_table_has_no_row_trigger_work_for_a_complete_row(conn: Connection) -> None:
    plan = conn.execute(
        "EXPLAIN (ANALYZE, COSTS off, TIMING off, SUMMARY off)"
        " INSERT INTO pgqueue.job (name, queue, priority)"
        " SELECT 'ship', 'default', 5 FROM generate_series(1, 10)"
    ).fetchall()
    assert not [line for (line,) in plan if "job_fill" in str(line)]
