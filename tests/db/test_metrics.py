"""The page of metrics: counters of the process from its events, and the state of the installation from the views."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgqueue import metrics, migrate
from pgqueue.connection import execute
from pgqueue.depth import sample
from pgqueue.events import AlreadyApplied, Bus, JobFinished, JobsAcked, LeasesLost, LoopFailed
from pgqueue.health import pages, serve
from pgqueue.heartbeat import beat, register
from pgqueue.metrics import Metrics
from pgqueue.migrate import Grant
from tests.factories import enqueue
from tests.server import Connection, Server

HOSTILE = 'a"b\\c\nd{e="f"} # 1'
LETTER = """
INSERT INTO pgqueue.dead_job (id, queue, name, priority, attempt, lost, payload, enqueued_at, reason, error_type)
VALUES (nextval('pgqueue.job_id_seq'), 'mail', 'send', 5, 5, 0, '{}', now(), 'exhausted', %s)
"""
Sample = tuple[str, frozenset[tuple[str, str]]]


def shown(page: Metrics) -> dict[Sample, float]:
    """Read the page as Prometheus would: (name, labels) -> value."""
    kind, body = page.page()
    assert kind.startswith("text/plain")
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(body.decode())
        for s in family.samples
    }


def at(found: dict[Sample, float], name: str, /, **labels: str) -> float | None:
    return found.get((f"pgqueue_{name}", frozenset(labels.items())))


@pytest.fixture
def page(dsn: str) -> Metrics:
    return Metrics(Bus(), dsn)


def test_attempts_are_counted_by_how_they_ended(dsn: str) -> None:
    bus = Bus()
    page = Metrics(bus, dsn)
    bus.emit(JobsAcked(count=41))
    bus.emit(JobsAcked(count=1))
    for outcome in ("retry", "dead", "ok"):  # one that ended well is counted with its batch
        bus.emit(JobFinished(job_id=1, name="n", queue="q", attempt=1, outcome=outcome, seconds=0.1))
    bus.emit(AlreadyApplied(job_id=1, name="n", key="k"))
    bus.emit(LeasesLost(job_ids=(1, 2, 3)))
    bus.emit(LoopFailed(loop="claim", error="gone", retry_in=1.0))
    found = shown(page)
    assert at(found, "executions_total", outcome="ok") == 42
    assert [at(found, "executions_total", outcome=o) for o in ("retry", "dead", "already_applied")] == [
        1,
        1,
        1,
    ]
    assert at(found, "leases_lost_total") == 3
    assert at(found, "loop_failures_total", loop="claim") == 1


def test_the_views_are_shown_as_they_are(page: Metrics, conn: Connection) -> None:
    enqueue(conn, 3, name="strange", queue="mail")
    enqueue(conn, queue="mail", name="send", delay=timedelta(hours=1))
    given = register(nonce=1, host="h", pid=1, version="1", queues=["mail"], names=["send"], concurrency=8)
    execute(conn, given)
    execute(conn, beat(1, 0, 3, draining=False))
    execute(conn, sample(["mail"]))
    conn.execute(LETTER, [HOSTILE])
    conn.execute(
        "INSERT INTO pgqueue.tally_minute (minute, queue, name, outcome, n)"
        " SELECT date_trunc('minute', now()) - g * interval '1 min', 'mail', 'send', 'ok', 17"
        " FROM generate_series(0, 2) g"
    )
    conn.execute("SELECT pgqueue.schedule_add('nightly', '0 2 * * *', 'send')")
    conn.execute("SELECT pgqueue.schedule_pause('nightly')")
    conn.execute("INSERT INTO pgqueue.outbox (event_type, payload, aggregate_id) VALUES ('e', '{}', 'a')")
    conn.commit()
    found = shown(page)
    assert at(found, "views_read") == 1
    assert at(found, "jobs", queue="mail", state="ready") == 3
    assert at(found, "jobs", queue="mail", state="delayed") == 1
    assert at(found, "oldest_ready_seconds", queue="mail") is not None
    assert at(found, "dead_last_10_minutes", queue="mail", error_type=HOSTILE) == 1
    assert at(found, "unknown_jobs", queue="mail", name="strange") == 3
    assert at(found, "ended_last_minute", queue="mail", name="send", outcome="ok") == 17
    assert at(found, "schedule_active", schedule="nightly") == 0
    assert at(found, "workers", state="alive") == 1
    assert at(found, "overrun") == 3
    assert at(found, "outbox_pending") == 1
    names = {name for name, _ in found}
    documented = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    assert not {name for name in names if not name.endswith("_created") and name not in documented}


def test_a_database_that_is_away_leaves_the_counters(dsn: str) -> None:
    """authentik 18546: what watches a service must not need what the service has lost."""
    bus = Bus()
    page = Metrics(bus, make_conninfo(dsn, dbname="nosuch"))
    bus.emit(JobsAcked(count=5))
    found = shown(page)
    assert at(found, "executions_total", outcome="ok") == 5
    assert at(found, "views_read") == 0
    assert at(found, "outbox_pending") is None


def test_many_who_ask_are_one_look_at_the_database(
    page: Metrics, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shown(page)
    monkeypatch.setattr(metrics, "FRESH", 3600.0)
    conn.execute("INSERT INTO pgqueue.outbox (event_type, payload, aggregate_id) VALUES ('e', '{}', 'a')")
    conn.commit()
    assert shown(page) == first
    monkeypatch.setattr(metrics, "FRESH", 0.0)
    assert at(shown(page), "outbox_pending") == 1


def test_a_role_is_shown_what_it_may_see(server: Server, dsn: str) -> None:
    if not server.can_create_roles():
        pytest.skip("the role of PGQUEUE_TEST_DSN may not create roles")
    role = f"{server.prefix}_metrics"
    with server.admin() as admin:
        admin.execute(
            sql.SQL("CREATE ROLE {0} NOLOGIN; GRANT {0} TO CURRENT_USER").format(sql.Identifier(role))
        )
    try:
        migrate.grant(dsn, [Grant(kind="relay", role=role)])
        found = shown(Metrics(Bus(), make_conninfo(dsn, options=f"-c role={role}")))
        assert (at(found, "views_read"), at(found, "outbox_pending")) == (1, 0)
        assert at(found, "workers", state="alive") is None
    finally:
        with psycopg.connect(dsn) as owner:
            owner.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
        with server.admin() as admin:
            admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


@pytest.fixture
def port(dsn: str) -> Iterator[tuple[int, list[str]]]:
    """Give the port of a health check, and the list in which a test names a stalled loop."""
    stalled: list[str] = []
    server = serve("127.0.0.1", 0, lambda: stalled[0] if stalled else None, pages(Bus(), dsn))
    yield server.server_address[1], stalled
    server.shutdown()
    server.server_close()


def test_the_health_port_answers_with_the_page_whatever_the_health(port: tuple[int, list[str]]) -> None:
    number, stalled = port
    stalled.append("claim")
    with urllib.request.urlopen(f"http://127.0.0.1:{number}/metrics?x=1") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        assert b"pgqueue_views_read 1.0" in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"http://127.0.0.1:{number}/healthz")


def test_without_the_extra_there_is_no_page(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert pages(Bus(), dsn) == {}
