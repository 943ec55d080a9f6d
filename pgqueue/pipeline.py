"""Several statements in one round trip, each with its own answer.

    with Pipeline(conn) as p:
        p.begin()
        acked = p.send(ack(...))
        rows = p.send(claim(...))
        p.commit()
    acked.result()

The connection is in autocommit mode and the transaction is spelled out, so that one block can hold several. An
error surfaces when the block ends; whatever followed the failed statement was not executed, and the transaction
is rolled back. Statements are prepared from the first use: these loops run few and always the same.

    with p.departing():  # sent when the block ends, and nobody waits
        rows = p.send(claim(...))
    p.land()             # now somebody does

What departed on a connection is answered in its order; a plain block that begins meanwhile takes those answers in
first. Where one leaves its transaction broken, the server refuses those behind it too, and all is rolled back.

It speaks to libpq through `psycopg.pq`: psycopg's own pipeline takes 40 us of the interpreter for a statement, which
a round of a dozen pays before and after every claim; this takes 5. Parameters travel as text, and the casts in our
SQL say what they are; rows are loaded by psycopg from the binary form.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Generic, LiteralString, Self, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg import abc
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, Format, TransactionStatus
from psycopg.pq.abc import PGresult

from pgqueue.statement import Query, Row, Statement

T = TypeVar("T")

_FAILED: Final = (ExecStatus.FATAL_ERROR, ExecStatus.BAD_RESPONSE)
_READ, _WRITE = select.POLLIN, select.POLLIN | select.POLLOUT


@dataclass(slots=True)
class _Session:
    """What is known about a connection: its encoding, and the names of the statements it has prepared."""

    encoding: str
    prepared: dict[str, bytes] = field(default_factory=dict)
    count: int = 0
    unsent: bool = False
    #: Blocks that have departed and whose answers nobody has taken in.
    away: deque[Pipeline] = field(default_factory=deque)


_sessions: WeakKeyDictionary[psycopg.Connection[Any], _Session] = WeakKeyDictionary()


class Pending(Generic[T]):
    """The answer of a statement that was sent; read it after the block ended."""

    __slots__ = ("_result", "_statement", "_transformer")

    def __init__(self, statement: Statement[T], transformer: abc.Transformer) -> None:
        self._statement = statement
        self._transformer = transformer
        self._result: PGresult | None = None

    def take(self, result: PGresult) -> None:
        """Take in what the server has answered."""
        self._result = result

    def result(self) -> T:
        """Read the rows."""
        rows: list[Row] = []
        if self._result is not None and (count := self._result.ntuples):
            self._transformer.set_pgresult(self._result, format=Format.BINARY)
            rows = self._transformer.load_rows(0, count, tuple)
        return self._statement.read(rows)

    @property
    def count(self) -> int:
        """How many rows the statement wrote, or returned."""
        return (self._result.command_tuples if self._result is not None else None) or 0


class Pipeline:
    """One round trip on a psycopg connection in autocommit mode."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._pq = connection.pgconn
        session = _sessions.get(connection)
        if session is None:
            session = _sessions[connection] = _Session(connection.info.encoding)
        self._session = session
        self._transformer: abc.Transformer = Transformer(connection)
        #: What becomes of each answer, in the order of what was sent.
        self._takers: list[Callable[[PGresult], None]] = []
        self._new: dict[str, bytes] = {}
        self._loaded: list[tuple[bytes, list[bytes | None]]] = []
        self._failed: PGresult | None = None
        self._begun = False

    def __enter__(self) -> Self:
        if self._session.away:
            self._take_in(self._session.away[-1])
        self._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo(error)
        self._depart()
        self._take_in(self)
        if self._failed is not None and error is None:
            raise _error(self._failed, self._session.encoding)

    @contextmanager
    def departing(self) -> Iterator[Self]:
        """Send a block behind those that are away; do not wait for its answers, `land` does."""
        self._enter()
        try:
            yield self
        except BaseException as error:
            self._undo(error)
            self._depart()
            self._take_in(self)
            raise
        self._depart()

    def land(self) -> None:
        """Wait for the answers of a block that has departed; raise the error that one of its statements met."""
        self._take_in(self)
        if self._failed is not None:
            raise _error(self._failed, self._session.encoding)

    def send(self, statement: Statement[T]) -> Pending[T]:
        """Queue a statement; its answer is there when the block has ended."""
        query = statement.query
        name = self._session.prepared.get(query.text) or self._new.get(query.text) or self._prepare(query)
        params = [self._text(statement.params[name]) for name in query.names]
        self._pq.send_query_prepared(name, params, result_format=Format.BINARY)
        pending = Pending(statement, self._transformer)
        self._takers.append(pending.take)
        return pending

    def load(self, statement: Statement[T]) -> Pending[T] | None:
        """Make a statement ready for `fire`; None if this connection has not prepared it yet."""
        name = self._session.prepared.get(statement.query.text)
        if name is None:
            return None
        self._loaded.append((name, [self._text(statement.params[param]) for param in statement.query.names]))
        pending = Pending(statement, self._transformer)
        self._takers.append(pending.take)
        return pending

    def fire(self) -> None:
        """Send what is loaded, as `departing` does."""
        with self.departing():
            for name, params in self._loaded:
                self._pq.send_query_prepared(name, params, result_format=Format.BINARY)

    def run(self, command: LiteralString) -> None:
        """Queue a command without parameters or answer."""
        self._pq.send_query_params(command.encode(), None)
        self._takers.append(_ignore)

    def begin(self) -> None:
        """Begin a READ COMMITTED transaction, whatever the role's default: SKIP LOCKED needs it."""
        self.run("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")
        self._begun = True

    def commit(self) -> None:
        """Commit the transaction begun in this block."""
        self.run("COMMIT")
        self._begun = False

    def flush(self) -> None:
        """Send what is queued, as far as the network takes it, so that the server is at work before the block ends."""
        self._session.unsent = bool(self._pq.flush())

    def _prepare(self, query: Query) -> bytes:
        session, text = self._session, query.text
        session.count += 1
        name = self._new[text] = b"pgqueue_%d" % session.count
        self._pq.send_prepare(name, query.numbered().encode(session.encoding))
        self._takers.append(lambda _: session.prepared.__setitem__(text, name))
        return name

    def _text(self, value: object) -> bytes | None:
        """Write a parameter as Postgres reads it; what is none of the common types is left to psycopg."""
        if value is None:
            return None
        if (text := literal(value)) is None:
            dumped = self._transformer.dump_sequence([value], [PyFormat.TEXT])[0]
            return None if dumped is None else bytes(dumped)
        if "\0" in text:
            raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
        return text.encode(self._session.encoding)

    def _undo(self, error: BaseException | None) -> None:
        """Undo what was sent of a transaction that the caller could not complete: the next block would commit it."""
        if error is not None and self._begun:
            self.run("ROLLBACK")

    def _enter(self) -> None:
        if self._connection.closed:
            raise psycopg.OperationalError("the connection is closed")
        self._pq.enter_pipeline_mode()

    def _depart(self) -> None:
        try:
            self._pq.pipeline_sync()
            self.flush()
        except BaseException:
            self._connection.close()  # half a block is of no use to whoever comes next
            raise
        self._session.away.append(self)

    def _take_in(self, last: Pipeline) -> None:
        """Take the answers of all blocks up to `last`; of all there are, if one of them broke its transaction."""
        away = self._session.away
        try:
            while away and (last in away or self._broken):
                away.popleft()._answer()  # noqa: SLF001 - one of us
            if away:
                return
            if self._broken:
                self.run("ROLLBACK")
                self._pq.pipeline_sync()
                self._answer()
            self._pq.exit_pipeline_mode()
        except BaseException:
            self._connection.close()
            raise

    @property
    def _broken(self) -> bool:
        return self._pq.transaction_status == TransactionStatus.INERROR

    def _answer(self) -> None:
        """Send the rest, hand each answer to who waits for it, and keep the first error among them."""
        self.flush()
        poll = select.poll()
        poll.register(self._pq.socket, _READ)
        for take in self._takers:
            while (result := self._next(poll)) is not None:
                if result.status in _FAILED:
                    self._failed = self._failed or result
                elif result.status != ExecStatus.PIPELINE_ABORTED:
                    take(result)
        self._next(poll)  # the answer to the sync
        self._takers.clear()

    def _next(self, poll: select.poll) -> PGresult | None:
        """Wait for the next answer; None is the end of one statement's."""
        pq = self._pq
        while pq.is_busy():
            poll.modify(pq.socket, _WRITE if self._session.unsent else _READ)
            for _, event in poll.poll():
                if event & select.POLLOUT:
                    self.flush()
                if event & ~select.POLLOUT:
                    pq.consume_input()
        result = pq.get_result()
        if result is None and pq.status != ConnStatus.OK:
            raise psycopg.OperationalError(pq.get_error_message(self._session.encoding))
        return result


def literal(value: object) -> str | None:
    """Return the text that Postgres reads as this value; None where that is not known here."""
    match value:
        case str():
            return value
        case bool():
            return "t" if value else "f"
        case int() | float():
            return repr(value)
        case timedelta():
            return f"{value.days} days {value.seconds}.{value.microseconds:06d} seconds"
        case list() | tuple():
            return _array(value)
        case _:
            return None


def _array(values: Sequence[object]) -> str | None:
    kinds = set(map(type, values))
    if kinds <= {int, float, bool}:
        return f"{{{','.join(map(repr, values))}}}"
    if kinds <= {str, type(None)}:
        return f"{{{','.join('NULL' if v is None else _quoted(str(v)) for v in values)}}}"
    return None


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _error(failed: PGresult, encoding: str) -> psycopg.Error:
    if failed.error_field(DiagnosticField.SQLSTATE) is None:  # libpq's own: the connection is gone
        return psycopg.OperationalError(failed.get_error_message(encoding))
    return error_from_result(failed, encoding=encoding)


def _ignore(result: PGresult) -> None:
    """Take no notice of an answer."""
