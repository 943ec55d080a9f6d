"""The limit line: claim and ack of our own table from Python on one connection, with no handler and no thread.

What no worker of ours on one connection can pass: its own statements, pipelined as it does it, rows read,
payloads left as text.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from benchmarks.program import QUEUE, main, noting, setting
from benchmarks.systems import ours

if TYPE_CHECKING:
    from pgqueue.job import Claimed

SYSTEM = replace(
    ours.SYSTEM,
    name="limit",
    title="limit line",
    settings={
        "loop": "claim of 500 and ack of the last 500 in one transaction and one round trip, as the worker does it"
    },
    modes=frozenset({"drain", "large"}),
)

BATCH = 500
VISIBILITY = timedelta(seconds=30)


class Limit(ours.Ours):
    """The same table and the same statements, nothing else."""

    def work(self, note: Callable[[int], None]) -> None:
        from pgqueue.claim import Scope, claim, claim_backlog
        from pgqueue.finish import ack
        from pgqueue.pipeline import Pipeline
        from pgqueue.worker import connect

        connection = connect(setting("DSN"), "limit")
        scope = Scope(queues=[QUEUE] * 10, priorities=list(range(10)), names=["bench"])
        floors, leases = [0] * 10, itertools.count(random.randrange(2**31) << 32)
        done: list[Claimed] = []
        texts: list[str] = []
        while True:
            with Pipeline(connection) as p:
                p.begin()
                acked = p.send(ack(done)) if done else None
                if len(done) == BATCH:  # a backlog
                    claimed = p.send(claim_backlog(scope, floors, BATCH, next(leases) + 1, VISIBILITY))
                else:
                    claimed = p.send(claim(scope, floors, BATCH, next(leases) + 1, VISIBILITY, {QUEUE: 0}))
                p.commit()
            if acked is not None and acked.result() is not None:
                raise SystemExit("the ack found jobs that were not ours")
            done = claimed.result().jobs
            for job in done[-1:]:
                floors[job.level - 1] = job.pos
            if done and not texts:
                note(json.loads(done[0].payload)["n"])
            texts.extend(job.payload for job in done)
            if not done:
                with noting:
                    for text in texts[1:]:
                        note(json.loads(text)["n"])
                    texts.clear()
                time.sleep(0.005)


if __name__ == "__main__":
    main(Limit())
