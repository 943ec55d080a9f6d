"""Declare: a job type's policy goes into the database, where every producer finds it.

Each worker does it at start and `pgqueue sync` on demand; the last writer wins. Policy set for a single job
at enqueue stays on its row and is not changed by a later declaration.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pgqueue.backoff import Backoff
from pgqueue.statement import Statement, load, nothing

OnDead = Literal["continue", "block"]

_SQL = load("pgqueue", "declare")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The policy of a job type; None = the built-in default.

    `timeout` in seconds, math.inf = none. `limit`: how many jobs of this type run at once in a queue, whatever the
    number of workers; `rate`: how many begin in a second; `key_limit` and `key_rate`: the same for the jobs of each
    key. Limits that were set while jobs run stay as they are (see `pgqueue.limits`). `sheddable`: dropped and counted
    where its queue is full.
    `on_dead`: what becomes of an ordering key when its head dies: continue, or block until a person decides.
    `keep`: for how many seconds finished jobs stay in the history, with what the handler returned if `result`.
    """

    name: str
    queue: str | None = None
    priority: int | None = None
    max_attempts: int | None = None
    backoff: Backoff | None = None
    timeout: float | None = None
    limit: int | None = None
    rate: float | None = None
    key_limit: int | None = None
    key_rate: float | None = None
    sheddable: bool = False
    on_dead: OnDead | None = None
    keep: float | None = None
    result: bool = False


def declare(policies: Iterable[Policy]) -> Statement[None]:
    """Write or update the job types, in name order."""
    types = [
        {
            "name": p.name,
            "queue": p.queue,
            "priority": p.priority,
            "max_attempts": p.max_attempts,
            "backoff": json.loads(p.backoff.to_json()) if p.backoff else None,
            "timeout_s": "Infinity" if p.timeout == math.inf else p.timeout,
            "slots": p.limit,
            "rate_per_s": p.rate,
            "key_slots": p.key_limit,
            "key_rate_per_s": p.key_rate,
            "sheddable": p.sheddable,
            "on_dead": p.on_dead,
            "keep_s": p.keep,
        }
        for p in policies
    ]
    return Statement(_SQL["declare"], {"types": json.dumps(types)}, nothing)
