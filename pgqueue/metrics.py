"""Metrics: a page for Prometheus, with the counters of this process and the state that the views show.

The counters come from events. The rest is read from the views when the page is asked for, on a connection of its own,
at most once in a few seconds however many ask; every process of one installation shows the same there. Needs the extra
`metrics` (prometheus-client).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import psycopg
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from pgqueue.connection import execute
from pgqueue.dsn import connect
from pgqueue.errors import DatabaseUnreachable
from pgqueue.events import AlreadyApplied, Bus, JobFinished, JobsAcked, LeasesLost, LoopFailed
from pgqueue.statement import Query, Row, Statement, load, nothing, table

#: For how long an answer of the database is shown again, in seconds.
FRESH: Final = 5.0

_SQL = load("pgqueue", "metrics")
Conn = psycopg.Connection[tuple[Any, ...]]

STATES: Final = ("ready", "delayed", "in_flight", "blocked")
OUTBOX: Final = (
    ("pending", "Events that are not published yet."),
    ("parked", "Events set aside."),
    ("blocked_aggregates", "Aggregates held up by an event that was rejected."),
    ("oldest_pending_seconds", "Age of the oldest event that is not published yet."),
    ("relays", "Relays that are alive."),
    ("orphan_partitions", "Partitions without a relay."),
)


class Metrics:
    """The page of one process; `page` is called from the threads of the health port."""

    def __init__(self, bus: Bus, dsn: str) -> None:
        self._dsn = dsn
        self._lock = threading.Lock()
        self._seen: list[GaugeMetricFamily] = []
        self._seen_at = -FRESH
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._executions = self._counter("executions", "Attempts that ended in this process.", "outcome")
        self._lost = self._counter(
            "leases_lost", "Results of this process that were dropped: somebody else held the job."
        )
        self._failed = self._counter(
            "loop_failures", "Errors that a loop of this process went on from.", "loop"
        )
        bus.subscribe(JobsAcked, lambda event: self._executions.labels("ok").inc(event.count))
        bus.subscribe(JobFinished, self._finished)
        bus.subscribe(AlreadyApplied, lambda _: self._executions.labels("already_applied").inc())
        bus.subscribe(LeasesLost, lambda event: self._lost.inc(len(event.job_ids)))
        bus.subscribe(LoopFailed, lambda event: self._failed.labels(event.loop).inc())

    def page(self) -> tuple[str, bytes]:
        """Return the content type and the text."""
        return CONTENT_TYPE_LATEST, generate_latest(self._registry)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Read the views; without an answer only `pgqueue_views_read` is told, as 0."""
        with self._lock:
            if time.monotonic() - self._seen_at >= FRESH:
                self._seen = self._look()
                self._seen_at = time.monotonic()
            return self._seen

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Name nothing in advance: the registry need not ask the database when this is registered."""
        return ()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace="pgqueue", registry=self._registry)

    def _finished(self, event: JobFinished) -> None:
        if event.outcome != "ok":  # these are counted in batches
            self._executions.labels(event.outcome).inc()

    def _look(self) -> list[GaugeMetricFamily]:
        try:
            with connect(
                self._dsn, autocommit=True, application_name="pgqueue metrics", connect_timeout=5
            ) as conn:
                execute(conn, Statement(_SQL["patience"], {}, nothing))
                found = [family for read in READ for family in _allowed(conn, read)]
        except (psycopg.Error, DatabaseUnreachable):  # the health check tells of a database that is away
            found = []
        return [_gauge("views_read", "Whether the views could be read.", (), [(int(bool(found)),)]), *found]


def _allowed(conn: Conn, read: Callable[[Conn], Iterable[GaugeMetricFamily]]) -> list[GaugeMetricFamily]:
    """Read what the role may see: a relay's is shown the outbox alone."""
    try:
        return list(read(conn))
    except psycopg.errors.InsufficientPrivilege:
        return []


def _queues(conn: Conn) -> Iterable[GaugeMetricFamily]:
    rows = _rows(conn, _SQL["queues"])
    yield _gauge(
        "jobs", "Jobs as sampled by a worker; counting stops at 100,000 of a kind.", ("queue", "state"),
        [(row[0], state, row[place]) for row in rows for place, state in enumerate(STATES, 1)],
    )  # fmt: skip
    yield _gauge(
        "oldest_ready_seconds",
        "Age of the oldest job that could run.",
        ("queue",),
        [(r[0], r[5]) for r in rows],
    )
    yield _gauge(
        "sample_age_seconds", "Since when this is the depth.", ("queue",), [(r[0], r[6]) for r in rows]
    )


def _ended(conn: Conn) -> Iterable[GaugeMetricFamily]:
    labels = ("queue", "name", "outcome")
    yield _gauge(
        "ended_last_minute", "Ends of jobs in the last full minute.", labels, _rows(conn, _SQL["ended"])
    )


def _dead(conn: Conn) -> Iterable[GaugeMetricFamily]:
    labels = ("queue", "error_type")
    yield _gauge("dead_last_10_minutes", "New dead letters of 10 minutes.", labels, _rows(conn, _SQL["dead"]))


def _unknown(conn: Conn) -> Iterable[GaugeMetricFamily]:
    text = "Jobs that wait in a queue whose workers do not know their name."
    yield _gauge("unknown_jobs", text, ("queue", "name"), _rows(conn, _SQL["unknown"]))


def _schedules(conn: Conn) -> Iterable[GaugeMetricFamily]:
    rows = _rows(conn, _SQL["schedules"])
    yield _gauge(
        "schedule_late_seconds",
        "How long the next tick is overdue.",
        ("schedule",),
        [(r[0], r[2]) for r in rows],
    )
    yield _gauge(
        "schedule_active", "Whether a schedule makes jobs: 0 if paused, orphan or broken.", ("schedule",),
        [(r[0], int(r[1] == "active")) for r in rows],
    )  # fmt: skip


def _workers(conn: Conn) -> Iterable[GaugeMetricFamily]:
    alive, silent, overrun = _rows(conn, _SQL["workers"])[0]
    yield _gauge("workers", "Worker processes.", ("state",), [("alive", alive), ("silent", silent)])
    yield _gauge("overrun", "Slots kept by handlers that go on after their timeout.", (), [(overrun,)])


def _outbox(conn: Conn) -> Iterable[GaugeMetricFamily]:
    for (name, text), value in zip(OUTBOX, _rows(conn, _SQL["outbox"])[0], strict=True):
        yield _gauge(f"outbox_{name}", text, (), [(value,)])


READ = (_queues, _ended, _dead, _unknown, _schedules, _workers, _outbox)


def _rows(conn: Conn, query: Query) -> Sequence[Row]:
    return execute(conn, Statement(query, {}, table))


def _gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[Sequence[Any]]) -> GaugeMetricFamily:
    """Make a family of gauges; each row ends with its value."""
    made = GaugeMetricFamily(f"pgqueue_{name}", text, labels=labels)
    for row in rows:
        made.add_metric([str(label) for label in row[:-1]], float(row[-1]))
    return made
