"""Plans: whatever the table holds, and whenever it was analysed, the hot statements go by an index.

Statements are prepared while the table may be empty and keep that plan. A sequential scan chosen then costs a second
per round once a million jobs wait.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pgqueue.claim import LaneSize, claim, lane_claim, lane_release, route, suspects, suspects_alone
from pgqueue.finish import Failed, ack, bury, drop, release, retry, snooze, still_mine
from pgqueue.heartbeat import heartbeat, lane_heartbeat
from pgqueue.job import Claim
from pgqueue.promote import promote
from pgqueue.pulse import LONG_AGO
from pgqueue.statement import Statement
from tests.factories import EVERYTHING, MINUTE, QUEUE, Holder, buried, nodes, retried, scope
from tests.server import Server

HELD = [Claim(id=1, lease=5), Claim(id=2, lease=5)]
OF = scope(queues=(QUEUE, "mail"), priorities=range(10))
LEVELS = len(OF.queues)
FAILURES = [Failed(claim=HELD[0], outcome=retried())]

STATEMENTS: dict[str, tuple[Callable[[], Statement[Any]], set[str]]] = {
    "claim": (lambda: claim(OF, [0] * LEVELS, 100, 7, MINUTE, {QUEUE: 0}), {"job_ready", "job_route"}),
    "suspects": (lambda: suspects(OF, [EVERYTHING] * LEVELS, 8, 7, MINUTE, low=0, high=0), {"job_ready"}),
    "suspects_alone": (lambda: suspects_alone(OF, [EVERYTHING] * LEVELS), {"job_ready"}),
    "ack": (lambda: ack(HELD), {"job_pkey"}),
    "ack_skip": (lambda: ack(HELD, skip=True), {"job_pkey"}),
    "still_mine": (lambda: still_mine(HELD), {"job_pkey"}),
    "retry": (lambda: retry(FAILURES, "w"), {"job_pkey"}),
    "bury": (lambda: bury([Failed(claim=HELD[0], outcome=buried())], "w"), {"job_pkey"}),
    "snooze": (lambda: snooze(HELD, [1.0, 1.0]), {"job_pkey"}),
    "release": (lambda: release(HELD), {"job_pkey"}),
    "drop": (lambda: drop(HELD), {"job_pkey"}),
    "heartbeat": (lambda: heartbeat(HELD, MINUTE), {"job_pkey"}),
    "lane_heartbeat": (lambda: lane_heartbeat([(QUEUE, "k1", 5)], MINUTE), {"lane_pkey", "job_lane"}),
    "promote": (lambda: promote(LONG_AGO, MINUTE), {"job_due"}),
}
FILL = """
INSERT INTO pgqueue.job (name, queue, priority, pos, run_at, key, lease, deadline, attempt)
SELECT 'work', CASE i % 3 WHEN 0 THEN 'mail' ELSE 'default' END, i % 10,
  CASE WHEN i % 20 <> 7 THEN nextval('pgqueue.pos_seq') END, CASE WHEN i % 20 = 7 THEN now() + interval '1 h' END,
  CASE WHEN i % 2 = 0 THEN 'k' || i % 10000 END, (i % 50 = 1)::int * 5,
  CASE WHEN i % 50 = 1 THEN now() + interval '1 min' ELSE '-infinity' END, (i % 50 = 1)::int
FROM generate_series(1, 100000) i
"""

FILL_LANES = """
INSERT INTO pgqueue.lane (queue, key, priority, head_name)
SELECT DISTINCT ON (j.queue, j.key) j.queue, j.key, j.priority, j.name FROM pgqueue.job j
WHERE j.key IS NOT NULL AND j.pos IS NOT NULL
"""


@pytest.fixture(scope="module", params=["empty", "never analysed", "analysed", "analysed while empty"])
def dsn(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """Give a database whose job table holds much or nothing, with statistics that fit or do not."""
    name = server.migrated()
    found = server.dsn(name)
    with psycopg.connect(found, autocommit=True) as connection:
        connection.execute("ALTER TABLE pgqueue.job SET (autovacuum_enabled = off)")
        connection.execute("ALTER TABLE pgqueue.lane SET (autovacuum_enabled = off)")
        if request.param == "analysed while empty":
            connection.execute("ANALYZE pgqueue.job, pgqueue.lane")
        if request.param != "empty":
            connection.execute(FILL)
            connection.execute(FILL_LANES)
        if request.param == "analysed":
            connection.execute("ANALYZE pgqueue.job, pgqueue.lane")
    yield found
    server.drop(name)


def generic_plan(holder: Holder, statement: Statement[Any]) -> Mapping[str, Any]:
    """Return the plan that a prepared statement keeps: made without looking at the parameters."""
    connection, query = holder.connection, statement.query
    connection.execute("SET plan_cache_mode = force_generic_plan")
    connection.execute(f"PREPARE hot AS {query.numbered()}".encode(), prepare=False)
    with psycopg.ClientCursor(connection) as cursor:
        values = cursor.mogrify(
            ", ".join(["%s"] * len(query.names)), [statement.params[name] for name in query.names]
        )
        cursor.execute(f"EXPLAIN (FORMAT JSON) EXECUTE hot({values})".encode())
        found = cursor.fetchone()
    connection.execute("DEALLOCATE hot")
    assert found
    return dict(found[0][0]["Plan"])


def check(plan: Mapping[str, Any]) -> set[str]:
    """Refuse every scan of jobs or lanes that reads them from end to end; return the indexes used on them."""
    used = set()
    for node in nodes(plan):
        kind, relation = node["Node Type"], node.get("Relation Name")
        if relation in ("job", "lane"):
            assert kind in ("Index Scan", "Index Only Scan", "Tid Scan", "ModifyTable"), (
                f"{kind} on {relation}"
            )
            if "Index Name" in node:
                used.add(node["Index Name"])
                by_key = re.search(r"\bkey = ", node.get("Filter", ""))
                assert not by_key, f"{node['Index Name']} is read for one key: {node['Filter']}"
    return used


@pytest.mark.parametrize("name", STATEMENTS)
def test_every_hot_statement_goes_by_its_index_also_in_a_plan_made_for_any_parameters(
    dsn: str, name: str
) -> None:
    make, indexes = STATEMENTS[name]
    with Holder(dsn) as holder:
        used = check(generic_plan(holder, make()))
    assert indexes <= used


def test_a_claim_reads_each_level_in_the_order_of_its_index_without_a_sort(dsn: str) -> None:
    with Holder(dsn) as holder:
        plan = generic_plan(holder, STATEMENTS["claim"][0]())
    limits = [node for node in nodes(plan) if node["Node Type"] == "Limit"]
    windows = [node for node in limits if any(n.get("Index Name") == "job_ready" for n in nodes(node))]
    assert windows
    for window in windows:
        assert not any("Sort" in node["Node Type"] for node in nodes(window))


LANES: dict[str, Statement[Any]] = {
    "route": route({QUEUE: 0, "mail": 0}),
    "lane_claim": lane_claim(
        OF, [0] * LEVELS, LaneSize(lanes=5, depth=5, total=20), 9, timedelta(seconds=60)
    ),
    "lane_release": lane_release([(QUEUE, "k1"), (QUEUE, "k2")], 9, 0.0),
}


def test_the_statements_inside_the_functions_of_lanes_go_by_their_indexes_too(dsn: str) -> None:
    """Functions keep their plans for the session: auto_explain tells what they do."""
    with Holder(dsn) as holder:
        connection = holder.connection
        try:
            connection.execute("LOAD 'auto_explain'")
        except (psycopg.errors.UndefinedFile, psycopg.errors.InsufficientPrivilege) as error:
            pytest.skip(f"auto_explain cannot be loaded: {error}")
        told: list[str] = []
        connection.add_notice_handler(lambda note: told.append(str(note.message_primary)))
        for setting, value in (
            ("auto_explain.log_min_duration", "0"), ("auto_explain.log_nested_statements", "on"),
            ("auto_explain.log_format", "json"), ("auto_explain.log_level", "notice"),
            ("plan_cache_mode", "force_generic_plan"), ("client_min_messages", "notice"),
        ):  # fmt: skip
            connection.execute("SELECT set_config(%s, %s, false)", [setting, value])
        used = set()
        for _ in range(2):
            for statement in LANES.values():
                holder.run(statement)
        connection.execute("SET auto_explain.log_min_duration = -1")
    plans = [json.loads(text[text.index("{") :]) for text in told if "{" in text]
    nested = [
        plan for plan in plans if "pgqueue.job" in plan["Query Text"] or "pgqueue.lane " in plan["Query Text"]
    ]
    assert len(nested) > 8
    for plan in nested:
        used |= check(plan["Plan"])
    assert {"job_route", "job_lane", "lane_pkey", "lane_ready"} <= used
