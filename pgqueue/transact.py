"""Transactional handlers: effects and acknowledgement in one commit.

The handler gets a handle on a READ COMMITTED transaction of its own. When it returns, the job's acknowledgement
(and its idempotency key) is the transaction's last statement, fenced by the lease: the commit makes the effects
and the end of the job true together, and a lost lease undoes both. Exactly once, as far as effects are rows of
this database. A handler that commits or rolls back by itself does so on a savepoint.

Connections come from a pool of this process, one for each handler at work. Such a transaction holds back vacuum
and the floors' proof, so it is short: the server ends what exceeds the job's timeout.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from contextvars import Context
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from pgqueue.app import JobType
from pgqueue.connection import execute, execute_async
from pgqueue.errors import LeaseLost
from pgqueue.finish import complete
from pgqueue.job import Claim, Claimed, Completed, Fenced, Job, Outcome, Snoozed, Written
from pgqueue.ledger import seal
from pgqueue.run import Isolated, Runner, failure_of
from pgqueue.statement import Statement, load, nothing

_SQL = load("pgqueue", "transact")
WRITTEN = Written()
C = TypeVar("C", psycopg.Connection[Any], psycopg.AsyncConnection[Any])
#: The handler's handle, and the one its acknowledgement goes through when `end` was called.
Opened = tuple[Any, Any]


class TransactionalRunner(Runner):
    """Runs the jobs of one transactional job type."""

    __slots__ = ("_handle", "_transactions")

    def __init__(self, kind: JobType[Any], transactions: Transactions) -> None:
        super().__init__(kind)
        self.plain = False
        self._transactions = transactions
        self._handle = kind.handle_parameter or ""

    def call(self, claimed: Claimed, job: Job | None) -> Outcome:
        """Run a `def` handler and its acknowledgement in one transaction."""
        try:
            arguments, named = self.arguments(claimed, job)
            with ExitStack() as stack:
                try:
                    opening = self._transactions.begin(self.kind.handle_type, self.timeout(claimed))
                    handle, base = stack.enter_context(opening)
                except Exception as error:  # noqa: BLE001 - only the database's trouble is not the handler's
                    return _unopened(error) or self.failed(claimed, error)
                value = Context().run(self.kind.handler, *arguments, **named, **{self._handle: handle})
                if handle is not base:
                    handle.commit()
                if not execute(base, self._seal(claimed, job, value)):
                    raise LeaseLost(claimed.id, claimed.lease)
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything; it becomes the outcome
            return self._ended(claimed, error)
        return WRITTEN

    async def acall(self, claimed: Claimed, job: Job | None) -> Outcome:
        """Run an `async def` handler and its acknowledgement in one transaction."""
        try:
            arguments, named = self.arguments(claimed, job)
            async with AsyncExitStack() as stack:
                try:
                    opening = self._transactions.abegin(self.kind.handle_type, self.timeout(claimed))
                    handle, base = await stack.enter_async_context(opening)
                except Exception as error:  # noqa: BLE001 - as above
                    return _unopened(error) or self.failed(claimed, error)
                value = await Isolated(self.kind.handler(*arguments, **named, **{self._handle: handle}))
                if handle is not base:
                    await handle.commit()
                if not await execute_async(base, self._seal(claimed, job, value)):
                    raise LeaseLost(claimed.id, claimed.lease)
        except Exception as error:  # noqa: BLE001 - as above; cancellation is the caller's
            return self._ended(claimed, error)
        return WRITTEN

    def _seal(self, claimed: Claimed, job: Job | None, value: Any) -> Statement[list[int]]:
        """Return the last statement of the transaction."""
        claim, end = Claim(claimed.id, claimed.lease), self.ended(claimed, job, value)
        return complete([(claim, end)], wait=True) if isinstance(end, Completed) else seal(claim)

    def _ended(self, claimed: Claimed, error: BaseException) -> Outcome:
        if isinstance(error, LeaseLost) and error.job_id == claimed.id:
            return Fenced()
        return self.failed(claimed, error)


class Transactions:
    """Opens the transactions of one process: psycopg's and SQLAlchemy's handles, from pools made when first needed."""

    def __init__(self, dsn: str, name: str, size: int) -> None:
        self._dsn = dsn
        self._size = size
        self._options: dict[str, Any] = {
            "application_name": f"pgqueue-handler {name}"[:63],
            "connect_timeout": 10,
        }
        self._idle: deque[psycopg.Connection[Any]] = deque()
        self._idle_async: deque[psycopg.AsyncConnection[Any]] = deque()
        self._engine: Any = None
        self._async_engine: Any = None
        self._lock = threading.Lock()

    @contextmanager
    def begin(self, kind: type | None, limit: float) -> Iterator[Opened]:
        """Open a transaction for a handle of this kind; commit it unless the block raises."""
        if kind is None or not kind.__module__.startswith("sqlalchemy"):
            with self._connection() as connection, connection.transaction():
                execute(connection, _limits(limit))
                yield connection, connection
            return
        with self._alchemy().connect() as connection, connection.begin():
            execute(connection, _limits(limit))
            if kind.__qualname__ == "Connection":
                yield connection, connection
                return
            from sqlalchemy.orm import Session

            with Session(connection, join_transaction_mode="create_savepoint") as session:
                yield session, connection

    @asynccontextmanager
    async def abegin(self, kind: type | None, limit: float) -> AsyncIterator[Opened]:
        """Open a transaction for an asynchronous handle of this kind."""
        if kind is None or not kind.__module__.startswith("sqlalchemy"):
            async with self._async_connection() as connection, connection.transaction():
                await execute_async(connection, _limits(limit))
                yield connection, connection
            return
        async with self._async_alchemy().connect() as connection, connection.begin():
            await execute_async(connection, _limits(limit))
            if kind.__qualname__ == "AsyncConnection":
                yield connection, connection
                return
            from sqlalchemy.ext.asyncio import AsyncSession

            async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
                yield session, connection

    async def aclose(self) -> None:
        """Close what is idle of the asynchronous kind; on the loop that opened it."""
        while self._idle_async:
            await self._idle_async.pop().close()
        if self._async_engine is not None:
            await self._async_engine.dispose()

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop().close()
        if self._engine is not None:
            self._engine.dispose()

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[Any]]:
        connection = _fit(self._idle) or self._connect()
        try:
            yield connection
        finally:
            if _clean(connection):
                self._idle.append(connection)
            else:
                connection.close()

    @asynccontextmanager
    async def _async_connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        connection = _fit(self._idle_async) or await self._aconnect()
        try:
            yield connection
        finally:
            if _clean(connection):
                self._idle_async.append(connection)
            else:
                await connection.close()

    def _connect(self) -> psycopg.Connection[Any]:
        connection = psycopg.connect(self._dsn, **self._options)
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        return connection

    async def _aconnect(self) -> psycopg.AsyncConnection[Any]:
        connection = await psycopg.AsyncConnection.connect(self._dsn, **self._options)
        await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
        return connection

    def _alchemy(self) -> Any:
        with self._lock:
            if self._engine is None:
                from sqlalchemy import create_engine

                self._engine = create_engine(
                    "postgresql+psycopg://", creator=self._connect, pool_size=self._size, pool_pre_ping=True
                )
            return self._engine

    def _async_alchemy(self) -> Any:
        if self._async_engine is None:  # only ever asked on the one event loop
            from sqlalchemy.ext.asyncio import create_async_engine

            self._async_engine = create_async_engine(
                "postgresql+psycopg://",
                async_creator=self._aconnect,
                pool_size=self._size,
                pool_pre_ping=True,
            )
        return self._async_engine


def _fit(idle: deque[C]) -> C | None:
    """Take an idle connection that the server has not closed meanwhile: that must cost no job an attempt."""
    while True:
        try:
            connection = idle.pop()
        except IndexError:
            return None
        try:
            for _ in range(2):  # the first may read the server's last word, the second finds the end
                connection.pgconn.consume_input()
        except psycopg.OperationalError:
            connection.pgconn.finish()
        else:
            return connection


def _unopened(error: Exception) -> Outcome | None:
    """Put off a job that found no transaction: the handler has not begun, so no attempt is spent.

    None for an error that is not the database's (a missing package, say), which no wait will mend.
    """
    if not isinstance(error, psycopg.Error) and type(error).__module__ != "sqlalchemy.exc":
        return None
    return Snoozed(delay=random.uniform(1.0, 2.0), failure=failure_of(error))


def _clean(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    """Tell whether a connection can serve the next handler: a cancelled one may be in the middle of something."""
    return not connection.closed and connection.info.transaction_status == TransactionStatus.IDLE


def _limits(seconds: float) -> Statement[None]:
    milliseconds = 0 if seconds == math.inf else max(1, int(seconds * 1000))
    return Statement(_SQL["limits"], {"ms": str(milliseconds)}, nothing)
