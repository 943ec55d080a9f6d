"""Tables in every state a plan may be made in, and what a plan may not do in any of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from pgqueue.statement import Statement
from tests.factories import nodes

STATES = ("empty", "never analysed", "analysed", "analysed while empty", "skewed")
CONDITIONS = ("Index Cond", "TID Cond")
#: Relations with a row or a few for each queue, job type, schedule, worker or relay, however much waits.
SMALL = frozenset(
    {
        *("queue", "job_type", "budget", "depth_sample", "worker", "schedule", "tick", "history_day"),
        *("relay", "relay_partition", "outbox_replay", "pos_seq", "outbox_id_seq"),
    }
)


def filled(dsn: str, state: str, tables: Sequence[str], even: Sequence[str], skewed: Sequence[str]) -> None:
    """Bring tables of schema pgqueue into a state: 100,000 even or skewed rows, or none; statistics that fit or not."""
    names = ", ".join(f"pgqueue.{table}" for table in tables)
    with psycopg.connect(dsn, autocommit=True) as connection:
        for table in tables:
            connection.execute(f"ALTER TABLE pgqueue.{table} SET (autovacuum_enabled = off)".encode())
        if state == "analysed while empty":
            connection.execute(f"ANALYZE {names}".encode())
        if state != "empty":
            for statement in skewed if state == "skewed" else even:
                connection.execute(statement.encode())
        if state in ("analysed", "skewed"):
            connection.execute(f"ANALYZE {names}".encode())


def generic_plan(connection: psycopg.Connection[Any], statement: Statement[Any]) -> Mapping[str, Any]:
    """Return the plan that a prepared statement keeps: made without looking at the parameters."""
    query = statement.query
    connection.execute("SET plan_cache_mode = force_generic_plan")
    connection.execute(f"PREPARE hot AS {query.numbered()}".encode(), prepare=False)
    with psycopg.ClientCursor(connection) as cursor:
        values = [statement.params[name] for name in query.names]
        shown = f"({cursor.mogrify(', '.join(['%s'] * len(values)), values)})" if values else ""
        cursor.execute(f"EXPLAIN (FORMAT JSON) EXECUTE hot{shown}".encode())
        found = cursor.fetchone()
    connection.execute("DEALLOCATE hot")
    assert found
    return dict(found[0][0]["Plan"])


def check(plan: Mapping[str, Any], whole: Collection[str] = ()) -> set[str]:
    """Refuse every scan that reads a table from end to end; return the indexes used.

    Small tables may be read so, and the tables and indexes in `whole`.
    """
    used = set()
    for node in nodes(plan):
        each_with_each = re.search(r"\bkey = ", node.get("Join Filter", ""))
        assert not each_with_each, f"keys are compared each with each: {node['Join Filter']}"
        kind, relation = node["Node Type"], node.get("Relation Name")
        if relation is None or relation in SMALL or relation.startswith("pg_") or kind == "ModifyTable":
            continue
        if relation in whole or node.get("Index Name") in whole:
            used |= {node["Index Name"]} if "Index Name" in node else set()
            continue
        assert kind in ("Index Scan", "Index Only Scan", "Tid Scan"), f"{kind} on {relation}"
        assert any(condition in node for condition in CONDITIONS), f"{kind} of all of {relation}: {node}"
        if "Index Name" in node:
            used.add(node["Index Name"])
            by_key = re.search(r"\bkey = ", node.get("Filter", ""))
            assert not by_key, f"{node['Index Name']} is read for one key: {node['Filter']}"
    return used


@contextmanager
def nested_plans(connection: psycopg.Connection[Any]) -> Iterator[Callable[[], list[Mapping[str, Any]]]]:
    """Collect the plans of the statements inside functions, made for any parameters; give a function that returns them.

    Functions keep their plans for the session: auto_explain tells what they do.
    """
    connection.execute("LOAD 'auto_explain'")
    told: list[str] = []
    connection.add_notice_handler(lambda note: told.append(str(note.message_primary)))
    for setting, value in (
        ("auto_explain.log_min_duration", "0"), ("auto_explain.log_nested_statements", "on"),
        ("auto_explain.log_format", "json"), ("auto_explain.log_level", "notice"),
        ("plan_cache_mode", "force_generic_plan"), ("client_min_messages", "notice"),
    ):  # fmt: skip
        connection.execute("SELECT set_config(%s, %s, false)", [setting, value])
    yield lambda: [json.loads(text[text.index("{") :]) for text in told if "{" in text]
    connection.execute("SET auto_explain.log_min_duration = -1")


def can_explain_functions(dsn: str) -> str | None:
    """Say why the statements inside functions cannot be seen here; None if they can."""
    with psycopg.connect(dsn) as connection:
        try:
            connection.execute("LOAD 'auto_explain'")
        except (psycopg.errors.UndefinedFile, psycopg.errors.InsufficientPrivilege) as error:
            return f"auto_explain cannot be loaded: {error}"
    return None


def drop_index(connection: psycopg.Connection[Any], index: str) -> None:
    """Drop an index, or the constraint it belongs to."""
    found = connection.execute(
        "SELECT r.conrelid::regclass::text FROM pg_catalog.pg_constraint r WHERE r.conindid = %s::regclass",
        [f"pgqueue.{index}"],
    ).fetchone()
    if found:
        connection.execute(f"ALTER TABLE {found[0]} DROP CONSTRAINT {index} CASCADE".encode())
    else:
        connection.execute(f"DROP INDEX pgqueue.{index}".encode())
