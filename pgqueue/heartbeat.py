"""Heartbeat: extend the visibility deadlines of what this process holds, and tell that it is alive.

Runs on its own connection in autocommit mode; each statement passes rows that somebody else has locked. A claim
that is missing in the answer is lost: its attempt should stop, its result will be refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from pgqueue.job import Claim
from pgqueue.statement import Statement, column, load, nothing, scalar

_SQL = load("pgqueue", "heartbeat")


def heartbeat(claims: Sequence[Claim], visibility: timedelta) -> Statement[list[int]]:
    """Extend the deadlines that need it; return the ids of the claims that stand."""
    params = {"ids": [c.id for c in claims], "leases": [c.lease for c in claims], "visibility": visibility}
    return Statement(_SQL["heartbeat"], params, column)


def lane_heartbeat(lanes: Sequence[tuple[str, str, int]], visibility: timedelta) -> Statement[None]:
    """Extend (queue, key, lease) lanes, never below the deadline of a job in them."""
    params = {
        "queues": [queue for queue, _, _ in lanes], "keys": [key for _, key, _ in lanes],
        "leases": [lease for _, _, lease in lanes], "visibility": visibility,
    }  # fmt: skip
    return Statement(_SQL["lane_heartbeat"], params, nothing)


def signals(ids: Sequence[int]) -> Statement[list[int]]:
    """Return which of these jobs somebody asked to cancel."""
    return Statement(_SQL["signals"], {"ids": list(ids)}, column)


def register(
    *,
    nonce: int,
    host: str,
    pid: int,
    version: str,
    queues: Sequence[str],
    names: Sequence[str],
    concurrency: int,
    schedules: Sequence[str] = (),
) -> Statement[int | None]:
    """Enter this process start; None if the nonce is taken."""
    params = {
        "nonce": nonce, "host": host, "pid": pid, "version": version, "queues": list(queues), "names": list(names),
        "concurrency": concurrency, "schedules": list(schedules),
    }  # fmt: skip
    return Statement(_SQL["register"], params, scalar)


def beat(nonce: int, in_flight: int, overrun: int, *, draining: bool) -> Statement[None]:
    """Note that this process lives, what it holds, and how many slots are kept by handlers over their time."""
    params = {"nonce": nonce, "in_flight": in_flight, "overrun": overrun, "draining": draining}
    return Statement(_SQL["beat"], params, nothing)


def unregister(nonce: int) -> Statement[None]:
    """Take this process start off the list."""
    return Statement(_SQL["unregister"], {"nonce": nonce}, nothing)


def idle(queues: Sequence[str]) -> Statement[None]:
    """Tell producers for the next 5 s that somebody waits for jobs of these queues."""
    return Statement(_SQL["idle"], {"queues": list(queues)}, nothing)


def channels(queues: Sequence[str]) -> Statement[list[str]]:
    """Return the notification channels of these queues."""
    return Statement(_SQL["channels"], {"queues": list(queues)}, column)
