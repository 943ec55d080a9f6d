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
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Generic, LiteralString, Self, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from pgqueue.statement import Statement

T = TypeVar("T")


class Pending(Generic[T]):
    """The answer of a statement that was sent; read it after the block ended."""

    __slots__ = ("_cursor", "_statement")

    def __init__(self, cursor: psycopg.Cursor[Any], statement: Statement[T]) -> None:
        self._cursor = cursor
        self._statement = statement

    def result(self) -> T:
        """Read the rows."""
        return self._statement.read(self._cursor.fetchall() if self._cursor.description else [])

    @property
    def count(self) -> int:
        """How many rows the statement wrote, or returned."""
        return self._cursor.rowcount


class Pipeline:
    """One round trip on a psycopg connection in autocommit mode."""

    def __init__(self, connection: psycopg.Connection[Any], *, prepare: bool = True) -> None:
        self._connection = connection
        self._prepare = prepare
        self._pipeline = connection.pipeline()

    def __enter__(self) -> Self:
        self._pipeline.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._pipeline.__exit__(kind, error, trace)
        finally:
            if (
                not self._connection.closed
                and self._connection.info.transaction_status == TransactionStatus.INERROR
            ):
                self._connection.execute("ROLLBACK")

    def send(self, statement: Statement[T]) -> Pending[T]:
        """Queue a statement; its answer is there when the block has ended."""
        cursor = self._connection.cursor(binary=True)
        cursor.execute(statement.query.text, statement.params, prepare=self._prepare)
        return Pending(cursor, statement)

    def run(self, command: LiteralString) -> None:
        """Queue a command without parameters or answer."""
        self._connection.execute(command, prepare=False)

    def begin(self) -> None:
        """Begin a READ COMMITTED transaction, whatever the role's default: SKIP LOCKED needs it."""
        self.run("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")

    def commit(self) -> None:
        """Commit the transaction begun in this block."""
        self.run("COMMIT")
