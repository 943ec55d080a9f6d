"""Plans of the relay: reads and marks go by an index whatever the outbox holds and whenever it was analysed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from pgqueue.statement import Statement
from relay import inbox, park, partitions, prune, publish, replay, wal
from relay.cycle import connect
from relay.sinks import SinkContext, queue
from tests.db.plans import STATES, check, drop_index, filled, generic_plan
from tests.factories import nodes
from tests.server import Server

TABLES = ("outbox", "inbox", "inbox_version")
WEEK = timedelta(days=7)
PARTS = list(range(64))
IDS = [1, 2, 3]


def page() -> Statement[Any]:
    """Return the statement that prunes a page."""
    return Statement(prune._SQL["page"], {"cursor": 0, "size": prune.PAGE, "keep": WEEK}, list)


STATEMENTS: dict[str, tuple[Callable[[], Statement[Any]], set[str]]] = {
    "trouble": (lambda: publish.trouble(PARTS), {"outbox_trouble"}),
    "read": (lambda: publish.read(dict.fromkeys(PARTS, 0), 200), {"outbox_pending", "outbox_trouble"}),
    "chosen": (lambda: publish.chosen(IDS), {"outbox_pkey"}),
    "last": (publish.last, set()),
    "writers": (publish.writers, set()),
    "mine": (lambda: publish.mine(uuid4()), set()),
    "mark": (lambda: publish.mark(IDS), {"outbox_pkey"}),
    "mark_by_delete": (lambda: publish.mark(IDS, keep=False), {"outbox_pkey"}),
    "mark_unlocked": (lambda: publish.mark_unlocked(IDS), {"outbox_pkey"}),
    "unmarked": (lambda: publish.unmarked(IDS), {"outbox_pkey"}),
    "fail": (lambda: publish.fail({1: "no"}, publish.RejectionPolicy()), {"outbox_pkey"}),
    "defer": (lambda: publish.defer({1: ("no", 1.0)}), {"outbox_pkey"}),
    "prune": (page, {"outbox_pkey"}),
    "take": (lambda: partitions.take(uuid4(), 3), set()),
    "present": (lambda: wal.present(IDS), {"outbox_pkey"}),
    "copy": (lambda: replay.copy(1, n=100), {"outbox_pkey"}),
    "retry": (lambda: park.retry(IDS), {"outbox_pkey"}),
    "skip": (lambda: park.skip(IDS), {"outbox_pkey"}),
    "inbox_claim": (lambda: inbox._claim("k1", "c", "s"), set()),
    "inbox_newer": (lambda: inbox._newer("c", "s", "a1", 2), set()),
    "inbox_prune": (lambda: inbox.prune(WEEK), set()),
}
#: What a statement may read from end to end: the oldest keys of the inbox stand in front, and its index is a summary.
WHOLE = {"inbox_prune": ("inbox",)}

FILL = """
INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload, published_at, last_error, next_attempt_at, parked_at)
SELECT 'order-' || i % 1000, 'order.placed', '{}', CASE WHEN i % 2 = 0 THEN now() END,
  CASE WHEN i % 200 = 1 THEN 'no' END, CASE WHEN i % 400 = 1 THEN now() + interval '1 h' END,
  CASE WHEN i % 400 = 201 THEN now() END
FROM generate_series(1, 100000) i
"""
#: All but a few are published; what is pending is of one aggregate, which waits.
SKEWED = """
INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload, published_at, last_error, next_attempt_at)
SELECT CASE WHEN i % 50 = 0 THEN 'hot' ELSE 'order-' || i % 1000 END, 'order.placed', '{}',
  CASE WHEN i % 50 <> 0 THEN now() END,
  CASE WHEN i = 50 THEN 'no' END, CASE WHEN i = 50 THEN 'infinity'::timestamptz END
FROM generate_series(1, 100000) i
"""


FILL_INBOX = """
INSERT INTO pgqueue.inbox (consumer, source, key, applied_at)
SELECT 'c', 's', 'k' || i, now() - interval '30 days' + i * interval '1 min' FROM generate_series(1, 50000) i
"""
FILL_VERSIONS = """
INSERT INTO pgqueue.inbox_version (consumer, source, aggregate_id, version)
SELECT 'c', 's', 'a' || i, 1 FROM generate_series(1, 50000) i
"""


@pytest.fixture(scope="module", params=STATES)
def dsn(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """Give a database whose outbox holds much or nothing, with statistics that fit or do not."""
    name = server.migrated()
    rest = (FILL_INBOX, FILL_VERSIONS)
    filled(server.dsn(name), request.param, TABLES, (FILL, *rest), (SKEWED, *rest))
    yield server.dsn(name)
    server.drop(name)


@pytest.mark.parametrize("name", STATEMENTS)
def test_every_statement_of_a_relay_goes_by_its_index_also_in_a_plan_made_for_any_parameters(
    dsn: str, name: str
) -> None:
    make, indexes = STATEMENTS[name]
    with connect(dsn, "plans") as conn:
        used = check(generic_plan(conn, make()), WHOLE.get(name, ()))
    assert indexes <= used


@pytest.mark.parametrize(
    ("name", "index"), [(n, i) for n, (_, all_) in STATEMENTS.items() for i in sorted(all_)]
)
def test_without_its_index_the_guard_of_a_statement_fails(dsn: str, name: str, index: str) -> None:
    make, indexes = STATEMENTS[name]
    with connect(dsn, "plans") as conn:
        conn.execute("BEGIN")
        drop_index(conn, index)
        with pytest.raises(AssertionError):
            assert indexes <= check(generic_plan(conn, make()), WHOLE.get(name, ()))
        conn.execute("ROLLBACK")


HANDED_OVER = ("take_over", "drop_taken")


@pytest.mark.parametrize("name", HANDED_OVER)
def test_what_becomes_jobs_goes_by_its_index_too_on_the_connection_of_its_sink(dsn: str, name: str) -> None:
    sink = queue.QueueSink(SinkContext(source="/outbox", dsn=dsn), lambda _: ())
    try:
        plan = generic_plan(sink._opened(), Statement(queue._SQL[name], {"ids": IDS}, list))
    finally:
        sink.close()
    assert "outbox_pkey" in check(plan)


def test_a_read_takes_each_partition_in_the_order_of_its_index_without_a_sort(dsn: str) -> None:
    with connect(dsn, "plans") as conn:
        plan = generic_plan(conn, STATEMENTS["read"][0]())
    limits = [node for node in nodes(plan) if node["Node Type"] == "Limit"]
    assert limits
    for limit in limits:
        assert not any("Sort" in node["Node Type"] for node in nodes(limit))
