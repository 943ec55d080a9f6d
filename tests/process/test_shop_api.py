"""The example shop's services as processes: its API, and the warehouse that receives its events."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import httpx
import psycopg
import pytest
from standardwebhooks.webhooks import Webhook

from examples.shop import models
from examples.shop.jobs import app as shop
from pgqueue.connection import execute
from pgqueue.declare import declare
from pgqueue.pressure import limit
from pgqueue.testing import drain
from tests.server import Connection
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
SECRET = "whsec_bm90LWEtc2VjcmV0LW9ubHktYW4tZXhhbXBsZQ=="
GOOD = {"customer": "00042", "email": "ada@example.com", "items": 2, "dollars": "29.33"}
EVENT = json.dumps({"order_id": 7, "customer": "00042", "items": 2, "dollars": "29.33"})


@contextmanager
def service(dsn: str, log: Path, *command: str) -> Iterator[str]:
    """Run a service of the shop until the end of the block; yield the URL it says it listens on."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            stdout=out,
            stderr=out,
            env=os.environ | {"DATABASE_URL": dsn, "SHOP_WEBHOOK_SECRET": SECRET, "PYTHONUNBUFFERED": "1"},
        )

    def listening() -> str | None:
        assert process.poll() is None, log.read_text()
        found = re.search(r"(?:running|listening) on (http://[^\s/]+)", log.read_text())
        return found[1] if found else None

    try:
        yield eventually(listening, timeout=30)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


@pytest.fixture
def api(dsn: str, tmp_path: Path) -> Iterator[httpx.Client]:
    with (
        service(dsn, tmp_path / "api.log", "uvicorn", "examples.shop.api:api", "--port", "0") as url,
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        yield client


@pytest.fixture
def warehouse(dsn: str, tmp_path: Path) -> Iterator[httpx.Client]:
    command = ("examples.shop.receiver", "--port", "0", "--lose-every", "2")
    with (
        service(dsn, tmp_path / "warehouse.log", *command) as url,
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        yield client


def counts(conn: Connection) -> tuple[object, ...]:
    """Return how many orders, jobs and events are there."""
    conn.rollback()
    row = conn.execute(
        "SELECT (SELECT count(*) FROM shop.orders), (SELECT count(*) FROM pgqueue.job),"
        " (SELECT count(*) FROM pgqueue.outbox)"
    ).fetchone()
    assert row is not None
    return row


def deliver(
    client: httpx.Client, body: str = EVENT, *, key: str = "outbox:1", secret: str = SECRET
) -> httpx.Response:
    """Send an event as a relay does."""
    now = datetime.now(UTC)
    headers = {
        "ce-source": "/outbox/shop",
        "webhook-id": key,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign(key, now, body),
    }
    return client.post("/events", content=body, headers=headers)


def test_an_order_answers_201_with_its_job_and_its_event_committed(
    api: httpx.Client, conn: Connection
) -> None:
    answer = api.post("/orders", json=GOOD)
    assert answer.status_code == 201
    id_ = answer.json()["id"]
    assert answer.headers["location"] == f"/orders/{id_}"
    assert counts(conn) == (1, 2, 1)
    jobs = conn.execute("SELECT name, queue, key, payload::text FROM pgqueue.job ORDER BY id").fetchall()
    assert [row[:3] for row in jobs] == [
        ("send-receipt", "mail", "00042"),
        ("refresh-recommendations", "recommendations", None),
    ]
    assert f'"order_id":{id_}' in str(jobs[0][3])
    assert api.post("/orders", json=GOOD).status_code == 201
    assert counts(conn) == (2, 3, 2)  # the refresh that waits is enough for both
    event = conn.execute(
        "SELECT event_type, aggregate_id, payload->>'order_id' FROM pgqueue.outbox"
    ).fetchone()
    assert event == ("order.placed", "00042", str(id_))


def test_an_order_whose_event_cannot_be_written_leaves_neither_order_nor_job(
    api: httpx.Client, conn: Connection
) -> None:
    conn.execute("ALTER TABLE pgqueue.outbox ADD CHECK (event_type <> 'order.placed')")
    conn.commit()
    assert api.post("/orders", json=GOOD).status_code == 500
    assert counts(conn) == (0, 0, 0)


def fill(conn: Connection, queue: str) -> None:
    """Let a queue be over its limit, by what a worker would have sampled."""
    execute(conn, declare(kind.policy for kind in shop.types.values()))
    execute(conn, limit(queue, max_depth=100))
    conn.execute(
        "INSERT INTO pgqueue.depth_sample (queue, at, ready, delayed, in_flight, blocked, oldest_ready_s, capped)"
        " VALUES (%s, now(), 200, 0, 0, 0, 24.2, false)",
        [queue],
    )
    conn.commit()


def test_while_too_many_receipts_wait_an_order_is_refused_with_a_time_to_try_again(
    api: httpx.Client, conn: Connection
) -> None:
    fill(conn, "mail")
    answer = api.post("/orders", json=GOOD)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "13"  # half of the queue has to go, in half of its age
    assert "13 s" in answer.json()["error"]
    assert counts(conn) == (0, 0, 0)
    conn.execute("DELETE FROM pgqueue.depth_sample")
    conn.commit()
    assert api.post("/orders", json=GOOD).status_code == 201


def test_a_refresh_of_recommendations_is_dropped_and_counted_where_an_order_is_not(
    api: httpx.Client, conn: Connection
) -> None:
    fill(conn, "recommendations")
    for _ in range(3):
        assert api.post("/orders", json=GOOD).status_code == 201
    assert counts(conn) == (3, 3, 3)
    assert conn.execute("SELECT DISTINCT name FROM pgqueue.job").fetchall() == [("send-receipt",)]
    shed = conn.execute("SELECT name, sum(n) FROM pgqueue.tally WHERE outcome = 'shed' GROUP BY 1").fetchall()
    assert shed == [("refresh-recommendations", 3)]


def test_a_refresh_sums_up_what_the_customer_has_bought(
    api: httpx.Client, conn: Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", dsn)
    models.engine.cache_clear()
    for _ in range(2):
        assert api.post("/orders", json=GOOD).status_code == 201
        drain(shop, dsn)
    conn.rollback()
    row = conn.execute("SELECT customer, orders, dollars FROM shop.recommendations").fetchall()
    models.engine().dispose()
    models.engine.cache_clear()
    assert row == [("00042", 2, Decimal("58.66"))]


BAD = [
    (b"", 400),
    (b"{", 400),
    (b"\xff\xfe", 400),
    (b"[]", 422),
    (b"{}", 422),
    (json.dumps(GOOD | {"items": 0}).encode(), 422),
    (json.dumps(GOOD | {"items": "two"}).encode(), 422),
    (json.dumps(GOOD | {"dollars": "-1"}).encode(), 422),
    (json.dumps(GOOD | {"dollars": "NaN"}).encode(), 422),
    (json.dumps(GOOD | {"dollars": "0.001"}).encode(), 422),
    (json.dumps(GOOD | {"dollars": "1e400"}).encode(), 422),
    (json.dumps(GOOD | {"customer": ""}).encode(), 422),
    (json.dumps(GOOD | {"customer": "a\0"}).encode(), 422),
    (json.dumps(GOOD | {"email": "nobody"}).encode(), 422),
    (json.dumps(GOOD | {"coupon": "X"}).encode(), 422),
    (json.dumps(GOOD | {"customer": "x" * 20_000}).encode(), 413),
]


def test_bad_input_is_the_buyers_fault_and_writes_nothing(api: httpx.Client, conn: Connection) -> None:
    for body, status in BAD:
        answer = api.post("/orders", content=body)
        assert answer.status_code == status, (body, answer.text)
        assert answer.json()["error"]
    assert counts(conn) == (0, 0, 0)


def test_the_depth_is_read_from_the_sample(api: httpx.Client, conn: Connection) -> None:
    assert api.get("/depth").json() == []
    conn.execute(
        "INSERT INTO pgqueue.depth_sample (queue, at, ready, delayed, in_flight, blocked, oldest_ready_s, capped)"
        " VALUES ('mail', now(), 3, 2, 1, 0, 4.5, false)"
    )
    conn.commit()
    (mail,) = api.get("/depth").json()
    assert (mail["queue"], mail["ready"], mail["delayed"], mail["in_flight"]) == ("mail", 3, 2, 1)


def test_the_warehouse_packs_one_parcel_however_often_an_event_comes(
    warehouse: httpx.Client, dsn: str
) -> None:
    assert deliver(warehouse).status_code == 204
    with pytest.raises(httpx.RemoteProtocolError):
        deliver(warehouse, EVENT.replace("7", "8"), key="outbox:2")  # packed, and its reply lost
    assert deliver(warehouse, EVENT.replace("7", "8"), key="outbox:2").status_code == 204
    assert deliver(warehouse).status_code == 204
    with psycopg.connect(dsn) as conn:
        parcels = conn.execute("SELECT order_id, reply_lost FROM shop.parcels ORDER BY id").fetchall()
        repeats = conn.execute("SELECT what, order_id FROM shop.repeats ORDER BY id").fetchall()
    assert parcels == [(7, False), (8, True)]
    assert repeats == [("event", 8), ("event", 7)]


def test_the_warehouse_takes_nothing_that_the_shop_did_not_sign(warehouse: httpx.Client, dsn: str) -> None:
    assert deliver(warehouse, secret="whsec_c29tZWJvZHkgZWxzZSdzIHNlY3JldA==").status_code == 401
    assert warehouse.post("/events", content=EVENT).status_code == 401
    assert deliver(warehouse, '{"order_id": "x"}').status_code == 422
    with psycopg.connect(dsn) as conn:
        assert conn.execute("SELECT count(*) FROM shop.parcels").fetchone() == (0,)
