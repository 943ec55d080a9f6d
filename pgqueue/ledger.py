"""The idempotency ledger: a job's effect happens once per (job name, idempotency key), whichever queue it is in.

`hold` and `take` at dispatch: one job of a key runs, the other waits (it is snoozed) or, once the first has been
applied, is skipped. `apply` at success writes the ledger and removes the job in one statement. Whatever fails or
crashes in between leaves nothing that could swallow a later run: a key that was taken and not applied is free as soon
as its job's lease is gone. The marker is never set before the handler ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgqueue.job import Claim
from pgqueue.statement import Statement, column, load, nothing

_SQL = load("pgqueue", "ledger")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyed:
    """A claimed job with an idempotency key."""

    claim: Claim
    name: str
    key: str


def hold(jobs: Sequence[Keyed]) -> Statement[None]:
    """Lock the keys of these jobs until the transaction ends; the first half of `take`, in its transaction.

    Two statements, because one judges by what it saw when it began: it waits for its first key, another worker claims
    a job of the second key and begins it, and the waiter, to whom that job has no lease, takes the key from under it.
    """
    return Statement(_SQL["hold"], _params(jobs), nothing)


def take(jobs: Sequence[Keyed]) -> Statement[list[int]]:
    """Take the keys of these jobs, which `hold` has locked; return the ids that have theirs."""
    return Statement(_SQL["take"], _params(jobs), column)


def applied(jobs: Sequence[Keyed]) -> Statement[dict[int, int]]:
    """Return the ids of the jobs whose effect has been applied before, each with the job that did. Takes no lock."""
    return Statement(_SQL["applied"], _params(jobs), lambda rows: {row[0]: row[1] for row in rows})


def apply(claims: Sequence[Claim]) -> Statement[list[int]]:
    """Acknowledge jobs and note their keys as applied, fenced by lease; return the ids done."""
    params = {"ids": [c.id for c in claims], "leases": [c.lease for c in claims]}
    return Statement(_SQL["apply"], params, column)


def seal(claim: Claim) -> Statement[list[int]]:
    """End a transactional handler: acknowledge its job in its own transaction; no id back = the lease is lost."""
    return Statement(_SQL["seal"], {"id": claim.id, "lease": claim.lease}, column)


def _params(jobs: Sequence[Keyed]) -> dict[str, object]:
    return {
        "names": [j.name for j in jobs], "keys": [j.key for j in jobs], "ids": [j.claim.id for j in jobs],
        "leases": [j.claim.lease for j in jobs],
    }  # fmt: skip
