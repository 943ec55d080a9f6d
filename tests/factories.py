"""Jobs for the tests of the verbs, and a worker's connection that is stepped by hand.

Nothing here waits for time to pass: `lose` lets a lease run out and `fall_due` lets a delay end by moving the row's
own times.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from pgqueue.claim import Answer, Scope, claim, claim_backlog, claim_few, keyed, suspects
from pgqueue.connection import execute
from pgqueue.job import Buried, Claim, Claimed, Failure, Retried
from pgqueue.lanes import LaneSize, lane_claim, lane_jobs, lane_release, lane_take, route
from pgqueue.round import Leases
from pgqueue.statement import Statement
from pgqueue.worker import connect

T = TypeVar("T")
Connection = psycopg.Connection[Any]

QUEUE = "default"
NAME = "work"
MINUTE = timedelta(minutes=1)
#: 2026-01-01, in microseconds since 2000, as the server sends it.
NEW_YEAR = round(
    (datetime(2026, 1, 1, tzinfo=UTC) - datetime(2000, 1, 1, tzinfo=UTC)).total_seconds() * 1e6
).to_bytes(8, "big")
EVERYTHING = 2**63 - 1
BROKEN = Failure(error_type="ValueError", message="broken", traceback="Traceback: broken")

ENQUEUE = """
SELECT id FROM pgqueue.enqueue_many(%(name)s, %(payloads)s::json, queue => %(queue)s, priority => %(priority)s::int,
  keys => %(keys)s::text[], delay => %(delay)s::interval, max_attempts => %(max_attempts)s::int,
  expires_at => %(expires_at)s::timestamptz, headers => %(headers)s::json)
"""
TABLES = """
SELECT string_agg(format('%I.%I', schemaname, tablename), ', ') FROM pg_catalog.pg_tables
WHERE schemaname = 'pgqueue' AND tablename NOT IN ('alembic_version', 'relay_partition')
"""
ROW = """
SELECT to_jsonb(j) - 'payload' FROM pgqueue.job j WHERE j.id = %s
"""


def enqueue(
    connection: Connection,
    n: int = 1,
    *,
    name: str = NAME,
    queue: str = QUEUE,
    priority: int = 5,
    key: str | None = None,
    delay: timedelta | None = None,
    payload: object = None,
    max_attempts: int | None = None,
    expires_at: str | None = None,
    headers: Mapping[str, object] | None = None,
) -> list[int]:
    """Enqueue n equal jobs in the connection's transaction; return their ids."""
    rows = connection.execute(
        ENQUEUE,
        {
            "name": name, "payloads": json.dumps([payload] * n), "queue": queue, "priority": priority,
            "keys": [key] * n if key is not None else None, "delay": delay, "max_attempts": max_attempts,
            "expires_at": expires_at, "headers": json.dumps(headers) if headers is not None else None,
        },
    )  # fmt: skip
    return [int(row[0]) for row in rows]


def scope(
    queues: Iterable[str] = (QUEUE,), names: Iterable[str] = (NAME,), priorities: Iterable[int] = (5,)
) -> Scope:
    """Say what a claim may take: every priority of the first queue, then of the next."""
    levels = [(queue, priority) for queue in queues for priority in priorities]
    return Scope(queues=[q for q, _ in levels], priorities=[p for _, p in levels], names=list(names))


def claimed(job_id: int = 1, **fields: Any) -> Claimed:
    """Make a claimed row for tests that need no database; `extra` may be given as a dict."""
    extra = fields.pop("extra", None)
    plain: dict[str, Any] = {
        "level": 1, "pos": job_id, "id": job_id, "lease": 7, "name": NAME, "key": None, "attempt": 1,
        "enqueued_at": NEW_YEAR, "extra": json.dumps(extra) if extra is not None else None,
        "payload": "null",
    }  # fmt: skip
    return Claimed(**(plain | fields))


def ids(jobs: Iterable[Claimed]) -> list[int]:
    """Return the ids of claimed jobs, in the order they were claimed."""
    return [job.id for job in jobs]


def token(claimed: Claimed) -> Claim:
    """Return the claim that a finish verb shows."""
    return Claim(claimed.id, claimed.lease)


def retried(delay: float = 60.0) -> Retried:
    """Return the outcome of an attempt that failed and runs again."""
    return Retried(delay=delay, failure=BROKEN)


def buried(reason: str = "permanent") -> Buried:
    """Return the outcome of an attempt that failed for good."""
    return Buried(reason=reason, failure=BROKEN)


def wipe(dsn: str) -> str:
    """Empty every table, so that tests of one file can share a database; return its DSN."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = connection.execute(TABLES).fetchone()
        assert found
        connection.execute(f"TRUNCATE {found[0]}".encode())
    return dsn


def lose(connection: Connection, jobs: Sequence[int]) -> None:
    """Let the leases of these jobs, and of the lanes of their keys, run out."""
    connection.execute(
        "UPDATE pgqueue.lane l SET deadline = clock_timestamp() - interval '1 s' FROM pgqueue.job j "
        "WHERE j.id = ANY (%s) AND l.queue = j.queue AND l.key = j.key AND l.lease = j.lease AND l.lease <> 0",
        [list(jobs)],
    )
    connection.execute(
        "UPDATE pgqueue.job SET deadline = clock_timestamp() - interval '1 s' WHERE id = ANY (%s) AND lease <> 0",
        [list(jobs)],
    )


def fall_due(connection: Connection, jobs: Sequence[int]) -> None:
    """Let the delays of these jobs end."""
    connection.execute(
        "UPDATE pgqueue.job SET run_at = clock_timestamp() - interval '1 s' WHERE id = ANY (%s) AND run_at IS NOT NULL",
        [list(jobs)],
    )


def row(connection: Connection, job_id: int) -> dict[str, Any] | None:
    """Return the columns of a job, None if its row is gone."""
    found = connection.execute(ROW, [job_id]).fetchone()
    return dict(found[0]) if found else None


def state(connection: Connection) -> str:
    """Return everything the finish verbs can change, as one text to compare."""
    found = connection.execute(
        "SELECT jsonb_build_object('job', (SELECT jsonb_agg(j ORDER BY j.id) FROM pgqueue.job j),"
        " 'dead', (SELECT jsonb_agg(d ORDER BY d.id) FROM pgqueue.dead_job d),"
        " 'lane', (SELECT jsonb_agg(l ORDER BY l.queue, l.key, l.slot) FROM pgqueue.lane l),"
        " 'log', (SELECT jsonb_agg(a ORDER BY a.job_id, a.at) FROM pgqueue.attempt_log a),"
        " 'tally', (SELECT jsonb_agg(t) FROM pgqueue.tally t))::text"
    ).fetchone()
    assert found
    return str(found[0])


def explain(connection: Connection, statement: Statement[Any]) -> dict[str, Any]:
    """Execute a statement under EXPLAIN; return its plan, with rows, buffers and WAL."""
    found = connection.execute(
        f"EXPLAIN (ANALYZE, BUFFERS, WAL, FORMAT JSON) {statement.query.text}".encode(),
        dict(statement.params),
    ).fetchone()
    assert found
    return dict(found[0][0]["Plan"])


def nodes(plan: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Walk a plan."""
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def buffers(plan: Mapping[str, Any]) -> int:
    """Count the shared buffers that a plan touched."""
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


class Holder:
    """One worker's connection, in autocommit mode and with a worker's settings."""

    def __init__(self, dsn: str, nonce: int = 1, *, backlog: bool = False, few: bool = False) -> None:
        self.connection = connect(dsn, f"test {nonce}")
        self.leases = Leases(nonce)
        #: Claim as a worker does where the last claim found all it asked for.
        self.backlog, self.few = backlog, few

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()

    def begin(self) -> None:
        """Open a transaction as a round does."""
        self.connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")

    def commit(self) -> None:
        """Commit it."""
        self.connection.execute("COMMIT")

    def rollback(self) -> None:
        """Roll it back."""
        self.connection.execute("ROLLBACK")

    def run(self, statement: Statement[T]) -> T:
        """Run one statement."""
        return execute(self.connection, statement)

    def answer(
        self,
        n: int = 500,
        *,
        of: Scope | None = None,
        floors: Sequence[int] | None = None,
        visibility: timedelta = MINUTE,
        route_floors: Mapping[str, int] | None = None,
    ) -> Answer:
        """Claim fresh jobs under a new lease."""
        of = of or scope()
        if self.backlog or self.few:
            return self._short(n, of, list(floors or [0] * len(of.queues)), visibility, route_floors)
        return self.run(
            claim(
                of, floors or [0] * len(of.queues), n, self.leases.new(), visibility, route_floors or {QUEUE: 0}
            )
        )  # fmt: skip

    def _short(
        self,
        n: int,
        of: Scope,
        floors: list[int],
        visibility: timedelta,
        route_floors: Mapping[str, int] | None,
    ) -> Answer:
        floor = dict(zip(zip(of.queues, of.priorities, strict=True), floors, strict=True))
        whole = scope(dict.fromkeys(of.queues), of.names, range(10))
        starts = [floor.get(level, 0) for level in zip(whole.queues, whole.priorities, strict=True)]
        form = claim_few if self.few else claim_backlog
        answer = self.run(form(whole, starts, n, self.leases.new(), visibility))
        return replace(answer, keyed=self.run(keyed(route_floors or {QUEUE: 0})))

    def claim(
        self, n: int = 500, *, of: Scope | None = None, visibility: timedelta = MINUTE
    ) -> list[Claimed]:
        """Claim fresh jobs under a new lease; return them in order."""
        return self.answer(n, of=of, visibility=visibility).jobs

    def suspects(
        self,
        n: int = 8,
        *,
        of: Scope | None = None,
        ceilings: Sequence[int] | None = None,
        low: int = 0,
        high: int = 0,
    ) -> list[Claimed]:
        """Claim jobs that lost their worker."""
        of = of or scope()
        return self.run(
            suspects(
                of, ceilings or [EVERYTHING] * len(of.queues), n, self.leases.new(), MINUTE, low=low, high=high
            )
        )  # fmt: skip

    def route(self, *queues: str) -> None:
        """Make sure that every key of these queues has its lane."""
        self.run(route(dict.fromkeys(queues or (QUEUE,), 0)))

    def lanes(
        self,
        lanes: int = 100,
        depth: int = 1,
        *,
        total: int = 500,
        of: Scope | None = None,
        visibility: timedelta = MINUTE,
        routing: bool = True,
    ) -> list[Claimed]:
        """Route, then claim lanes and jobs of them; return the jobs by id.

        With `backlog`, common lanes as in a backlog first, then what is left, as a worker does in two rounds.
        """
        of = of or scope()
        if routing:
            self.route(*dict.fromkeys(of.queues))
        size = LaneSize(lanes=lanes, depth=depth, total=total)
        found = self.lane_backlog(size, of, visibility) if self.backlog else []
        left = LaneSize(lanes=lanes - len({job.pos for job in found}), depth=depth, total=total - len(found))
        if left.lanes and left.total:
            rest = self.run(lane_claim(of, [0] * len(of.queues), left, self.leases.new(), visibility))
            found += rest
        return sorted(found, key=lambda job: job.id)

    def lane_backlog(
        self, size: LaneSize, of: Scope | None = None, visibility: timedelta = MINUTE
    ) -> list[Claimed]:
        """Claim common lanes of a backlog and jobs of them; return the jobs, with the positions of their lanes."""
        of, lease = of or scope(), self.leases.new()
        whole = scope(dict.fromkeys(of.queues), of.names, range(10))
        before = self.connection.info.transaction_status
        if before == TransactionStatus.IDLE:
            self.begin()
        taken = self.run(lane_take(whole, [0] * len(whole.queues), size.lanes, lease, visibility))
        found = self.run(lane_jobs(whole, size, lease, visibility))
        if before == TransactionStatus.IDLE:
            self.commit()
        queues = dict(enumerate(dict.fromkeys(of.queues)))
        places = {(lane.queue, lane.key): lane.pos for lane in taken}
        return [job._replace(pos=places[queues[(job.level - 1) // 10], job.key or ""]) for job in found]

    def give_back(self, lane: tuple[str, str], lease: int, wait: float = 0.0) -> None:
        """Give a (queue, key) lane back."""
        self.run(lane_release([lane], lease, wait))
