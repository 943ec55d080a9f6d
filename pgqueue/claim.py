"""Claim: ready jobs become in flight, under a new lease.

The order inside a worker's round is ack, claim, lanes (`pgqueue.lanes`), all in one READ COMMITTED transaction.
Everything locks with SKIP LOCKED, so no claim ever waits. Each row comes back as a `Claimed`; the answer of `claim`
also tells how far it looked (see `pgqueue.floors`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import itemgetter
from typing import NamedTuple

from pgqueue.job import Claimed
from pgqueue.shelf import LaneHold
from pgqueue.statement import Row, Statement, column, load, nothing, scalar

_SQL = load("pgqueue", "claim")
_PLACE = itemgetter(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a claim may take: levels in order, the position to read each from (or up to), and the known names."""

    queues: list[str]
    priorities: list[int]
    names: list[str]

    @property
    def order(self) -> list[str]:
        """Return the queues in the order of their levels, each once."""
        return list(dict.fromkeys(self.queues))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Jobs of a claim in level order. `full`: level (from 0) -> last position examined, where the window was full.

    `keyed`: whether keyed jobs may be waiting, so that the next round should look at lanes.
    """

    jobs: list[Claimed]
    full: Mapping[int, int]
    keyed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The last number drawn from the sequence and who may still commit a lower one; `cost` in seconds."""

    last: int
    holders: list[str]
    cost: float


class Paused(NamedTuple):
    """Paused queues, paused names of job types, and queues with a limit or a rate (see `pgqueue.limits`)."""

    queues: frozenset[str]
    names: frozenset[str]
    gates: frozenset[str] = frozenset()


def claim(
    scope: Scope, floors: Sequence[int], n: int, lease: int, visibility: timedelta, route: Mapping[str, int]
) -> Statement[Answer]:
    """Claim up to n unkeyed jobs; `route` gives the floor of the keyed jobs of each queue."""
    params = _params(scope, n, lease, visibility) | {
        "floors": list(floors),
        "route_queues": list(route),
        "route_floors": list(route.values()),
    }
    return Statement(_SQL["claim"], params, _answer)


def claim_backlog(
    scope: Scope, floors: Sequence[int], n: int, lease: int, visibility: timedelta
) -> Statement[Answer]:
    """Claim up to n unkeyed jobs of a dense backlog at half the cost of `claim`, which finds out where that ends.

    The scope holds all priorities of each of its queues, in order. The answer does not tell how far it looked beyond
    its last job, nor whether keyed jobs wait: ask `keyed`.
    """
    params = _params(scope, n, lease, visibility) | {
        "floors": list(floors),
        "order": scope.order,
    }
    return Statement(_SQL["claim_backlog"], params, _in_order)


def claim_few(
    scope: Scope, floors: Sequence[int], n: int, lease: int, visibility: timedelta
) -> Statement[Answer]:
    """Claim up to n unkeyed jobs for less than `claim`, which is to follow if there are none.

    The scope is that of `claim_backlog`. The answer does not tell where a window was full, nor whether keyed jobs wait.
    """
    return replace(claim_backlog(scope, floors, n, lease, visibility), query=_SQL["claim_few"])


def claiming() -> Statement[None]:
    """Set what a transaction that only claims needs; without a BEGIN it is that of its pipeline."""
    return Statement(_SQL["claiming"], {}, nothing)


def keyed(route: Mapping[str, int]) -> Statement[bool]:
    """Tell whether keyed jobs may be waiting; `route` gives the floor of the keyed jobs of each queue."""
    params = {"route_queues": list(route), "route_floors": list(route.values())}
    return Statement(_SQL["keyed"], params, scalar)


def suspects(
    scope: Scope, ceilings: Sequence[int], n: int, lease: int, visibility: timedelta, *, low: int, high: int
) -> Statement[list[Claimed]]:
    """Claim up to n jobs that lost their worker `low` to `high` times before; each gets a `lost` attempt in its log."""
    params = _params(scope, n, lease, visibility) | {"ceilings": list(ceilings), "low": low, "high": high}
    return Statement(_SQL["suspects"], params, claimed_jobs)


def suspects_alone(scope: Scope, ceilings: Sequence[int]) -> Statement[bool]:
    """Tell whether a job waits that must run with nothing beside it. Takes no lock."""
    params = {
        "queues": scope.queues,
        "priorities": scope.priorities,
        "names": scope.names,
        "ceilings": list(ceilings),
    }
    return Statement(_SQL["suspects_alone"], params, scalar)


def elect(queues: Sequence[str]) -> Statement[bool]:
    """Stand for the suspects of these queues until `resign` or the end of the session; False if another one does."""
    return Statement(_SQL["elect"], {"queues": sorted(queues)}, scalar)


def resign(queues: Sequence[str]) -> Statement[bool]:
    """Leave the suspects of these queues to somebody else."""
    return Statement(_SQL["resign"], {"queues": sorted(queues)}, scalar)


def reclaim(
    jobs: Sequence[Claimed], lanes: Sequence[LaneHold], visibility: timedelta
) -> Statement[list[int]]:
    """Claim again, under their leases, jobs and lanes in hand whose claim a crash of the server has undone."""
    params = {
        "ids": [c.id for c in jobs], "leases": [c.lease for c in jobs], "attempts": [c.attempt for c in jobs],
        "lane_queues": [lane.queue for lane in lanes], "lane_keys": [lane.key for lane in lanes],
        "places": [lane.pos for lane in lanes], "lane_leases": [lane.lease for lane in lanes],
        "visibility": visibility,
    }  # fmt: skip
    return Statement(_SQL["reclaim"], params, column)


def horizon() -> Statement[Observation]:
    """Observe the sequence: last number, then holders. Belongs after the snapshot whose rows it is to vouch for."""
    return Statement(
        _SQL["horizon"], {}, lambda rows: Observation(last=rows[0][0], holders=rows[0][1], cost=rows[0][2])
    )


def paused() -> Statement[Paused]:
    """List what is not claimed, or through a gate only."""
    return Statement(_SQL["paused"], {}, _paused)


def _params(scope: Scope, n: int, lease: int, visibility: timedelta) -> dict[str, object]:
    return {
        "queues": scope.queues, "priorities": scope.priorities, "names": scope.names, "n": n, "lease": lease,
        "visibility": visibility,
    }  # fmt: skip


def claimed_jobs(rows: Sequence[Row]) -> list[Claimed]:
    """Read claimed jobs."""
    return [Claimed._make(row) for row in rows]


def _paused(rows: Sequence[Row]) -> Paused:
    queues, names, gates = (
        frozenset(n for kind, n in rows if kind == what) for what in ("queue", "name", "gate")
    )
    return Paused(queues, names, gates)


def _in_order(rows: Sequence[Row]) -> Answer:
    jobs = claimed_jobs(rows)
    jobs.sort(key=_PLACE)
    return Answer(jobs=jobs, full={}, keyed=False)


def _answer(rows: Sequence[Row]) -> Answer:
    jobs = claimed_jobs(rows)
    facts = jobs.pop()
    jobs.sort(key=_PLACE)
    full = {int(level) - 1: pos for level, pos in json.loads(facts.extra).items()} if facts.extra else {}
    return Answer(jobs=jobs, full=full, keyed=facts.payload == "1")
