"""Pressure: when a queue refuses jobs because too many wait, or wait for too long.

A queue with `max_depth` or `max_age` is full while its depth sample is over one of them. The sample is a few
seconds old, so the limit is soft: what is enqueued in between passes. A sample older than 30 s says nothing, and
the queue takes jobs. The check is part of the enqueue statement; a queue without limits pays one look at the
settings of its queue, which that statement makes in any case.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from pgqueue.enqueue import as_seconds, check_name, check_range
from pgqueue.errors import BadOption
from pgqueue.statement import Row, Statement, load, scalar

#: The sample stops counting here.
DEEPEST: Final = 100_000
_LONGEST_AGE = 365 * 86_400.0

_SQL = load("pgqueue", "pressure")


def limit(
    queue: str, *, max_depth: int | None = None, max_age: float | timedelta | None = None
) -> Statement[Row]:
    """Set the limits of a queue; None leaves one as it is, 0 lifts it. Returns (max_depth, max_age_s) as they are now.

    `max_depth`: jobs that are ready, blocked or in flight, up to 100,000. `max_age`: seconds that the oldest ready
    job has waited.
    """
    check_name("queue", queue)
    check_range("max_depth", max_depth, 0, DEEPEST, ": the sample counts no further; limit the age instead")
    seconds = None if max_age is None else as_seconds(max_age)
    if seconds is not None and not 0 <= seconds <= _LONGEST_AGE:
        raise BadOption("max_age", f"{max_age!r} is not between 0 s and a year")
    params = {"queue": queue, "max_depth": max_depth, "max_age_s": seconds}
    return Statement(_SQL["limit"], params, lambda rows: rows[0])


def full(queue: str) -> Statement[int | None]:
    """Return after how many seconds to try again where the queue is full, None where it takes jobs."""
    return Statement(_SQL["full"], {"queue": queue}, scalar)
