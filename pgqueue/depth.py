"""Depth: how much waits, exactly (for people) or as sampled (for machines)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgqueue.statement import Row, Statement, load, nothing, scalar

_SQL = load("pgqueue", "depth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """One queue. `capped`: counting stopped at 100,000 rows of a kind; `age` seconds since it was counted."""

    queue: str
    ready: int
    delayed: int
    in_flight: int
    blocked: int
    oldest_ready_s: float
    capped: bool
    age: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Jobs that wait in a queue whose workers do not know their name; `jobs` stops at 1,000 of each priority."""

    queue: str
    name: str
    jobs: int
    oldest_s: float


def unknown() -> Statement[list[Unknown]]:
    """Find up to 100 (queue, name) whose jobs wait for a worker that knows them. Costs the same at any backlog."""
    return Statement(_SQL["unknown"], {}, _unknown)


def depth() -> Statement[list[Depth]]:
    """Count every queue that has jobs; up to a second per million rows."""
    return Statement(_SQL["depth"], {}, _read)


def due(queues: Sequence[str]) -> Statement[int]:
    """Count the delayed jobs of these queues whose time has come and that no worker has made ready yet."""
    return Statement(_SQL["due"], {"queues": list(queues)}, scalar)


def gauge(queues: Sequence[str] | None = None) -> Statement[list[Depth]]:
    """Read the sampled depth: one row a queue, whatever the backlog."""
    return Statement(_SQL["gauge"], {"queues": None if queues is None else list(queues)}, _read)


def sample(queues: Sequence[str]) -> Statement[None]:
    """Sample the queues whose gauge is older than 5 s; one process at a time per queue. Needs a transaction."""
    return Statement(_SQL["sample"], {"queues": list(queues)}, nothing)


def _unknown(rows: Sequence[Row]) -> list[Unknown]:
    return [Unknown(queue=r[0], name=r[1], jobs=r[2], oldest_s=r[3]) for r in rows]


def _read(rows: Sequence[Row]) -> list[Depth]:
    return [
        Depth(
            queue=r[0],
            ready=r[1],
            delayed=r[2],
            in_flight=r[3],
            blocked=r[4],
            oldest_ready_s=r[5],
            capped=r[6],
            age=r[7],
        )
        for r in rows
    ]
