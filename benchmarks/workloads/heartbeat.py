"""Heartbeats of 5,000 jobs in flight for 20 minutes while an old snapshot is held.

The 20 minutes are simulated: the product's own statement runs with a clock that is moved on by ten seconds a beat,
so that exactly the row versions are written that 20 minutes would write, and none of them can be removed.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from datetime import timedelta

import psycopg

from benchmarks.bench import Case, Workload, cost
from benchmarks.plan import explain
from benchmarks.program import QUEUE
from benchmarks.work import RunFailed
from pgqueue.claim import Scope, claim
from pgqueue.connection import execute
from pgqueue.heartbeat import heartbeat
from pgqueue.job import Claim
from pgqueue.worker import connect

MINUTES = 20
BEAT_S = 10
VISIBILITY = timedelta(seconds=30)
CLOCK = "clock_timestamp()"


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Claim n jobs, pin a snapshot, beat for 20 simulated minutes; cost per beat of the first and last 5 minutes."""
    case.fill(n)
    leases = itertools.count(random.randrange(1, 2**31) << 32)
    scope = Scope(queues=[QUEUE] * 10, priorities=list(range(10)), names=["bench"])
    buffers: list[float] = []
    seconds: list[float] = []
    with connect(case.dsn, "heartbeat") as connection, case.connect() as pin:
        pin.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        pin.execute("SELECT count(*) FROM pg_catalog.pg_class")
        held: list[Claim] = []
        floors = [0] * 10
        while len(held) < n:
            found = execute(
                connection, claim(scope, floors, 500, next(leases) + 1, VISIBILITY, {QUEUE: 0})
            ).jobs
            if not found:
                raise RunFailed(f"{len(held)} of {n} jobs could be claimed")
            floors[found[-1].level - 1] = found[-1].pos
            held.extend(Claim(job.id, job.lease) for job in found)
        for beat in range(1, MINUTES * 60 // BEAT_S + 1):
            statement = heartbeat(held, VISIBILITY)
            now = f"({CLOCK} + interval '{beat * BEAT_S} s')"
            text = statement.query.text.replace(CLOCK, now)
            began = time.perf_counter()
            buffers.append(explain(connection, text, statement.params))
            seconds.append(time.perf_counter() - began)
        late = connection.execute(
            f"SELECT count(*) FROM pgqueue.job WHERE deadline <= {now}"  # noqa: S608 - a number of our own
        ).fetchone()
        if late is None or late[0]:
            raise RunFailed(f"{late} leases ran out although every beat came in time")
    part = len(buffers) // 4
    return {
        "heartbeat.buffers": sum(buffers[-part:]) / sum(buffers[:part]),
        "heartbeat.ms": sum(seconds[-part:]) / sum(seconds[:part]),
        "heartbeat.first": 1000 * sum(seconds[:part]) / part,
        "heartbeat.last": 1000 * sum(seconds[-part:]) / part,
    }


WORKLOAD = Workload(
    name="heartbeat",
    text=f"Jobs in flight for {MINUTES} minutes (a beat every {BEAT_S} s on a clock that is moved on) under a pinned "
    "snapshot: the last five minutes by the first five.",
    quantities=[
        cost("heartbeat.buffers", "last / first", "buffers of a heartbeat, last 5 min by first"),
        cost("heartbeat.ms", "last / first", "time of a heartbeat, last 5 min by first"),
        cost("heartbeat.first", "ms", "mean heartbeat, first 5 min"),
        cost("heartbeat.last", "ms", "mean heartbeat, last 5 min"),
    ],
    n=5_000,
    measure=measure,
    most=50_000,
)
