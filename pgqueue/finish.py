"""Finish: the one place where a claim ends, fenced by (id, lease).

A statement touches only rows that still carry the lease it shows: whoever comes late changes nothing. All but
`ack` pass rows that somebody else has locked; an id that did not come back was lost or is locked, and
`still_mine` tells which. `ack` is the hot path and locks plainly; run it under a lock_timeout and fall back to
`ack(..., skip=True)`, or one row locked by a business transaction stops the acknowledgement of 499 others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pgqueue.job import Buried, Claim, Claimed, Completed, Retried
from pgqueue.statement import Statement, column, load, nothing, scalar

_SQL = load("pgqueue", "finish")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A claim whose attempt failed."""

    claim: Claim
    outcome: Retried | Buried


def ack(claims: Sequence[Claim | Claimed], *, skip: bool = False) -> Statement[list[int] | None]:
    """Delete finished jobs and count them; None if all were still ours, else the ids that were."""
    if not skip and len(leases := {c.lease for c in claims}) == 1:
        return Statement(_SQL["ack_batch"], {"ids": _ids(claims), "lease": leases.pop()}, scalar)
    return Statement(_SQL["ack_skip" if skip else "ack"], _claims(claims), scalar)


def complete(
    endings: Sequence[tuple[Claim | Claimed, Completed]], *, wait: bool = False
) -> Statement[list[int]]:
    """Acknowledge jobs that have more to write: what follows, batch, history, result. Returns the ids done.

    `wait` for a row that somebody has locked instead of passing it: for a transaction that can do nothing else.
    """
    rows = [
        f'{{"id":{claim.id},"lease":{claim.lease},"result":{end.result or "null"},'
        f'"problem":{json.dumps(end.problem)},"steps":{end.steps or "null"},"skipped":{json.dumps(end.skipped)}}}'
        for claim, end in endings
    ]
    return Statement(_SQL["complete"], {"jobs": f"[{','.join(rows)}]", "wait": wait}, column)


def still_mine(claims: Sequence[Claim | Claimed]) -> Statement[list[int]]:
    """Return the ids of the claims that stand. Takes no lock."""
    return Statement(_SQL["still_mine"], _claims(claims), column)


def retry(failures: Sequence[Failed], worker: str) -> Statement[list[int]]:
    """Log failed attempts and let the jobs wait; returns the ids done. `worker` is who ran them, for people."""
    rows = [
        {
            "id": f.claim.id, "lease": f.claim.lease, "wait": f.outcome.delay, "outcome": f.outcome.outcome,
            "deferred": f.outcome.deferred,
            "error_type": f.outcome.failure.error_type, "error": f.outcome.failure.message,
            "traceback": f.outcome.failure.traceback,
        }
        for f in failures if isinstance(f.outcome, Retried)
    ]  # fmt: skip
    return Statement(_SQL["retry"], {"failures": json.dumps(rows), "worker": worker}, column)


def bury(failures: Sequence[Failed], worker: str) -> Statement[list[int]]:
    """Move jobs to the dead letters together with the log of their attempts; returns the ids done."""
    rows = [
        {
            "id": f.claim.id, "lease": f.claim.lease, "reason": f.outcome.reason,
            "error_type": f.outcome.failure.error_type, "error": f.outcome.failure.message,
            "traceback": f.outcome.failure.traceback,
        }
        for f in failures if isinstance(f.outcome, Buried)
    ]  # fmt: skip
    return Statement(_SQL["bury"], {"failures": json.dumps(rows), "worker": worker}, column)


def snooze(claims: Sequence[Claim | Claimed], waits: Sequence[float]) -> Statement[list[int]]:
    """Let jobs wait so many seconds each; the attempt does not count. Returns the ids done."""
    return Statement(_SQL["snooze"], _claims(claims) | {"waits": list(waits)}, column)


def release(claims: Sequence[Claim | Claimed]) -> Statement[list[int]]:
    """Give jobs back, place kept, attempt not counted; returns the ids done."""
    return Statement(_SQL["release"], _claims(claims), column)


def drop(claims: Sequence[Claim | Claimed], unbegun: Sequence[int] = ()) -> Statement[list[int]]:
    """Delete cancelled jobs, of which these ids were not begun under this claim; returns the ids done."""
    return Statement(_SQL["drop"], _claims(claims) | {"unbegun": list(unbegun)}, column)


def nudge(queues: Sequence[str]) -> Statement[None]:
    """Tell other workers that rows below their floors are ready again."""
    return Statement(_SQL["nudge"], {"queues": list(queues)}, nothing)


def _claims(claims: Sequence[Claim | Claimed]) -> dict[str, object]:
    return {"ids": _ids(claims), "leases": f"{{{','.join([str(c.lease) for c in claims])}}}"}


def _ids(claims: Sequence[Claim | Claimed]) -> str:
    # An array literal: the driver takes several times as long to build the array from a list of numbers.
    return f"{{{','.join([str(c.id) for c in claims])}}}"
