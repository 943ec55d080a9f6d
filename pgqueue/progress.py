"""Progress: how far a running job is, and the state that its next attempt goes on from.

Both live in a side table, one row a job, and are fenced by the lease: a worker that lost the job writes nothing. The
job's own row is only read. A checkpoint outlives attempts, the worker, and a stay in the dead letters; it goes when
the job is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pgqueue.job import Claim
from pgqueue.statement import Statement, load, nothing, scalar

_SQL = load("pgqueue", "progress")


class Note(NamedTuple):
    """What a job says about itself; `fraction` is from 0 to 1."""

    claim: Claim
    fraction: float
    note: str


def progress(notes: Sequence[Note]) -> Statement[None]:
    """Write the progress of jobs; those whose lease is gone are left out."""
    params = {
        "ids": [n.claim.id for n in notes], "leases": [n.claim.lease for n in notes],
        "fractions": [n.fraction for n in notes], "notes": [n.note for n in notes],
    }  # fmt: skip
    return Statement(_SQL["progress"], params, nothing)


def checkpoint(claim: Claim, state: str) -> Statement[bool]:
    """Keep the JSON text of a job's state; False if the lease is lost."""
    return Statement(_SQL["checkpoint"], {"id": claim.id, "lease": claim.lease, "state": state}, scalar)


def state(job_id: int) -> Statement[str | None]:
    """Read the JSON text of a job's last checkpoint."""
    return Statement(_SQL["state"], {"id": job_id}, scalar)


def prune() -> Statement[None]:
    """Delete the progress of jobs that are done."""
    return Statement(_SQL["prune"], {}, nothing)
