"""Change: another priority, queue or payload for jobs that wait.

    execute(conn, reprioritise([17], 0))
    execute(conn, move([17, 18], "bulk"))
    execute(conn, edit(17, '{"order_id": 1}'))

A job that runs is never touched, nor waited for: the answer says "held". The same in SQL: `pgqueue.reprioritise`,
`pgqueue.move`, `pgqueue.edit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pgqueue.enqueue import check_name, check_range
from pgqueue.statement import Row, Statement, load, scalar

#: held: it runs, or somebody has the row just now; dead: a dead letter; gone: done, or never was.
State = Literal["changed", "held", "dead", "gone"]

_SQL = load("pgqueue", "change")


class Change(NamedTuple):
    """What became of one job."""

    id: int
    state: State


def reprioritise(ids: Sequence[int], priority: int) -> Statement[list[Change]]:
    """Give waiting jobs another priority, behind those that have it already; answers in the order of ids.

    A job with an ordering key keeps its place among the jobs of its key: the lane has the priority of its head.
    """
    check_range("priority", priority, 0, 9, " (lower runs first)")
    return Statement(_SQL["reprioritise"], {"ids": list(ids), "priority": priority}, _changes)


def move(ids: Sequence[int], queue: str) -> Statement[list[Change]]:
    """Move waiting jobs to the end of another queue; answers in the order of ids.

    Among the jobs of an ordering key they stand by their ids there too. A dedup key stays taken where it was taken.
    """
    check_name("queue", queue)
    return Statement(_SQL["move"], {"ids": list(ids), "queue": queue}, _changes)


def edit(job_id: int, payload: str) -> Statement[State]:
    """Give one waiting job, or a dead letter, another payload (JSON text); nothing here knows the handler's type."""
    return Statement(_SQL["edit"], {"id": job_id, "payload": payload}, scalar)


def _changes(rows: Sequence[Row]) -> list[Change]:
    return [Change(*row) for row in rows]
