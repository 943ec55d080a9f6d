"""The one door to Postgres: run a Statement on whatever handle the caller has.

Handles: psycopg `Connection` and `AsyncConnection`; SQLAlchemy `Session`, `Connection`, `AsyncSession`,
`AsyncConnection` (and their scoped forms) over psycopg or asyncpg; Django's connection. The statement runs on
that very handle, inside whatever transaction it has: nothing is opened, committed or unwrapped here.
SQLAlchemy handles are used through their own `exec_driver_sql`, so events, pools and asyncpg work as usual.

SQLAlchemy and Django are looked up among the loaded modules and never imported: a handle of theirs can only
exist where they are loaded already.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import psycopg
import psycopg.rows
from psycopg.pq import TransactionStatus

from pgqueue.errors import ConfigError, NotInTransaction
from pgqueue.statement import Row, Statement

T = TypeVar("T")

_SYNC = "a psycopg Connection, SQLAlchemy Session or Connection, or Django's connection"
_ASYNC = "a psycopg AsyncConnection, SQLAlchemy AsyncSession or AsyncConnection"


def execute(handle: Any, statement: Statement[T]) -> T:
    """Run a statement on a synchronous handle and read its rows."""
    query = statement.query
    if isinstance(handle, psycopg.Connection):
        with handle.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
            cursor.execute(query.text, statement.params)
            return statement.read(cursor.fetchall() if cursor.description else [])
    if (connection := _sqlalchemy(handle)) is not None:
        text, params = _driver_form(connection.dialect.paramstyle, statement)
        result = connection.exec_driver_sql(text, params)
        return statement.read([tuple(row) for row in result] if result.returns_rows else [])
    if _is_django(handle):
        with handle.cursor() as cursor:
            cursor.execute(query.text, statement.params)
            return statement.read(cursor.fetchall() if cursor.description else [])
    raise _wrong_handle(handle, _SYNC, "aenqueue / aadd take the asynchronous ones")


async def execute_async(handle: Any, statement: Statement[T]) -> T:
    """Run a statement on an asynchronous handle and read its rows."""
    if isinstance(handle, psycopg.AsyncConnection):
        async with handle.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
            await cursor.execute(statement.query.text, statement.params)
            return statement.read(await cursor.fetchall() if cursor.description else [])
    if (connection := await _sqlalchemy_async(handle)) is not None:
        text, params = _driver_form(connection.dialect.paramstyle, statement)
        result = await connection.exec_driver_sql(text, params)
        return statement.read([tuple(row) for row in result] if result.returns_rows else [])
    raise _wrong_handle(handle, _ASYNC, "enqueue / add take the synchronous ones")


def require_transaction(handle: Any) -> None:
    """Raise NotInTransaction if a synchronous handle would commit the next statement at once."""
    if isinstance(handle, psycopg.Connection):
        _require_psycopg(handle)
    elif (connection := _sqlalchemy(handle)) is not None:
        _require_driver(handle, connection.connection.dbapi_connection)
    elif _is_django(handle) and handle.get_autocommit() and not handle.in_atomic_block:
        raise NotInTransaction(handle)


async def require_transaction_async(handle: Any) -> None:
    """Raise NotInTransaction if an asynchronous handle would commit the next statement at once."""
    if isinstance(handle, psycopg.AsyncConnection):
        _require_psycopg(handle)
    elif (connection := await _sqlalchemy_async(handle)) is not None:
        _require_driver(handle, (await connection.get_raw_connection()).dbapi_connection)


def _require_psycopg(handle: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    if handle.autocommit and handle.info.transaction_status == TransactionStatus.IDLE:
        raise NotInTransaction(handle)


def _require_driver(handle: Any, dbapi: Any) -> None:
    # The dialects' adapters of asynchronous drivers carry the same attribute as psycopg's connection.
    if not getattr(dbapi, "autocommit", False):
        return
    info = getattr(dbapi, "info", None)
    if info is None or info.transaction_status == TransactionStatus.IDLE:
        raise NotInTransaction(handle)


def _sqlalchemy(handle: Any) -> Any:
    """Return the SQLAlchemy Connection behind a handle of SQLAlchemy, None for any other handle."""
    if "sqlalchemy" not in sys.modules:
        return None
    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session, scoped_session

    if isinstance(handle, Connection):
        return handle
    return handle.connection() if isinstance(handle, Session | scoped_session) else None


async def _sqlalchemy_async(handle: Any) -> Any:
    if "sqlalchemy.ext.asyncio" not in sys.modules:
        return None
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    if isinstance(handle, AsyncConnection):
        return handle
    return await handle.connection() if isinstance(handle, AsyncSession | async_scoped_session) else None


def _is_django(handle: Any) -> bool:
    if "django.db" not in sys.modules:
        return False
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.utils.connection import ConnectionProxy

    return isinstance(handle, BaseDatabaseWrapper | ConnectionProxy)


def _driver_form(paramstyle: str, statement: Statement[Any]) -> tuple[str, Any]:
    if paramstyle == "pyformat":
        return statement.query.text, dict(statement.params)
    if paramstyle == "numeric_dollar":
        return statement.query.numbered(), tuple(statement.params[name] for name in statement.query.names)
    raise ConfigError(f"SQLAlchemy driver with paramstyle {paramstyle!r}: use psycopg (3) or asyncpg")


def _wrong_handle(handle: Any, wanted: str, other: str) -> ConfigError:
    kind = f"{type(handle).__module__}.{type(handle).__qualname__}"
    return ConfigError(f"the first argument is {kind}, not {wanted} ({other})")


__all__ = ["Row", "execute", "execute_async", "require_transaction", "require_transaction_async"]
