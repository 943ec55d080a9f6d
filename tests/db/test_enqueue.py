from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest

from pgqueue import App, Backoff, BadPayload, JobRef, UnknownJob
from pgqueue.connection import execute
from pgqueue.declare import declare
from tests.db.forms import KINDS, Form, opened
from tests.server import Connection, Server

WHEN = datetime(2033, 5, 18, 3, 33, 20, 123456, tzinfo=UTC)
NASTY = "a\"b'; DROP TABLE pgqueue.job; --$$ $1 %s %(x)s :y .\\n\n\t🦆"


@dataclass
class Receipt:
    order_id: int
    note: str | None = None


app = App()


@app.job("send-receipt", queue="mail", priority=2, max_attempts=7, timeout=30, backoff=Backoff(cap=9))
def send_receipt(receipt: Receipt) -> None: ...


@app.job("tidy")
def tidy() -> None: ...


@app.job(NASTY[:60], queue=NASTY)
def nasty(payload: Any) -> None: ...


@pytest.fixture(scope="module")
def shop(server: Server) -> Iterator[str]:
    """Give the DSN of one database for the whole module, where the job types are declared."""
    name = server.migrated()
    with psycopg.connect(server.dsn(name)) as conn:
        execute(conn, declare([kind.policy for kind in app.types.values()]))
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def declared(shop: str) -> Iterator[Connection]:
    """Give a connection to that database without jobs in it."""
    with psycopg.connect(shop) as conn:
        conn.execute("SET search_path = ''")
        conn.execute("TRUNCATE pgqueue.job, pgqueue.dedup")
        conn.commit()
        yield conn
        conn.rollback()


@pytest.fixture(params=KINDS)
def form(request: pytest.FixtureRequest, declared: Connection, shop: str) -> Iterator[Form]:
    """Give each kind of handle in turn."""
    with opened(request.param, shop) as made:
        yield made


ROWS = """
SELECT row_to_json(r)::text FROM (
  SELECT j.queue, j.name, j.priority, j.key, j.dedup_key, j.idempotency_key, j.max_attempts,
    j.timeout_s::text, j.backoff::text, j.headers::text, j.payload::text,
    j.expires_at, j.ready_at, j.attempt, j.lost, j.lease,
    j.deadline::text, j.claimed_at::text, j.pos IS NOT NULL AS has_pos, j.enqueued_at <= now() AS enqueued,
    CASE WHEN j.run_at - clock_timestamp() BETWEEN interval '50 s' AND interval '60 s' THEN 'in 60 s'
         ELSE j.run_at::text END AS due,
    (SELECT json_build_object('queue', d.queue, 'key', d.key, 'mine', d.job_id = j.id,
       'live', d.until IS NULL, 'seconds', round(extract(epoch FROM d.until - j.enqueued_at) / 100))
     FROM pgqueue.dedup d WHERE d.queue = j.queue AND d.key = j.dedup_key) AS dedup
  FROM pgqueue.job j ORDER BY j.id) r
"""


def taken(conn: Connection) -> list[dict[str, Any]]:
    """Return the rows without what may differ, and clear the tables."""
    rows = [json.loads(str(row[0])) for row in conn.execute(ROWS)]
    conn.execute("DELETE FROM pgqueue.job")
    conn.execute("DELETE FROM pgqueue.dedup")
    conn.commit()
    return rows


# option -> (Python's value, the SQL function's arguments, a plain INSERT's columns, None where it has none)
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "none": ({}, {}, {}),
    "queue": ({"queue": NASTY}, {"queue": NASTY}, {"queue": NASTY}),
    "priority": ({"priority": 9}, {"priority": 9}, {"priority": 9}),
    "key": ({"key": NASTY}, {"key": NASTY}, {"key": NASTY}),
    "run_after delay": (
        {"run_after": 60},
        {"delay": timedelta(seconds=60)},
        None,
    ),
    "run_after timedelta": ({"run_after": timedelta(minutes=1)}, {"delay": timedelta(minutes=1)}, None),
    "run_after time": ({"run_after": WHEN}, {"run_at": WHEN}, {"run_at": WHEN}),
    "run_after past": (
        {"run_after": WHEN - timedelta(days=36_500)},
        {"run_at": WHEN - timedelta(days=36_500)},
        None,
    ),
    "run_after zero": ({"run_after": 0}, {"delay": timedelta()}, {}),
    "dedup_key": ({"dedup_key": NASTY}, {"dedup_key": NASTY}, None),
    "dedup_window": (
        {"dedup_key": "k", "dedup_window": timedelta(hours=7)},
        {"dedup_key": "k", "dedup_window": timedelta(hours=7)},
        None,
    ),
    "dedup_window live": (
        {"dedup_key": "k", "dedup_window": "live"},
        {"dedup_key": "k", "dedup_live": True},
        None,
    ),
    "idempotency_key": (
        {"idempotency_key": NASTY},
        {"idempotency_key": NASTY},
        {"idempotency_key": NASTY},
    ),
    "max_attempts": ({"max_attempts": 1}, {"max_attempts": 1}, {"max_attempts": 1}),
    "timeout": ({"timeout": timedelta(seconds=1.5)}, {"timeout_s": 1.5}, {"timeout_s": 1.5}),
    "no timeout": ({"timeout": math.inf}, {"timeout_s": math.inf}, {"timeout_s": math.inf}),
    "backoff": (
        {"backoff": Backoff(base=2.0, cap=60.0, jitter="equal")},
        {"backoff": '{"base": 2.0, "cap": 60.0, "jitter": "equal"}'},
        {"backoff": '{"base": 2.0, "cap": 60.0, "jitter": "equal"}'},
    ),
    "expires_at": ({"expires_at": WHEN}, {"expires_at": WHEN}, {"expires_at": WHEN}),
    "headers": (
        {"headers": {"traceparent": "00-é", "n": [1, None]}},
        {"headers": '{"traceparent":"00-é","n":[1,null]}'},
        {"headers": '{"traceparent":"00-é","n":[1,null]}'},
    ),
}
OPTIONS["all"] = (
    {k: v for name in OPTIONS for k, v in OPTIONS[name][0].items()} | {"run_after": WHEN},
    {k: v for name in OPTIONS for k, v in OPTIONS[name][1].items() if k != "delay"} | {"run_at": WHEN},
    None,
)


def by_sql(conn: Connection, name: str, payload: str, arguments: dict[str, Any]) -> int:
    """Call the SQL function as a producer of another language would."""
    kinds = {
        "headers": "json",
        "backoff": "json",
        "priority": "int",
        "max_attempts": "int",
        "timeout_s": "real",
    }
    kinds |= {
        "delay": "interval",
        "dedup_window": "interval",
        "dedup_live": "boolean",
        "run_at": "timestamptz",
    }
    kinds["expires_at"] = "timestamptz"
    more = "".join(f", {k} => %({k})s::{kinds.get(k, 'text')}" for k in arguments)
    row = conn.execute(
        f"SELECT pgqueue.enqueue(%(job)s, %(payload)s::json{more})",
        {"job": name, "payload": payload} | arguments,
    ).fetchone()
    assert row is not None
    return int(str(row[0]))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_way_to_enqueue_writes_the_same_row(option: str, declared: Connection, shop: str) -> None:
    python, function, columns = OPTIONS[option]
    prepared = send_receipt.using(**python)
    producer = App()  # knows no handler: the database does
    by_sql(declared, "send-receipt", '{"order_id":1,"note":"é\\n"}', function)
    declared.commit()
    (expected,) = taken(declared)
    assert expected["queue"] == python.get("queue", "mail")
    assert expected["priority"] == python.get("priority", 2)
    payload = {"order_id": 1, "note": "é\n"}
    for kind in KINDS:
        with opened(kind, shop) as form:
            ways: list[Callable[[], Any]] = [
                partial(form.enqueue, prepared, Receipt(order_id=1, note="é\n")),
                partial(form.enqueue_many, prepared, [payload]),
                partial(form.by_name, app, "send-receipt", payload, **python),
                partial(form.by_name, producer, "send-receipt", payload, **python),
            ]
            for way in ways:
                way()
                form.commit()
                assert taken(declared) == [expected], kind
    if columns is not None:
        cells = {"name": "send-receipt", "payload": '{"order_id":1,"note":"é\\n"}'} | columns
        declared.execute(
            f"INSERT INTO pgqueue.job ({', '.join(cells)}) VALUES ({', '.join(f'%({c})s' for c in cells)})",
            cells,
        )
        declared.commit()
        assert taken(declared) == [expected]


def test_a_name_that_nobody_declared_has_the_built_in_defaults_either_way(conn: Connection) -> None:
    by_sql(conn, "unheard", "{}", {})
    conn.execute("INSERT INTO pgqueue.job (name, payload) VALUES ('unheard', '{}')")
    first, second = taken(conn)
    assert first == second
    assert (first["queue"], first["priority"]) == ("default", 5)


def test_a_plain_insert_of_a_limited_job_type_gets_its_lane_like_any_other(conn: Connection) -> None:
    conn.execute("INSERT INTO pgqueue.job_type (name, queue, slots) VALUES ('render', 'pdf', 3)")
    by_sql(conn, "render", "null", {})
    conn.execute("INSERT INTO pgqueue.job (name) VALUES ('render')")
    first, second = taken(conn)
    assert first == second
    assert (first["key"], first["payload"]) == ("@render", "null")


def test_a_copy_into_the_table_is_filled_in_like_an_insert(declared: Connection) -> None:
    with declared.cursor().copy("COPY pgqueue.job (name, payload) FROM STDIN") as copy:
        for n in range(3):
            copy.write_row(("send-receipt", json.dumps({"order_id": n})))
    assert [row["queue"] for row in taken(declared)] == ["mail"] * 3


def test_many_jobs_come_back_in_the_order_of_their_payloads(form: Form, declared: Connection) -> None:
    refs = form.enqueue_many(send_receipt, [{"order_id": n} for n in range(100)])
    form.commit()
    assert all(isinstance(ref, JobRef) and ref.created for ref in refs)
    rows: Any = declared.execute("SELECT j.id, (j.payload->>'order_id')::int FROM pgqueue.job j").fetchall()
    stored = dict(rows)
    assert [stored[ref.id] for ref in refs] == list(range(100))
    places = declared.execute("SELECT j.id FROM pgqueue.job j ORDER BY j.pos").fetchall()
    assert [row[0] for row in places] == [ref.id for ref in refs]


def test_no_payloads_are_no_jobs(form: Form, declared: Connection) -> None:
    assert form.enqueue_many(send_receipt, []) == []
    form.commit()
    assert taken(declared) == []


def test_keys_come_from_each_payload(form: Form, declared: Connection) -> None:
    form.enqueue_many(
        send_receipt.using(
            key=lambda r: f"order-{r.order_id}", idempotency_key=lambda r: f"mail-{r.order_id}"
        ),
        [Receipt(1), Receipt(2)],
    )
    form.commit()
    found = [(row["key"], row["idempotency_key"]) for row in taken(declared)]
    assert found == [("order-1", "mail-1"), ("order-2", "mail-2")]


def test_a_rollback_takes_the_job_along(form: Form, declared: Connection) -> None:
    form.enqueue(send_receipt.using(dedup_key="k"), Receipt(1))
    form.rollback()
    assert declared.execute("SELECT FROM pgqueue.job UNION ALL SELECT FROM pgqueue.dedup").fetchall() == []
    declared.rollback()
    assert form.enqueue(send_receipt.using(dedup_key="k"), Receipt(2)).created
    form.commit()
    assert [row["payload"] for row in taken(declared)] == ['{"order_id":2,"note":null}']


def test_nobody_sees_the_job_before_the_commit(form: Form, declared: Connection) -> None:
    form.enqueue(send_receipt, Receipt(1))
    assert taken(declared) == []
    form.commit()
    assert len(taken(declared)) == 1


def test_a_savepoint_that_is_rolled_back_takes_its_jobs_and_leaves_the_others(
    form: Form, declared: Connection
) -> None:
    form.enqueue(send_receipt, Receipt(1))
    form.execute("SAVEPOINT s")
    form.enqueue(send_receipt.using(dedup_key="k"), Receipt(2))
    form.execute("ROLLBACK TO SAVEPOINT s")
    assert form.enqueue(send_receipt.using(dedup_key="k"), Receipt(3)).created
    form.commit()
    assert [json.loads(row["payload"])["order_id"] for row in taken(declared)] == [1, 3]


def test_a_misfit_is_refused_and_leaves_the_transaction_usable(form: Form, declared: Connection) -> None:
    form.enqueue(send_receipt, Receipt(1))
    for bad in ({"order_id": "one"}, {"order_id": 1, "note": "\0"}, None):
        with pytest.raises(BadPayload, match="'send-receipt'"):
            form.enqueue(send_receipt, bad)
        with pytest.raises(BadPayload, match="'send-receipt'"):
            form.enqueue_many(send_receipt, [Receipt(2), bad])
        with pytest.raises(BadPayload, match="'send-receipt'"):
            form.by_name(app, "send-receipt", bad)
    form.commit()
    assert len(taken(declared)) == 1


def test_an_unknown_name_is_refused_and_leaves_the_transaction_usable(
    form: Form, declared: Connection
) -> None:
    form.enqueue(send_receipt, Receipt(1))
    with pytest.raises(
        UnknownJob, match=r"(?s)job 'send-reciept' is neither registered .* nor declared"
    ) as caught:
        form.by_name(app, "send-reciept", {"order_id": 1})
    assert caught.value.name == "send-reciept"
    assert "send-receipt" in caught.value.known
    form.commit()
    assert len(taken(declared)) == 1


def test_a_name_declared_by_another_service_is_known(form: Form, declared: Connection) -> None:
    producer = App()
    form.by_name(producer, "tidy")
    form.by_name(producer, "tidy")
    form.commit()
    assert [row["name"] for row in taken(declared)] == ["tidy", "tidy"]


def test_odd_names_are_bound_and_never_pasted(form: Form, declared: Connection) -> None:
    options: dict[str, Any] = dict.fromkeys(("key", "dedup_key", "idempotency_key"), NASTY)
    assert form.enqueue(nasty.using(**options), {NASTY: NASTY}).created
    assert not form.by_name(app, nasty.name, NASTY, dedup_key=NASTY).created
    form.commit()
    (row,) = taken(declared)
    assert json.loads(row["payload"]) == {NASTY: NASTY}
    assert (row["name"], row["queue"]) == (NASTY[:60], NASTY)
    assert {row[option] for option in options} == {NASTY}


def test_ids_are_bigint(form: Form, declared: Connection) -> None:
    declared.execute("ALTER TABLE pgqueue.job ALTER COLUMN id RESTART WITH 2147483648")
    declared.execute("ALTER SEQUENCE pgqueue.pos_seq RESTART WITH 4294967296")
    declared.commit()
    assert form.enqueue(tidy).id == 2**31
    assert form.enqueue(tidy.using(dedup_key="k")) == JobRef(2**31 + 1, created=True)
    assert form.enqueue(tidy.using(dedup_key="k")) == JobRef(2**31 + 1, created=False)
    form.commit()
    places = declared.execute("SELECT j.pos FROM pgqueue.job j ORDER BY j.id").fetchall()
    assert [row[0] for row in places] == [2**32, 2**32 + 1]


def test_a_delay_counts_from_the_call_not_from_the_begin(conn: Connection) -> None:
    conn.execute("SELECT pg_sleep(0.3)")
    tidy.using(run_after=10).enqueue(conn)
    row = conn.execute("SELECT j.run_at - now() >= interval '10.3 s' FROM pgqueue.job j").fetchone()
    assert row == (True,)


def test_the_payload_is_kept_as_it_was_written(conn: Connection) -> None:
    text = '{ "b": 1.00, "a":  [1e2 , 12345678901234567890123], "b": 2 }'
    by_sql(conn, "raw", text, {})
    assert [row["payload"] for row in taken(conn)] == [text]


def test_a_handle_that_sends_raw_queries_takes_a_job_too(conn: Connection) -> None:
    factories: Any = (psycopg.RawCursor, psycopg.ClientCursor)
    for factory in factories:
        conn.cursor_factory = factory
        assert tidy.enqueue(conn).created
        conn.commit()


def test_a_row_factory_of_the_caller_does_not_matter(conn: Connection) -> None:
    from psycopg.rows import dict_row

    conn.row_factory = dict_row  # type: ignore[assignment]  # the caller's own business
    assert tidy.enqueue(conn).created


def test_a_type_that_nobody_has_declared_yet_goes_where_its_handler_says(conn: Connection) -> None:
    app = App()

    @app.job("not-declared-yet", queue="mail", priority=2)
    def handler() -> None: ...

    handler.enqueue(conn)
    conn.execute("SELECT pgqueue.enqueue('not-declared-yet')")
    conn.execute("INSERT INTO pgqueue.job_type (name, queue) VALUES ('not-declared-yet', 'declared')")
    handler.enqueue(conn)
    rows = conn.execute(
        "SELECT queue, priority FROM pgqueue.job WHERE name = 'not-declared-yet' ORDER BY id"
    ).fetchall()
    assert rows == [("mail", 2), ("default", 5), ("declared", 5)]
