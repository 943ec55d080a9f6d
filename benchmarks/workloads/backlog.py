"""A large backlog: what one claim of 500 costs with 10,000 jobs waiting, with n, and with five times n.

The three are databases of one server, and their claims take turns, so that all share the machine's moods.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import psycopg

from benchmarks.bench import Case, Workload, cost
from benchmarks.plan import explain
from benchmarks.program import QUEUE
from benchmarks.server import settle
from benchmarks.work import RunFailed
from pgqueue.claim import Scope, claim, claim_backlog
from pgqueue.connection import execute
from pgqueue.finish import ack
from pgqueue.job import Claim
from pgqueue.statement import Statement
from pgqueue.worker import connect

SMALL, TIMES = 10_000, 5
BATCH = 500
#: Claims before the measured ones: plans are made and pages are warm.
WARM = 2
#: Measured claims before the small backlog would run out, and how often it is filled anew.
CLAIMS, PASSES = 16, 3
#: What all passes together claim.
LEAST = PASSES * (WARM + CLAIMS) * BATCH
VISIBILITY = timedelta(seconds=30)
SCOPE = Scope(queues=[QUEUE] * 10, priorities=list(range(10)), names=["bench"])
LEASES = itertools.count(random.randrange(1, 2**31) << 32)


@dataclass(slots=True)
class Backlog:
    """A backlog, a worker's connection to it, and what its claims cost."""

    connection: psycopg.Connection[Any]
    floors: list[int] = field(default_factory=lambda: [0] * 10)
    buffers: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    backlog: bool = False

    def timed(self, *, kept: bool) -> None:
        """Claim and ack as a worker does; note the claim's time."""
        began = time.perf_counter()
        answer = execute(self.connection, self._claim())
        if kept:
            self.seconds.append(time.perf_counter() - began)
        self._done([(job.id, job.lease, job.pos) for job in answer.jobs])

    def explained(self) -> None:
        """Claim and ack; note the buffers of the claim."""
        statement = self._claim()
        self.buffers.append(explain(self.connection, statement.query.text, statement.params))
        rows = self.connection.execute(
            "SELECT j.id, j.lease, j.pos FROM pgqueue.job j WHERE j.lease = %s", (statement.params["lease"],)
        )
        self._done(rows.fetchall())

    def _claim(self) -> Statement[Any]:
        if self.backlog:
            return claim_backlog(SCOPE, self.floors, BATCH, next(LEASES) + 1, VISIBILITY)
        self.backlog = True  # as a worker does once a claim has brought all it asked for
        return claim(SCOPE, self.floors, BATCH, next(LEASES) + 1, VISIBILITY, {QUEUE: 0})

    def _done(self, rows: Sequence[tuple[int, int, int]]) -> None:
        if len(rows) != BATCH:
            raise RunFailed(f"a claim of {BATCH} brought {len(rows)}")
        self.floors[5] = max(pos for _, _, pos in rows)
        if execute(self.connection, ack([Claim(id_, lease) for id_, lease, _ in rows])) is not None:
            raise RunFailed("the ack found jobs that were not ours")


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Fill n and five times n; let their claims take turns with those of a fresh small backlog, in three passes."""
    with ExitStack() as stack:
        five = stack.enter_context(copied(case))
        empty = stack.enter_context(copied(case))
        n = max(n, LEAST)
        case.fill(n, rest=False)
        five.fill(TIMES * n, rest=False)
        large = [Backlog(stack.enter_context(connect(c.dsn, "backlog"))) for c in (case, five)]
        buffers, seconds = [], []
        for _ in range(PASSES):
            with copied(empty) as small:
                small.fill(SMALL, rest=False)
                for rested in (case, five, small):
                    settle(rested.dsn)
                with connect(small.dsn, "backlog") as connection:
                    backlogs = [Backlog(connection), *large]
                    for turn in range(WARM + CLAIMS):
                        for backlog in backlogs:
                            if turn % 2 and turn >= WARM:
                                backlog.explained()
                            else:
                                backlog.timed(kept=turn >= WARM)
                    buffers += backlogs[0].buffers
                    seconds += backlogs[0].seconds
    found = {
        "backlog.buffers.small": statistics.median(buffers), "backlog.ms.small": 1000 * statistics.median(seconds),
    }  # fmt: skip
    for suffix, backlog in zip(("", ".five"), large, strict=True):
        found |= {
            f"backlog.buffers{suffix}": statistics.median(backlog.buffers),
            f"backlog.buffers.share{suffix}": statistics.median(backlog.buffers) / statistics.median(buffers),
            f"backlog.ms{suffix}": 1000 * statistics.median(backlog.seconds),
            f"backlog.ms.share{suffix}": statistics.median(
                a / b for a, b in zip(backlog.seconds, seconds, strict=True)
            ),
        }
    return found


@contextmanager
def copied(case: Case) -> Iterator[Case]:
    """Give a copy of the case's database, to which nobody may be connected."""
    copy = replace(case, database=case.server.create(case.database))
    try:
        yield copy
    finally:
        case.server.drop(copy.database)


WORKLOAD = Workload(
    name="backlog",
    text=f"Claims of {BATCH} on one connection with {SMALL:,} jobs waiting, with n and with {TIMES} n, in turn on "
    "three databases, each vacuumed, analysed and checkpointed before every pass. Medians; of the times also those of "
    "the ratios turn by turn.",
    quantities=[
        cost("backlog.buffers.small", "buffers/claim", "buffers of a claim, 10,000 waiting"),
        cost("backlog.buffers", "buffers/claim", "buffers of a claim, n waiting"),
        cost("backlog.buffers.five", "buffers/claim", "buffers of a claim, 5 n waiting"),
        cost("backlog.buffers.share", "n / 10,000", "buffers of a claim, n by 10,000"),
        cost("backlog.buffers.share.five", "5 n / 10,000", "buffers of a claim, 5 n by 10,000"),
        cost("backlog.ms.small", "ms", "time of a claim, 10,000 waiting"),
        cost("backlog.ms", "ms", "time of a claim, n waiting"),
        cost("backlog.ms.five", "ms", "time of a claim, 5 n waiting"),
        cost("backlog.ms.share", "n / 10,000", "time of a claim, n by 10,000"),
        cost("backlog.ms.share.five", "5 n / 10,000", "time of a claim, 5 n by 10,000"),
    ],
    n=1_000_000,
    measure=measure,
)
