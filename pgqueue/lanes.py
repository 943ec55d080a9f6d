"""Lanes: the jobs of one ordering key, handed out one hold at a time.

A lane is the row that stands for a (queue, key); who holds its lease may run its jobs. `route` gives each key that has
jobs its lane, in a transaction of its own. In a round, behind the claim: `lane_claim` takes lanes of every kind with
their oldest jobs; in a backlog `lane_take` and `lane_jobs` do that for common ones at less cost. `lane_release` gives
lanes back whose jobs are written. No claim of lanes waits for a lock; routing may, so it goes before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from pgqueue.claim import Scope, claimed_jobs
from pgqueue.job import Claimed
from pgqueue.statement import Row, Statement, load, scalar, table

_SQL = load("pgqueue", "lanes")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSize:
    """How many lanes to take, how many jobs of each at most, how many jobs in all at most."""

    lanes: int
    depth: int
    total: int


class Lane(NamedTuple):
    """A lane that was taken: its level, its position, its queue and key."""

    level: int
    pos: int
    queue: str
    key: str


def route(floors: Mapping[str, int]) -> Statement[list[Row]]:
    """Make sure that every key above the floors has its lane; rows (queue number from 1, examined, last pos)."""
    return Statement(_SQL["route"], {"queues": list(floors), "floors": list(floors.values())}, table)


def lane_claim(
    scope: Scope, floors: Sequence[int], size: LaneSize, lease: int, visibility: timedelta
) -> Statement[list[Claimed]]:
    """Take lanes and the oldest jobs of each; a job's `pos` is its lane's."""
    params = {
        "queues": scope.queues, "priorities": scope.priorities, "names": scope.names, "floors": list(floors),
        "k": size.lanes, "m": size.depth, "total": size.total, "lease": lease, "visibility": visibility,
    }  # fmt: skip
    return Statement(_SQL["lane_claim"], params, claimed_jobs)


def lane_take(
    scope: Scope, floors: Sequence[int], lanes: int, lease: int, visibility: timedelta
) -> Statement[list[Lane]]:
    """Take lanes of a backlog; `lane_jobs` is to follow in the transaction. The scope is that of `claim_backlog`."""
    params = {
        "queues": scope.queues, "priorities": scope.priorities, "names": scope.names, "floors": list(floors),
        "k": lanes, "lease": lease, "visibility": visibility, "order": scope.order,
    }  # fmt: skip
    return Statement(_SQL["lane_take"], params, _lanes)


def lane_jobs(scope: Scope, size: LaneSize, lease: int, visibility: timedelta) -> Statement[list[Claimed]]:
    """Claim the oldest jobs of the lanes that `lane_take` has taken; lanes without any are free again.

    A job's `pos` is its own; its lane is told by its queue and key.
    """
    params = {
        "names": scope.names, "m": size.depth, "total": size.total, "lease": lease, "visibility": visibility,
        "order": scope.order,
    }  # fmt: skip
    return Statement(_SQL["lane_jobs"], params, claimed_jobs)


def lane_release(
    lanes: Sequence[tuple[str, str]], lease: int, wait: float, places: Sequence[int | None] | None = None
) -> Statement[int]:
    """Give back (queue, key) lanes held under one lease, claimable again after `wait` seconds; returns how many.

    `places` are the lanes' positions, which tell the slots of a key apart; None = all that the lease holds. A lane
    that somebody has locked is passed: `lanes_mine` tells.
    """
    params = {
        "queues": [queue for queue, _ in lanes], "keys": [key for _, key in lanes], "lease": lease,
        "places": list(places) if places is not None else [None] * len(lanes),
        "wait": timedelta(seconds=wait),
    }  # fmt: skip
    return Statement(_SQL["lane_release"], params, scalar)


def lanes_mine(lanes: Sequence[tuple[str, str, int]], lease: int) -> Statement[list[Row]]:
    """Return which of these (queue, key, position) lanes the lease still holds. Takes no lock."""
    queues, keys, places = ([lane[part] for lane in lanes] for part in range(3))
    params = {"queues": queues, "keys": keys, "places": places, "lease": lease}
    return Statement(_SQL["lanes_mine"], params, table)


def _lanes(rows: Sequence[Row]) -> list[Lane]:
    return [Lane._make(row) for row in rows if row[0]]
