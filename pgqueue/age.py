"""Age: a job that has waited long goes up one priority, so that a flood of urgent jobs starves nobody. By turn."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from pgqueue.enqueue import check_name
from pgqueue.errors import BadOption
from pgqueue.statement import Row, Statement, load, nothing

_SQL = load("pgqueue", "age")


def age(period: timedelta) -> Statement[int]:
    """Move up to 1,000 jobs of each level up, in queues that ask for it; the answer is how many.

    Does nothing unless it is this process's turn; the next turn comes after `period`. Passes locked rows.
    """
    return Statement(_SQL["age"], {"period": period}, _count)


def age_queue(queue: str, after: timedelta) -> Statement[None]:
    """Let jobs of a queue go up one priority each time they have waited for `after`; zero: never again."""
    check_name("queue", queue)
    seconds = after.total_seconds()
    if seconds and not 1 <= seconds <= 365 * 86_400:
        raise BadOption("age_after", f"{seconds:g} s is not between 1 s and 365 days, nor 0 (never)")
    return Statement(_SQL["age_queue"], {"queue": queue, "after": seconds or None}, nothing)


def _count(rows: Sequence[Row]) -> int:
    return int(rows[0][0]) if rows else 0
