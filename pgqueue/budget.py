"""The retry budget: retries must not add a second load to what is already failing.

Per queue and over all workers, a retry at its backoff costs a token, and tokens come with one in ten executions or
one a second, whichever is more (Google's SRE book, chapter 21, "Handling Overload", names the 10 %). A failure that
finds no token is not lost and not counted differently: it waits for the far half of the longest backoff instead,
so that an outage meets one trickle and not the sum of all backoffs. First executions are never held back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pgqueue.statement import Statement, load

_SQL = load("pgqueue", "budget")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a worker has run in a queue since its last report, and how many tokens it wants."""

    queue: str
    ran: int
    want: int


def draw(reports: Sequence[Report]) -> Statement[dict[str, int]]:
    """Report executions and take tokens; returns what was granted, by queue. One short row lock a queue."""
    rows = [{"queue": r.queue, "ran": r.ran, "want": r.want} for r in reports]
    return Statement(
        _SQL["draw"], {"reports": json.dumps(rows)}, lambda found: {row[0]: row[1] for row in found}
    )
