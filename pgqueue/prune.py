"""Prune: rows that nobody needs any more go, in bounded batches; appended counters become minute counters."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pgqueue import batch, history, progress
from pgqueue.statement import Statement, load, nothing

_SQL = load("pgqueue", "prune")

#: How long minute counters are kept.
MINUTES = timedelta(days=90)


def fold() -> Statement[None]:
    """Fold up to 20,000 counter rows into minutes."""
    return Statement(_SQL["fold"], {}, nothing)


def chores(ledger: timedelta, dead: timedelta | None = None) -> list[Statement[Any]]:
    """Return the statements that delete free dedup keys, old ledger rows and counters, spent signals and attempts.

    `dead`: discard dead letters that died so long ago; None keeps them. The last one sees to the partitions of the
    history.
    """
    letters = [] if dead is None else [Statement(_SQL["letters"], {"keep": dead}, nothing)]
    return [
        *letters,
        Statement(_SQL["dedup"], {}, nothing),
        Statement(_SQL["effects"], {"keep": ledger}, nothing),
        Statement(_SQL["signals"], {}, nothing),
        Statement(_SQL["attempts"], {}, nothing),
        Statement(_SQL["minutes"], {"keep": MINUTES}, nothing),
        Statement(_SQL["workers"], {}, nothing),
        progress.prune(),
        batch.prune(),
        history.days(),
    ]
