"""The limit line: claim and ack of our own table from Python on one connection, with no handler and no thread.

What the statements of a worker leave possible on one connection: pipelined as it does it, two rounds under way while
there is a backlog, rows read, payloads left as text.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.program import QUEUE, main, noting, setting
from benchmarks.systems import ours

if TYPE_CHECKING:
    import psycopg

    from pgqueue.claim import Answer
    from pgqueue.job import Claimed
    from pgqueue.pipeline import Pending, Pipeline

SYSTEM = replace(
    ours.SYSTEM,
    name="limit",
    title="limit line",
    settings={
        "loop": "claim of 500 and ack of the last 500 in one transaction, two of them under way, as the worker does it"
    },
    modes=frozenset({"drain", "large"}),
)

BATCH = 500
VISIBILITY = timedelta(seconds=30)


class Round(NamedTuple):
    """A round under way: where its claim starts, and its answers."""

    pipeline: Pipeline
    starts: list[int]
    acked: Pending[list[int] | None] | None
    claimed: Pending[Answer]


class Limit(ours.Ours):
    """The same table and the same statements, nothing else."""

    def work(self, note: Callable[[int], None]) -> None:
        from pgqueue.worker import connect

        with connect(setting("DSN"), "limit") as connection:
            self.drain(connection, note)

    def drain(self, connection: psycopg.Connection[Any], note: Callable[[int], None]) -> None:
        """Claim and ack for ever, and note what was claimed when nothing is left."""
        from pgqueue.claim import Scope, claim, claim_backlog
        from pgqueue.finish import ack
        from pgqueue.flights import MOST
        from pgqueue.pipeline import Pipeline

        scope = Scope(queues=[QUEUE] * 10, priorities=list(range(10)), names=["bench"])
        floors, leases = [0] * 10, itertools.count(random.randrange(2**31) << 32)
        done: list[Claimed] = []
        texts: list[str] = []
        away: deque[Round] = deque()
        backlog = False
        while True:
            while len(away) < (MOST if backlog else 1):
                starts = behind(away[-1].starts, floors) if away else list(floors)
                with (p := Pipeline(connection)).departing():
                    p.begin()
                    acked = p.send(ack(done)) if done else None
                    if backlog:
                        claimed = p.send(claim_backlog(scope, starts, BATCH, next(leases) + 1, VISIBILITY))
                    else:
                        claimed = p.send(
                            claim(scope, starts, BATCH, next(leases) + 1, VISIBILITY, {QUEUE: 0})
                        )
                    p.commit()
                away.append(Round(p, starts, acked, claimed))
                done = []
            landed = away.popleft()
            landed.pipeline.land()
            if landed.acked is not None and landed.acked.result() is not None:
                raise SystemExit("the ack found jobs that were not ours")
            jobs = landed.claimed.result().jobs
            backlog = len(jobs) == BATCH
            done += jobs
            for job in jobs[-1:]:
                floors[job.level - 1] = job.pos
            if jobs and not texts:
                note(json.loads(jobs[0].payload)["n"])
            texts.extend(job.payload for job in jobs)
            if not done and not away:
                with noting:
                    for text in texts[1:]:
                        note(json.loads(text)["n"])
                    texts.clear()
                time.sleep(0.005)


def behind(front: list[int], floors: list[int]) -> list[int]:
    """Return where a claim starts behind a full one: so many jobs take up at least as many positions."""
    return [max(floor, start + BATCH) if floor else 0 for start, floor in zip(front, floors, strict=True)]


if __name__ == "__main__":
    main(Limit())
