"""Cancel: a job that waits is gone at once; one that runs is asked to stop, and never runs again.

The request for a running job is a row of `job_signal`. Its worker's pulse delivers it within about a second; if the
worker dies first, or the attempt fails and is to be retried, whoever claims the job next drops it unrun. So once the
cancel is committed no further attempt begins. A handler that returns before it notices has done its work all the
same: cancelling takes nothing back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pgqueue.statement import Statement, column, load, scalar

_SQL = load("pgqueue", "cancel")


class Cancellation(NamedTuple):
    """What became of one id.

    `cancelled`: its row is gone. `requested`: it runs, or is being claimed; its worker was asked to stop. `dead`: it
    is a dead letter (discard it instead). `gone`: it is done, or never was.
    """

    id: int
    state: Literal["cancelled", "requested", "dead", "gone"]


def cancel(ids: Sequence[int]) -> Statement[list[Cancellation]]:
    """Cancel jobs; answers in the order of the ids. Works in the caller's transaction; locks no job that runs."""
    return Statement(_SQL["cancel"], {"ids": list(ids)}, lambda rows: [Cancellation(*row) for row in rows])


def waiting(
    *, name: str | None = None, queue: str | None = None, n: int = 1_000, after: int = 0
) -> Statement[list[int]]:
    """Return the ids of up to n waiting jobs above `after`, lowest first. Takes no lock."""
    return Statement(_SQL["waiting"], {"name": name, "queue": queue, "n": n, "after": after}, column)


def count_waiting(*, name: str | None = None, queue: str | None = None) -> Statement[int]:
    """Count the waiting jobs of a name or queue: reads the live table."""
    return Statement(_SQL["count"], {"name": name, "queue": queue}, scalar)
