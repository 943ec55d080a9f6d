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
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from pgqueue.errors import ConfigError, NotInTransaction, SchemaError, SchemaIncomplete, SchemaMissing
from pgqueue.statement import Row, Statement

T = TypeVar("T")

_SYNC = "a psycopg Connection, SQLAlchemy Session or Connection, or Django's connection"
_ASYNC = "a psycopg AsyncConnection, SQLAlchemy AsyncSession or AsyncConnection"


def execute(handle: Any, statement: Statement[T]) -> T:
    """Run a statement on a synchronous handle and read its rows.

    Raises SchemaError where Postgres does not know what the statement names, else what the handle's library
    raises.
    """
    if isinstance(handle, psycopg.Connection):
        rows = _psycopg_rows(handle, statement)
    elif (connection := _sqlalchemy(handle)) is not None:
        rows = _sqlalchemy_rows(connection, statement)
    elif _is_django(handle):
        rows = _django_rows(handle, statement)
    else:
        raise _wrong_handle(handle, _SYNC, "aenqueue / aadd take the asynchronous ones")
    return statement.read(rows)


async def execute_async(handle: Any, statement: Statement[T]) -> T:
    """Run a statement on an asynchronous handle and read its rows; raises like `execute`."""
    if isinstance(handle, psycopg.AsyncConnection):
        rows = await _async_psycopg_rows(handle, statement)
    elif (connection := await _sqlalchemy_async(handle)) is not None:
        rows = await connection.run_sync(_sqlalchemy_rows, statement)
    else:
        raise _wrong_handle(handle, _ASYNC, "enqueue / add take the synchronous ones")
    return statement.read(rows)


def require_transaction(handle: Any) -> None:
    """Raise NotInTransaction if a synchronous handle would commit the next statement at once."""
    if isinstance(handle, psycopg.Connection):
        if handle.autocommit and _piped(handle):
            with handle.pipeline():  # whether a BEGIN is under way is known after a sync
                pass
        _require_psycopg(handle)
    elif (connection := _sqlalchemy(handle)) is not None:
        _require_postgres(connection.dialect.name, handle)
        _require_driver(handle, connection.connection.dbapi_connection)
    elif _is_django(handle):
        _require_postgres(handle.vendor, handle)
        if handle.get_autocommit() and not handle.in_atomic_block:
            raise NotInTransaction(handle)
    else:
        raise _wrong_handle(handle, _SYNC, "aenqueue / aadd take the asynchronous ones")


async def require_transaction_async(handle: Any) -> None:
    """Raise NotInTransaction if an asynchronous handle would commit the next statement at once."""
    if isinstance(handle, psycopg.AsyncConnection):
        if handle.autocommit and _piped(handle):
            async with handle.pipeline():
                pass
        _require_psycopg(handle)
    elif (connection := await _sqlalchemy_async(handle)) is not None:
        _require_postgres(connection.dialect.name, handle)
        _require_driver(handle, (await connection.get_raw_connection()).dbapi_connection)
    else:
        raise _wrong_handle(handle, _ASYNC, "enqueue / add take the synchronous ones")


def _psycopg_rows(handle: psycopg.Connection[Any], statement: Statement[Any]) -> list[Row]:
    try:
        with _cursor(handle) as cursor:
            cursor.execute(statement.query.text, statement.params)
            # In a pipeline the answer comes with the fetch, and with it whether there are rows.
            return cursor.fetchall() if cursor.description or _piped(handle) else []
    except psycopg.Error as error:
        return _no_rows(handle, error)


async def _async_psycopg_rows(handle: psycopg.AsyncConnection[Any], statement: Statement[Any]) -> list[Row]:
    try:
        async with _async_cursor(handle) as cursor:
            await cursor.execute(statement.query.text, statement.params)
            return await cursor.fetchall() if cursor.description or _piped(handle) else []
    except psycopg.Error as error:
        return _no_rows(handle, error)


def _no_rows(
    handle: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], error: psycopg.Error
) -> list[Row]:
    """Return no rows where a pipeline had none to fetch; raise every other error."""
    if _piped(handle) and isinstance(error, psycopg.ProgrammingError) and error.sqlstate is None:
        return []
    raise _schema_error(error) or error


def _sqlalchemy_rows(connection: Any, statement: Statement[Any]) -> list[Row]:
    from sqlalchemy.exc import DBAPIError

    text, params = _driver_form(connection.dialect, statement)
    try:
        result = connection.exec_driver_sql(text, params)
    except DBAPIError as error:
        raise _schema_error(error.orig) or error from error.orig
    return [tuple(row) for row in result] if result.returns_rows else []


def _django_rows(handle: Any, statement: Statement[Any]) -> list[Row]:
    from django.db import Error

    try:
        with handle.cursor() as cursor:
            cursor.execute(statement.query.text, statement.params)
            return cursor.fetchall() if cursor.description else []
    except Error as error:
        raise _schema_error(error.__cause__) or error from error.__cause__


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


def _piped(handle: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> bool:
    return handle.info.pipeline_status != PipelineStatus.OFF


def _cursor(handle: psycopg.Connection[Any]) -> psycopg.Cursor[Row]:
    if issubclass(handle.cursor_factory, psycopg.RawCursor):  # it takes $1, not %(name)s
        return psycopg.Cursor(handle, row_factory=tuple_row)
    return handle.cursor(row_factory=tuple_row)


def _async_cursor(handle: psycopg.AsyncConnection[Any]) -> psycopg.AsyncCursor[Row]:
    if issubclass(handle.cursor_factory, psycopg.AsyncRawCursor):
        return psycopg.AsyncCursor(handle, row_factory=tuple_row)
    return handle.cursor(row_factory=tuple_row)


def _sqlalchemy(handle: Any) -> Any:
    """Return the SQLAlchemy Connection behind a handle of SQLAlchemy, None for any other handle."""
    if (engine := sys.modules.get("sqlalchemy.engine")) and isinstance(handle, engine.Connection):
        return handle
    if (orm := sys.modules.get("sqlalchemy.orm")) and isinstance(handle, orm.Session | orm.scoped_session):
        return handle.connection()
    return None


async def _sqlalchemy_async(handle: Any) -> Any:
    if (asyncio := sys.modules.get("sqlalchemy.ext.asyncio")) is None:
        return None
    if isinstance(handle, asyncio.AsyncConnection):
        return handle
    if isinstance(handle, asyncio.AsyncSession | asyncio.async_scoped_session):
        return await handle.connection()
    return None


def _is_django(handle: Any) -> bool:
    if "django.db" not in sys.modules:
        return False
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.utils.connection import ConnectionProxy

    return isinstance(handle, BaseDatabaseWrapper | ConnectionProxy)


def _driver_form(dialect: Any, statement: Statement[Any]) -> tuple[str, Any]:
    if dialect.paramstyle == "pyformat":
        return statement.query.text, dict(statement.params)
    if dialect.paramstyle == "numeric_dollar":
        return statement.query.numbered(), tuple(statement.params[name] for name in statement.query.names)
    raise ConfigError(f"SQLAlchemy's driver {dialect.driver} is not supported; use psycopg (3) or asyncpg")


def _require_postgres(database: str, handle: Any) -> None:
    if database != "postgresql":
        raise ConfigError(
            f"{type(handle).__module__}.{type(handle).__qualname__} speaks to {database}; "
            "jobs are rows of PostgreSQL, in the very transaction of your business rows"
        )


def _schema_error(error: BaseException | None) -> SchemaError | None:
    """Tell a missing or older schema from other errors of the driver."""
    state = getattr(error, "sqlstate", None)
    if state == "3F000":
        return SchemaMissing()
    first = str(error).partition("\n")[0]
    if state in ("42P01", "42883") and "pgqueue." in first:  # a table, a function
        return SchemaIncomplete(first)
    return None


def _wrong_handle(handle: Any, wanted: str, other: str) -> ConfigError:
    kind = f"{type(handle).__module__}.{type(handle).__qualname__}"
    return ConfigError(f"the first argument is {kind}, not {wanted} ({other})")


__all__ = ["Row", "execute", "execute_async", "require_transaction", "require_transaction_async"]
