"""The relay's connection, and the one round trip that writes down the last batch and reads the next.

Writing and reading are two transactions of one pipeline: marks and failures are committed before the snapshot
of the read is taken, so the read sees them. Nothing is open when the answer is here. The commit does not wait for the
disk: marks that a crash of the server undoes are marks of events that are published again, as after any other crash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import LiteralString
from uuid import UUID

import psycopg

from pgqueue.dsn import connect as connect_to
from pgqueue.pipeline import Pending, Pipeline
from pgqueue.statement import Row
from relay import publish
from relay.publish import Failed, Look, RejectionPolicy

Connection = psycopg.Connection[Row]

#: What both connections of a relay need, whatever the role's defaults say.
_EVERY_SESSION = (
    "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE",
    "SET idle_session_timeout = 0",
)
#: A plan made while the outbox was empty would scan it whole when it is not; compiling it, or making it anew for other
#: parameters, costs more than it saves.
#: A look from the start may take its time, a row that somebody has locked may not take ours.
PUBLISHING = (
    "SET enable_seqscan = off",
    "SET enable_bitmapscan = off",
    "SET plan_cache_mode = force_generic_plan",
    "SET jit = off",
    "SET statement_timeout = 0",
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


def connect(dsn: str, name: str, settings: Sequence[LiteralString] = PUBLISHING) -> Connection:
    """Open a connection of a relay to the primary: autocommit, so transactions begin explicitly.

    A peer that is dead without a word is noticed after 25 s.
    """
    conn = connect_to(
        dsn,
        autocommit=True,
        application_name=name,
        keepalives_idle=10,
        keepalives_interval=5,
        keepalives_count=3,
        tcp_user_timeout=25_000,
        target_session_attrs="primary",
    )
    try:
        for line in (*_EVERY_SESSION, *settings):
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
    try:
        with Pipeline(conn) as sent:
            written = _send(sent, ledger, keep=keep, policy=policy, at_once=False)
            sent.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            mine = sent.send(publish.mine(me))
            trouble = sent.send(publish.trouble(parts))
            rows = sent.send(publish.read(floors, n))
            last = sent.send(publish.last())
            writers = sent.send(publish.writers())
            sent.commit()
    except psycopg.errors.LockNotAvailable:
        if not ledger.confirmed:
            raise  # not a row that we mark: somebody has locked the table
        _sidestep(ledger)
        return cycle(conn, me=me, ledger=ledger, floors=floors, n=n, keep=keep, policy=policy)
    failed = written.note(ledger)
    number, at = last.result()
    look = Look(
        mine=mine.result(),
        trouble=trouble.result(),
        rows=rows.result(),
        last=number,
        at=at,
        writers=frozenset(writers.result()),
    )
    return look, failed


def write(conn: Connection, ledger: Ledger, *, keep: bool, policy: RejectionPolicy) -> list[Failed]:
    """Write the ledger down alone: before partitions change hands, while the sink is away, at the end."""
    if not ledger:
        return []
    try:
        with Pipeline(conn) as sent:
            written = _send(sent, ledger, keep=keep, policy=policy)
    except psycopg.errors.LockNotAvailable:
        if not ledger.confirmed:
            raise
        _sidestep(ledger)
        return write(conn, ledger, keep=keep, policy=policy)
    return written.note(ledger)


@dataclass(slots=True)
class _Written:
    """The answers to what was written down."""

    failed: Pending[list[Failed]] | None = None
    unmarked: Pending[list[int]] | None = None

    def note(self, ledger: Ledger) -> list[Failed]:
        """Clear what is in the database now; return what became of the rejected events."""
        ledger.confirmed.clear()
        ledger.rejected.clear()
        ledger.late.clear()
        ledger.stuck = set(self.unmarked.result()) if self.unmarked else set()
        return self.failed.result() if self.failed else []


def _send(
    sent: Pipeline, ledger: Ledger, *, keep: bool, policy: RejectionPolicy, at_once: bool = True
) -> _Written:
    """Send what is known; what is not written `at_once` a crash of the server may undo, and then it is found again."""
    written = _Written()
    if not ledger:
        return written
    sent.begin()
    if not at_once:
        sent.run("SET LOCAL synchronous_commit = off")
    if ledger.confirmed:
        sent.send(publish.mark(ledger.confirmed, keep=keep))
    if ledger.stuck:
        sent.send(publish.mark_unlocked(ledger.stuck))
        written.unmarked = sent.send(publish.unmarked(ledger.stuck))
    if ledger.rejected:
        written.failed = sent.send(publish.fail(ledger.rejected, policy))
    if ledger.late:
        sent.send(publish.defer(ledger.late))
    sent.commit()
    return written


def _sidestep(ledger: Ledger) -> None:
    """Mark from now on without waiting for rows that somebody has locked (only plain marks ever wait)."""
    ledger.stuck |= ledger.confirmed
    ledger.confirmed.clear()
