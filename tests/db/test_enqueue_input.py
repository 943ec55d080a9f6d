from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pgqueue import App, BadPayload
from pgqueue.payload import LIMIT
from tests.server import Connection, Server

app = App()
SECRET = "not for the log"


@app.job("ship")
def ship(payload: Any) -> None: ...


@pytest.fixture(scope="module")
def shop(server: Server) -> Iterator[Connection]:
    """Give one connection for the whole module; no test leaves a row."""
    name = server.migrated()
    with psycopg.connect(server.dsn(name)) as conn:
        conn.execute("SET search_path = ''")
        conn.commit()
        yield conn
    server.drop(name)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no name", {"name": ""}, "a job needs a name"),
    ("null name", {"name": None}, "a job needs a name"),
    ("blank name", {"name": "  "}, "a job needs a name"),
    ("long name", {"name": "n" * 10_240}, "the name has more than 200 bytes"),
    ("blank queue", {"queue": " "}, "queue is blank"),
    ("long queue", {"queue": "q" * 10_240}, "queue has more than 200 bytes"),
    ("low priority", {"priority": -1}, "priority is -1, not 0 to 9"),
    ("high priority", {"priority": 10}, "priority is 10, not 0 to 9"),
    ("no attempts", {"max_attempts": 0}, "max_attempts is 0, not 1 to 32767"),
    ("many attempts", {"max_attempts": 100_000}, "max_attempts is 100000"),
    ("no timeout", {"timeout_s": 0}, "timeout_s is 0, not above 0"),
    ("timeout NaN", {"timeout_s": float("nan")}, "timeout_s is NaN"),
    ("infinite run_at", {"run_at": "infinity"}, "run_at is infinity"),
    ("negative delay", {"delay": "-1 s"}, "delay is -00:00:01, not between 0 and ten years"),
    ("delay of an age", {"delay": "31688 years"}, "delay is 31688 years"),
    ("blank key", {"key": " "}, "key ' ' is blank"),
    ("long key", {"key": "k" * 513}, "has more than 512 bytes"),
    ("blank dedup_key", {"dedup_key": ""}, "key '' is blank"),
    ("blank idempotency_key", {"idempotency_key": ""}, "key '' is blank"),
    ("no window", {"dedup_key": "k", "dedup_window": "0"}, "dedup_window is 00:00:00"),
    ("null window", {"dedup_key": "k", "dedup_window": None}, "dedup_window is"),
    ("headers list", {"headers": "[]"}, "headers must be a JSON object"),
    ("headers size", {"headers": json.dumps({"a": "x" * 65_536})}, "headers have more than 65536 bytes"),
    ("headers NUL", {"headers": '{"a": "\\u0000"}'}, "NUL character or a lone surrogate"),
    ("backoff list", {"backoff": "[1]"}, "backoff must be a JSON object"),
    ("backoff text", {"backoff": '{"base": "x"}'}, "backoff is no"),
    ("backoff jitter", {"backoff": '{"jitter": "some"}'}, "backoff is no"),
    ("backoff zero", {"backoff": '{"cap": 0}'}, "base and cap are seconds, above 0"),
    ("NUL", {"payload": '{"a": ["\\u0000"]}'}, "NUL character or a lone surrogate"),
    ("NUL in a key", {"payload": '{"\\u0000": 1}'}, "NUL character or a lone surrogate"),
    ("lone surrogate", {"payload": '"\\ud800"'}, "NUL character or a lone surrogate"),
    ("low surrogate", {"payload": '{"\\uDC00x": 1}'}, "NUL character or a lone surrogate"),
    (
        "too big",
        {"payload": json.dumps("x" * (LIMIT - 1))},
        "a payload has 1048577 bytes, more than 1048576: store it",
    ),
]


@pytest.mark.parametrize(("arguments", "says"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_the_sql_function_refuses_bad_input_in_words_and_without_the_payload(
    arguments: dict[str, Any], says: str, shop: Connection
) -> None:
    kinds = {
        "headers": "json",
        "backoff": "json",
        "priority": "int",
        "max_attempts": "int",
        "timeout_s": "real",
    }
    kinds |= {"payload": "json", "run_at": "timestamptz", "delay": "interval", "dedup_window": "interval"}
    values = {"name": "ship", "payload": json.dumps(SECRET)} | arguments
    call = ", ".join(f"{k} => %({k})s::{kinds.get(k, 'text')}" for k in values)
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught, shop.transaction():
        shop.execute(f"SELECT pgqueue.enqueue({call})", values)
    problem = caught.value.diag
    assert problem.message_primary is not None
    assert problem.message_primary.startswith("pgqueue.enqueue of job ")
    assert says in problem.message_primary
    assert SECRET not in str(caught.value)
    assert problem.message_detail is None


@pytest.mark.parametrize("payload", ["NaN", "[Infinity]", '{"a": -Infinity}', "", "{", "'x'"])
def test_what_is_no_json_is_refused_by_postgres(payload: str, shop: Connection) -> None:
    with pytest.raises(psycopg.errors.InvalidTextRepresentation, match="json"), shop.transaction():
        shop.execute("SELECT pgqueue.enqueue('ship', %s)", [payload])


@pytest.mark.parametrize(
    "payload", ['"\\\\u0000"', '"\\ud83d\\ude00"', '"\\\\ud800"', '"\\u00e9"', '{"\\\\\\\\u0000": 1}']
)
def test_escapes_that_postgres_can_read_pass(payload: str, shop: Connection) -> None:
    shop.execute("SELECT pgqueue.enqueue('ship', %s)", [payload])
    assert shop.execute("SELECT j.payload::text FROM pgqueue.job j").fetchall() == [(payload,)]
    shop.rollback()


def test_the_limit_is_the_same_to_the_byte_in_python_and_in_sql(shop: Connection) -> None:
    fits, bursts = "x" * (LIMIT - 2), "x" * (LIMIT - 1)
    ship.enqueue(shop, fits)
    shop.execute("SELECT pgqueue.enqueue('ship', %s)", [json.dumps(fits)])
    assert ship.enqueue_many(shop, [fits, fits, 1])[2].created
    with pytest.raises(BadPayload, match="1048577 bytes"):
        ship.enqueue_many(shop, [1, bursts])
    with pytest.raises(psycopg.errors.InvalidParameterValue), shop.transaction():
        shop.execute("SELECT FROM pgqueue.enqueue_many('ship', %s)", [json.dumps([1, bursts])])
    shop.rollback()


@pytest.mark.parametrize("payloads", [None, "{}", "1", "null"])
def test_payloads_that_are_no_list_are_refused(payloads: str | None, shop: Connection) -> None:
    with (
        pytest.raises(psycopg.errors.InvalidParameterValue, match="must be a JSON array"),
        shop.transaction(),
    ):
        shop.execute("SELECT FROM pgqueue.enqueue_many('ship', %s::json)", [payloads])


def test_a_plain_insert_of_nonsense_is_refused_by_the_table(shop: Connection) -> None:
    for cells in (
        "(name) VALUES (' ')",
        "(name) VALUES (NULL)",
        "(name, queue) VALUES ('ship', '')",
        "(name, queue) VALUES ('ship', repeat('q', 201))",
        "(name, priority) VALUES ('ship', 10)",
        "(name, max_attempts) VALUES ('ship', 0)",
        "(name, timeout_s) VALUES ('ship', -1)",
        "(name, key) VALUES ('ship', '')",
        "(name, run_at) VALUES ('ship', 'infinity')",
        "(name, lease) VALUES ('ship', 5)",
        "(name, payload) VALUES ('ship', 'no json')",
    ):
        with pytest.raises((psycopg.errors.IntegrityError, psycopg.errors.DataError)), shop.transaction():
            shop.execute(f"INSERT INTO pgqueue.job {cells}")


def test_bad_input_among_many_leaves_no_row(shop: Connection) -> None:
    with pytest.raises(BadPayload):
        ship.enqueue_many(shop, [*range(100), float("nan")])
    assert shop.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (0,)
    shop.rollback()


@pytest.mark.parametrize(
    ("columns", "values", "constraint"),
    [
        ("name", "'  '", "job_name_check"),
        ("name", "''", "job_name_check"),
        ("name", "repeat('é', 101)", "job_name_check"),
        ("name, queue", "'ship', '   '", "job_queue_check"),
        ("name, queue", "'ship', repeat('q', 201)", "job_queue_check"),
        ("name, pos", "'ship', NULL", "job_place"),
        ("name, pos, run_at", "'ship', NULL, 'infinity'", "job_run_at"),
        ("name, key", "'ship', ''", "job_key_check"),
        ("name, priority", "'ship', 10", "job_priority_check"),
    ],
)
def test_a_plain_insert_is_refused_by_the_constraint_that_names_the_column(
    shop: Connection, columns: str, values: str, constraint: str
) -> None:
    with pytest.raises(psycopg.errors.CheckViolation) as caught, shop.transaction():
        shop.execute(f"INSERT INTO pgqueue.job ({columns}) VALUES ({values})")
    assert caught.value.diag.constraint_name == constraint


@pytest.mark.parametrize("name", [" ship", "ship ", "\t", "\u00a0", "n" * 200])
def test_a_plain_insert_takes_every_name_that_is_not_blank(shop: Connection, name: str) -> None:
    with shop.transaction(force_rollback=True):
        shop.execute("INSERT INTO pgqueue.job (name, queue) VALUES (%s, %s)", [name, name])
