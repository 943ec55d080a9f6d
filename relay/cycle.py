"""The relay's connection, and the one round trip that writes down the last batch and reads the next.

Writing and reading are two transactions of one pipeline: marks and failures are committed before the snapshot
of the read is taken, so the read sees them. Nothing is open when the answer is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import tuple_row

from pgqueue.dsn import connect as connect_to
from pgqueue.statement import Row, Statement
from relay import publish
from relay.publish import Failed, Look, RejectionPolicy

Connection = psycopg.Connection[Row]

#: A plan made while the outbox was empty would scan it whole when it is not; a late JIT compile costs more
#: than it saves.
_SESSION = (
    "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE",
    "SET enable_seqscan = off",
    "SET enable_bitmapscan = off",
    "SET jit = off",
    "SET lock_timeout = '250ms'",
    "SET synchronous_commit = on",
)


@dataclass(slots=True)
class Ledger:
    """What is to be written down: survives a lost connection as far as it is a fact.

    `confirmed` are facts, kept until they are marked; `stuck` are those of them that another transaction has
    locked. `rejected` and `late` would be found out again, so a reconnect drops them.
    """

    confirmed: set[int] = field(default_factory=set)
    stuck: set[int] = field(default_factory=set)
    rejected: dict[int, str] = field(default_factory=dict)
    late: dict[int, tuple[str, float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.confirmed or self.stuck or self.rejected or self.late)


def connect(dsn: str, name: str) -> Connection:
    """Open the connection of the publishing loop: autocommit, transactions begin explicitly."""
    conn = connect_to(dsn, autocommit=True, application_name=name)
    try:
        for line in _SESSION:
            conn.execute(line)
    except BaseException:
        conn.close()
        raise
    return conn


def cycle(
    conn: Connection,
    *,
    me: UUID,
    ledger: Ledger,
    floors: Mapping[int, int],
    n: int,
    keep: bool,
    policy: RejectionPolicy,
) -> tuple[Look, list[Failed]]:
    """Write the ledger down and read what comes next; one round trip, two transactions, none left open.

    An event that another transaction holds locked stays in the ledger and does not stop the others.
    """
    parts = list(floors)
    written = _writes(ledger, keep=keep, policy=policy)
    steps: list[Statement[Any]] = [
        *written,
        publish.BEGIN_READ,
        publish.mine(me),
        publish.trouble(parts),
        publish.read(floors, n),
        publish.last(),
        publish.writers(),
        publish.COMMIT,
    ]
    try:
        answers = _pipelined(conn, steps)
    except psycopg.errors.LockNotAvailable:
        _sidestep(conn, ledger)
        return cycle(conn, me=me, ledger=ledger, floors=floors, n=n, keep=keep, policy=policy)
    failed = _note(ledger, written, answers)
    mine, trouble, rows, (last, at), writers = answers[len(written) + 1 : -1]
    return Look(mine=mine, trouble=trouble, rows=rows, last=last, at=at, writers=frozenset(writers)), failed


def write(conn: Connection, ledger: Ledger, *, keep: bool, policy: RejectionPolicy) -> list[Failed]:
    """Write the ledger down alone: before partitions change hands, while the sink is away, at the end."""
    if not ledger:
        return []
    steps = _writes(ledger, keep=keep, policy=policy)
    try:
        answers = _pipelined(conn, steps)
    except psycopg.errors.LockNotAvailable:
        _sidestep(conn, ledger)
        return write(conn, ledger, keep=keep, policy=policy)
    return _note(ledger, steps, answers)


def _writes(ledger: Ledger, *, keep: bool, policy: RejectionPolicy) -> list[Statement[Any]]:
    if not ledger:
        return []
    steps: list[Statement[Any]] = [publish.BEGIN_WRITE]
    if ledger.confirmed:
        steps.append(publish.mark(ledger.confirmed, keep=keep))
    if ledger.stuck:
        steps += [publish.mark_unlocked(ledger.stuck), publish.unmarked(ledger.stuck)]
    if ledger.rejected:
        steps.append(publish.fail(ledger.rejected, policy))
    if ledger.late:
        steps.append(publish.defer(ledger.late))
    return [*steps, publish.COMMIT]


def _sidestep(conn: Connection, ledger: Ledger) -> None:
    """Mark from now on without waiting for rows that somebody has locked (only plain marks ever wait)."""
    conn.rollback()
    ledger.stuck |= ledger.confirmed
    ledger.confirmed.clear()


def _note(ledger: Ledger, steps: Sequence[Statement[Any]], answers: Sequence[Any]) -> list[Failed]:
    """Clear what has been written down; return what became of the rejected events."""
    failed: list[Failed] = []
    ledger.confirmed.clear()
    ledger.rejected.clear()
    ledger.late.clear()
    for step, answer in zip(steps, answers, strict=False):
        if step.query.name == "unmarked":
            ledger.stuck = set(answer)
        elif step.query.name == "fail":
            failed = answer
    return failed


def _pipelined(conn: Connection, steps: Sequence[Statement[Any]]) -> list[Any]:
    cursors = []
    with conn.pipeline():
        for step in steps:
            cursor = conn.cursor(row_factory=tuple_row)
            cursor.execute(step.query.text, step.params)
            cursors.append(cursor)
    return [
        step.read(cursor.fetchall() if cursor.description else [])
        for step, cursor in zip(steps, cursors, strict=True)
    ]
