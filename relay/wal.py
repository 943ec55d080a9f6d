"""Logical decoding: which events were written, in the order of their commits, from the write-ahead log.

A publication carries the ids of new rows and nothing else; a slot keeps the server's log until it is confirmed. The
stream is the server's replication protocol on a plain connection of psycopg (pgoutput, protocol 1):
https://www.postgresql.org/docs/current/protocol-replication.html
"""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import psycopg
from psycopg.pq import DiagnosticField, ExecStatus

from pgqueue.connection import execute
from pgqueue.dsn import connect as connect_to
from pgqueue.dsn import one_line
from pgqueue.errors import ConfigError, PgqueueError
from pgqueue.statement import Row, Statement, column, load, nothing, scalar

_SQL = load("relay", "wal")

PUBLICATION: Final = "pgqueue_outbox"
STATUS_EVERY_S: Final = 5.0
#: SQLSTATE where decoding comes to an event that was written while there was no publication.
UNDEFINED_OBJECT: Final = b"42704"
#: Microseconds from 1970 to 2000, where the clock of the protocol begins.
EPOCH_US: Final = 946_684_800_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """One new event: its id, and the transaction that wrote it."""

    id: int
    xid: int


class StreamEnded(PgqueueError):
    """The server ended the stream, or did not begin it (another relay may have it).

    `unreadable`: the slot is of no use any more, for the log holds events of a time without publication.
    """

    def __init__(self, slot: str, problem: str, *, unreadable: bool = False) -> None:
        self.slot = slot
        self.unreadable = unreadable
        super().__init__(f"replication slot {slot}: {problem}; the relay keeps trying")


def prepare(conn: psycopg.Connection[Row]) -> str:
    """Make publication and slot unless they are there, a slot that was given up anew; return the slot's name.

    A slot older than the publication is made anew too: servers before 18 cannot decode what was written without one.
    What such a slot would have told is read from the table.

    `conn` is in autocommit mode. Raises ConfigError where the server cannot decode, or the role may not.
    """
    level, slot = execute(conn, Statement(_SQL["level"], {}, _pair))
    if level != "logical":
        raise ConfigError(
            f"--read-from wal needs wal_level = logical, and this server has {level}: set it in postgresql.conf and "
            "restart the server, or use --read-from table"
        )
    try:
        if not execute(conn, has_publication()):
            execute(conn, forget(slot))
            execute(conn, Statement(_SQL["publication"], {}, nothing))
        states: list[bool] = execute(conn, Statement(_SQL["slot_state"], {"slot": slot}, column))
        if states == [False]:  # the server gave it up
            execute(conn, forget(slot))
        if states != [True]:
            execute(conn, Statement(_SQL["slot"], {"slot": slot}, nothing))
    except psycopg.errors.ConfigurationLimitExceeded as error:
        raise ConfigError(
            f"--read-from wal: {one_line(error)}; raise max_replication_slots and restart the server, or drop a slot "
            "that nobody uses (the view pg_replication_slots has them)"
        ) from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigError(
            f"--read-from wal: {one_line(error)}; the owner of the schema runs: CREATE PUBLICATION {PUBLICATION} FOR "
            "TABLE pgqueue.outbox (id) WITH (publish = 'insert'), and the relay's role needs the attribute REPLICATION"
        ) from error
    return slot


def has_publication() -> Statement[bool]:
    """Tell whether the publication is there; without it the log tells of no event."""
    return Statement(_SQL["has_publication"], {}, scalar)


def forget(slot: str) -> Statement[None]:
    """Remove a slot that is of no use, unless somebody reads it."""
    return Statement(_SQL["forget_slot"], {"slot": slot}, nothing)


def place() -> Statement[int]:
    """Read where the log ends: whatever an earlier snapshot sees was committed before."""
    return Statement(_SQL["place"], {}, scalar)


def present(ids: Sequence[int]) -> Statement[list[int]]:
    """Read which of these events are in the table."""
    return Statement(_SQL["present"], {"ids": list(ids)}, column)


def committing(xids: Iterable[int]) -> Statement[int]:
    """Count those of these transactions that no new snapshot may see yet, though the log told of their commit."""
    return Statement(_SQL["committing"], {"xids": sorted(set(xids))}, scalar)


class Stream:
    """The ids of new events, in commit order, from the last confirmed place on."""

    def __init__(self, dsn: str, name: str, slot: str) -> None:
        self._slot = slot
        self._conn = connect_to(
            dsn,
            autocommit=True,
            replication="database",
            application_name=name,
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=25_000,
        )
        self._line = self._conn.pgconn
        self._seen = 0
        self._confirmed = 0
        self._whole = True
        self._xid = 0
        self._told_at = 0.0
        # A command of the replication protocol takes no parameters; both names are our own.
        order = f"START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '1', publication_names '{PUBLICATION}')"
        begun = self._line.exec_(order.encode())
        if begun.status != ExecStatus.COPY_BOTH:
            problem = begun.error_message.decode(errors="replace").strip()
            self._conn.close()
            raise StreamEnded(slot, " ".join(problem.split()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._conn.close()

    def next(self, n: int, timeout: float) -> list[Heard]:
        """Return up to `n` of the next events as soon as there are any; none after `timeout` seconds."""
        until = time.monotonic() + timeout
        found: list[Heard] = []
        while len(found) < n:
            size, data = self._line.get_copy_data(1)
            if size > 0:
                self._take(bytes(data), found)
                continue
            if size < 0:
                raise self._ended()
            left = until - time.monotonic()
            if found or left <= 0:
                break
            if select.select([self._line.socket], [], [], min(left, STATUS_EVERY_S))[0]:
                self._line.consume_input()
            self.pump()
        self.pump()
        return found

    @property
    def confirmed(self) -> int:
        """How far the log is dealt with, in bytes from its beginning."""
        return self._confirmed

    def confirm(self) -> None:
        """Let the server forget what was handed out so far: all of it is dealt with in the table."""
        if self._confirmed < self._seen:
            self._confirmed = self._seen
            self._tell()

    def pump(self) -> None:
        """Tell the server now and then that somebody is here, also while nothing is read."""
        if time.monotonic() - self._told_at >= STATUS_EVERY_S:
            self._tell()

    def _take(self, data: bytes, found: list[Heard]) -> None:
        """Read one message of the protocol: 'w' carries a change, 'k' is a sign of life."""
        if data[:1] == b"k":
            end, _, asked = struct.unpack("!qqb", data[1:18])
            if self._whole:
                self._seen = max(self._seen, end)
            if asked:
                self._tell()
            return
        change = data[25:]
        kind = change[:1]
        if kind == b"B":
            (self._xid,) = struct.unpack("!I", change[17:21])
            self._whole = False
        elif kind == b"I":  # relation, 'N', columns, then for each: 't', length, text
            (length,) = struct.unpack("!i", change[9:13])
            found.append(Heard(id=int(change[13 : 13 + length]), xid=self._xid))
        elif kind == b"C":
            _, _, end, _ = struct.unpack("!bqqq", change[1:26])
            self._seen = max(self._seen, end)
            self._whole = True

    def _ended(self) -> StreamEnded:
        result = self._line.get_result()
        problem = b"" if result is None else result.error_message
        said = " ".join(problem.decode(errors="replace").split())
        state = None if result is None else result.error_field(DiagnosticField.SQLSTATE)
        return StreamEnded(
            self._slot, said or "the server ended the stream", unreadable=state == UNDEFINED_OBJECT
        )

    def _tell(self) -> None:
        clock = time.time_ns() // 1000 - EPOCH_US
        place = self._confirmed
        self._line.put_copy_data(b"r" + struct.pack("!qqqqb", place, place, place, clock, 0))
        self._line.flush()
        self._told_at = time.monotonic()


def _pair(rows: Sequence[Row]) -> tuple[str, str]:
    level, slot = rows[0]
    return level, slot
