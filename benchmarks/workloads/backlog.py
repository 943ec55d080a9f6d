"""A large backlog: what one claim of 500 costs with 10,000 jobs waiting and with the whole backlog."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import psycopg

from benchmarks.bench import Case, Workload, cost
from benchmarks.figures import quantile
from benchmarks.program import QUEUE
from benchmarks.server import settle
from benchmarks.work import RunFailed
from pgqueue.claim import Scope, claim
from pgqueue.connection import execute
from pgqueue.finish import ack
from pgqueue.worker import connect

SMALL = 10_000
BATCH = 500
#: Claims before the measured ones: plans are made and pages are warm.
WARM = 2
CLAIMS = 14


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Measure claims at 10,000 waiting jobs, fill up to n, measure again."""
    small = min(SMALL, n)
    case.fill(small)
    buffers, seconds = claims(case)
    with case.connect(autocommit=True) as connection:
        connection.execute("TRUNCATE pgqueue.job")
    case.fill(n)
    many_buffers, many_seconds = claims(case)
    return {
        "backlog.buffers": many_buffers,
        "backlog.buffers.small": buffers,
        "backlog.buffers.share": many_buffers / buffers,
        "backlog.ms": many_seconds * 1000,
        "backlog.ms.small": seconds * 1000,
        "backlog.ms.share": many_seconds / seconds,
    }


def claims(case: Case) -> tuple[float, float]:
    """Claim and ack as a worker does, each claim in turn timed or explained; medians of buffers and seconds."""
    settle(case.dsn)
    leases = itertools.count(random.randrange(1, 2**31) << 32)
    scope = Scope(queues=[QUEUE] * 10, priorities=list(range(10)), names=["bench"])
    floors = [0] * 10
    buffers: list[float] = []
    seconds: list[float] = []
    with connect(case.dsn, "backlog") as connection:
        for turn in range(WARM + CLAIMS):
            statement = claim(scope, floors, BATCH, next(leases) + 1, timedelta(seconds=30), {QUEUE: 0})
            if turn % 2 and turn >= WARM:
                lease = statement.params["lease"]
                buffers.append(explain(connection, statement.query.text, statement.params))
                rows = connection.execute(
                    "SELECT j.id, j.lease, j.pos FROM pgqueue.job j WHERE j.lease = %s", (lease,)
                ).fetchall()
                floors[5] = max(row[2] for row in rows)
                connection.execute("DELETE FROM pgqueue.job j WHERE j.lease = %s", (lease,))
                continue
            began = time.perf_counter()
            answer = execute(connection, statement)
            if turn >= WARM:
                seconds.append(time.perf_counter() - began)
            if len(answer.jobs) != BATCH:
                raise RunFailed(f"a claim of {BATCH} brought {len(answer.jobs)}")
            for job in answer.jobs[-1:]:
                floors[job.level - 1] = job.pos
            execute(connection, ack(answer.jobs))
    return quantile(buffers, 0.5), quantile(seconds, 0.5)


def explain(connection: psycopg.Connection[Any], text: str, params: Mapping[str, object]) -> float:
    """Run a statement under EXPLAIN; return the buffers it touched."""
    command = "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) " + text
    row = connection.execute(command, params).fetchone()
    if row is None:
        raise RunFailed("EXPLAIN brought no plan")
    plan = row[0][0]["Plan"]
    return float(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


WORKLOAD = Workload(
    name="backlog",
    text=f"Claims of {BATCH} with {SMALL:,} jobs waiting and with the whole backlog, on one connection.",
    quantities=[
        cost("backlog.buffers", "buffers/claim", "buffers of a claim, large backlog"),
        cost("backlog.buffers.small", "buffers/claim", "buffers of a claim, 10,000 waiting"),
        cost("backlog.buffers.share", "large / small", "buffers of a claim, large by small"),
        cost("backlog.ms", "ms", "time of a claim, large backlog"),
        cost("backlog.ms.small", "ms", "time of a claim, 10,000 waiting"),
        cost("backlog.ms.share", "large / small", "time of a claim, large by small"),
    ],
    n=1_000_000,
    measure=measure,
)
