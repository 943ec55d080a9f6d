"""Prune: rows that nobody needs any more go, in bounded batches; appended counters become minute counters."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pgqueue import batch, history, progress
from pgqueue.statement import Statement, load, nothing

_SQL = load("pgqueue", "prune")


def fold() -> Statement[None]:
    """Fold up to 20,000 counter rows into minutes."""
    return Statement(_SQL["fold"], {}, nothing)


def chores(ledger: timedelta) -> list[Statement[Any]]:
    """Return the statements that delete free dedup keys, old ledger rows, spent signals, attempts, progress, workers.

    The last one sees to the partitions of the history.
    """
    return [
        Statement(_SQL["dedup"], {}, nothing),
        Statement(_SQL["effects"], {"keep": ledger}, nothing),
        Statement(_SQL["signals"], {}, nothing),
        Statement(_SQL["attempts"], {}, nothing),
        Statement(_SQL["workers"], {}, nothing),
        progress.prune(),
        batch.prune(),
        history.days(),
    ]
