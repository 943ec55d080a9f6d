"""Tick: turn the due ticks of all schedules into jobs, one schedule a transaction.

Every worker does it by turn. Whoever dies or sleeps in the middle of it leaves nothing half done: the next turn is
somebody else's within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import psycopg

from pgqueue.errors import PgqueueError
from pgqueue.pipeline import Pipeline
from pgqueue.schedule import Plan, broken, due, fire, plan, settle

#: How often somebody looks for due ticks.
LOOK: Final = timedelta(seconds=0.5)


def tick(
    connection: psycopg.Connection[Any], period: timedelta = LOOK, between: Callable[[], None] = lambda: None
) -> int:
    """Write what is due if it is this process's turn; return how many jobs that made.

    `connection` is in autocommit mode. `between` is called after each schedule: there may be many. A schedule that
    cannot be worked out or written is marked broken, and the others go on.
    """
    with Pipeline(connection) as p:
        found = p.send(due(period))
    made = 0
    for one in found.result():
        try:
            made += _write(connection, plan(one))
        except (PgqueueError, psycopg.DataError, psycopg.IntegrityError) as error:
            problem = str(error).partition("\n")[0]
            with Pipeline(connection) as p:
                p.send(broken(one, problem))
        between()
    return made


def _write(connection: psycopg.Connection[Any], plan: Plan) -> int:
    with Pipeline(connection) as p:
        p.begin()
        if plan.due.next_at is None:
            p.send(settle(plan))
            p.commit()
            return 0
        jobs = p.send(fire(plan))
        p.commit()
    return len(jobs.result())
