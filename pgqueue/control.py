"""Control: pause and resume a queue or a job type, and see every queue at a glance.

Pausing is a row that workers look at once a second. What runs goes on; what waits counts as blocked, not as ready,
so a paused queue raises no alarm about its age.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgqueue.statement import Row, Statement, column, load, scalar

_SQL = load("pgqueue", "control")


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """One queue. The depth is as sampled, None where no worker has sampled it; `paused_names`: its paused job types."""

    name: str
    paused: bool
    workers: int
    ready: int | None
    delayed: int | None
    in_flight: int | None
    blocked: int | None
    oldest_ready_s: float | None
    capped: bool | None
    sampled_s_ago: float | None
    paused_names: tuple[str, ...]


def pause_queue(name: str) -> Statement[bool]:
    """Pause a queue; False if nothing else was known of it (it is paused all the same)."""
    return Statement(_SQL["pause_queue"], {"name": name, "paused": True}, scalar)


def resume_queue(name: str) -> Statement[bool]:
    """Resume a queue; False if nothing was known of it."""
    return Statement(_SQL["pause_queue"], {"name": name, "paused": False}, scalar)


def pause_name(name: str) -> Statement[bool]:
    """Pause the jobs of one name in every queue; False if there is no such job type."""
    return Statement(_SQL["pause_name"], {"name": name, "paused": True}, _known)


def resume_name(name: str) -> Statement[bool]:
    """Resume the jobs of one name; False if there is no such job type."""
    return Statement(_SQL["pause_name"], {"name": name, "paused": False}, _known)


def names() -> Statement[list[str]]:
    """List the declared job types."""
    return Statement(_SQL["names"], {}, column)


def queues() -> Statement[list[Queue]]:
    """List every queue that has settings, job types, a sample or a worker."""
    return Statement(_SQL["queues"], {}, lambda rows: [_queue(r) for r in rows])


def unheard(name: str) -> Queue:
    """Return a queue of which nothing is known but its jobs."""
    return Queue(
        name=name, paused=False, workers=0, ready=None, delayed=None, in_flight=None, blocked=None,
        oldest_ready_s=None, capped=None, sampled_s_ago=None, paused_names=(),
    )  # fmt: skip


def unsampled() -> Statement[list[str]]:
    """List the queues that have jobs and no fresh depth sample, because no worker serves them."""
    return Statement(_SQL["unsampled"], {}, column)


def _known(rows: Sequence[Row]) -> bool:
    return bool(rows)


def _queue(r: Row) -> Queue:
    return Queue(
        name=r[0], paused=r[1], workers=r[2], ready=r[3], delayed=r[4], in_flight=r[5], blocked=r[6],
        oldest_ready_s=r[7], capped=r[8], sampled_s_ago=r[9], paused_names=tuple(r[10]),
    )  # fmt: skip
