"""Turn: work that one process of many does. No leader; whoever asks first once it is due has the turn.

Needs a transaction: the turn is settled under a transaction-level advisory try-lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from pgqueue.statement import Statement, column, load, nothing, scalar

_SQL = load("pgqueue", "turn")


def sweep_turn(queues: Sequence[str], period: timedelta) -> Statement[list[str]]:
    """Return the queues that are this process's to sweep now; nobody else's for `period`."""
    return Statement(_SQL["sweep_turn"], {"queues": list(queues), "period": period}, column)


def turn(task: str, period: timedelta) -> Statement[bool]:
    """Tell whether `task` (promote, prune) is this process's turn; nobody else's for `period` (a minute at most)."""
    return Statement(_SQL["turn"], {"task": task, "period": period}, scalar)


def bounds(seconds: timedelta) -> Statement[None]:
    """End what follows in this transaction after so long, and its waits for locks."""
    return Statement(_SQL["bounds"], {"ms": str(max(1, int(seconds.total_seconds() * 1000)))}, nothing)


def postpone(queues: Sequence[str], wait: float) -> Statement[None]:
    """Put off the next sweep of these queues by `wait` seconds from now, a minute at most."""
    return Statement(_SQL["postpone"], {"queues": list(queues), "wait": wait}, nothing)
