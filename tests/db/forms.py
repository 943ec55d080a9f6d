"""Every kind of handle that enqueue takes, behind one synchronous face for the tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import psycopg
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from pgqueue import JobRef
from pgqueue.app import App
from pgqueue.prepared import Prepared

SYNC = ("psycopg", "connection", "session", "scoped_session", "django")
ASYNC = (
    *("async_psycopg", "async_connection", "async_session", "async_scoped_session"),
    *("asyncpg_connection", "asyncpg_session", "asyncpg_scoped_session"),
)
KINDS = SYNC + ASYNC


@dataclass(slots=True, kw_only=True)
class Form:
    """One handle. Whatever is asynchronous runs on a loop of its own."""

    kind: str
    handle: Any
    run: Callable[[Any], Any]
    text: Callable[[str], Any]

    def enqueue(self, job: Prepared[Any], payload: Any = None) -> JobRef:
        """Enqueue one job by its handler."""
        return self._call(job.aenqueue if self.kind in ASYNC else job.enqueue, payload)  # type: ignore[no-any-return]

    def enqueue_many(self, job: Prepared[Any], payloads: list[Any]) -> list[JobRef]:
        """Enqueue many jobs by their handler."""
        many = job.aenqueue_many if self.kind in ASYNC else job.enqueue_many
        return self._call(many, payloads)  # type: ignore[no-any-return]

    def by_name(self, app: App, name: str, payload: Any = None, **options: Any) -> JobRef:
        """Enqueue one job by its name."""
        return self._call(app.aenqueue if self.kind in ASYNC else app.enqueue, name, payload, **options)  # type: ignore[no-any-return]

    def execute(self, sql: str) -> None:
        """Run a statement of the business on the same handle."""
        if self.kind == "django":
            with self.handle.cursor() as cursor:
                cursor.execute(sql)
        else:
            self.run(self.handle.execute(self.text(sql)))

    def commit(self) -> None:
        """Commit the handle's transaction."""
        self.run(self.handle.commit())

    def rollback(self) -> None:
        """Roll the handle's transaction back."""
        self.run(self.handle.rollback())

    def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self.run(function(self.handle, *args, **options))


@contextmanager
def opened(kind: str, dsn: str, *, autocommit: bool = False) -> Iterator[Form]:
    """Open a handle of one kind with an empty search_path; with autocommit if that is asked for."""
    with ExitStack() as stack:
        if kind in ASYNC:
            runner = stack.enter_context(asyncio.Runner())
            handle = _asynchronous(kind, dsn, stack, runner, autocommit=autocommit)
            run: Callable[[Any], Any] = lambda pending: runner.run(_waited(pending))  # noqa: E731
        else:
            handle = _synchronous(kind, dsn, stack, autocommit=autocommit)
            run = lambda done: done  # noqa: E731
        text: Callable[[str], Any] = str if "psycopg" in kind else sqlalchemy.text
        yield Form(kind=kind, handle=handle, run=run, text=text)


async def _waited(pending: Any) -> Any:
    return await pending


def _synchronous(kind: str, dsn: str, stack: ExitStack, *, autocommit: bool) -> Any:
    if kind == "psycopg":
        made = stack.enter_context(psycopg.connect(dsn, autocommit=autocommit, options="-c search_path="))
        stack.callback(made.rollback)
        return made
    if kind == "django":
        return _django(dsn, stack, autocommit=autocommit)
    engine = sqlalchemy.create_engine(
        dsn.replace("postgresql://", "postgresql+psycopg://", 1),
        poolclass=NullPool,
        connect_args={"options": "-c search_path="},
        **({"isolation_level": "AUTOCOMMIT"} if autocommit else {}),
    )
    stack.callback(engine.dispose)
    if kind == "connection":
        return stack.enter_context(engine.connect())
    if kind == "session":
        return stack.enter_context(Session(engine))
    scoped = scoped_session(sessionmaker(engine))
    stack.callback(scoped.remove)
    return scoped


def _asynchronous(kind: str, dsn: str, stack: ExitStack, runner: asyncio.Runner, *, autocommit: bool) -> Any:
    if kind == "async_psycopg":
        made = runner.run(
            psycopg.AsyncConnection.connect(dsn, autocommit=autocommit, options="-c search_path=")
        )
        stack.callback(lambda: runner.run(made.close()))
        return made
    driver = "asyncpg" if kind.startswith("asyncpg") else "psycopg"
    empty = (
        {"server_settings": {"search_path": ""}} if driver == "asyncpg" else {"options": "-c search_path="}
    )
    engine = create_async_engine(
        dsn.replace("postgresql://", f"postgresql+{driver}://", 1),
        poolclass=NullPool,
        connect_args=empty,
        **({"isolation_level": "AUTOCOMMIT"} if autocommit else {}),
    )
    stack.callback(lambda: runner.run(engine.dispose()))
    handle: Any
    if kind.endswith("_connection"):
        handle = runner.run(_waited(engine.connect()))
    elif kind.endswith("scoped_session"):
        handle = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
    else:
        handle = AsyncSession(engine)
    stack.callback(lambda: runner.run(handle.close()))
    return handle


def _django(dsn: str, stack: ExitStack, *, autocommit: bool) -> Any:
    import django
    import django.conf
    from django.db import connection, connections

    if not django.conf.settings.configured:
        django.conf.settings.configure(
            USE_TZ=True, DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}}
        )
        django.setup()
    parts, query = urlsplit(dsn), parse_qs(urlsplit(dsn).query)
    connections.settings["default"] |= {
        "NAME": parts.path[1:],
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or query.get("host", [""])[0],
        "PORT": str(parts.port or query.get("port", [""])[0]),
        "OPTIONS": {"options": "-c search_path="},
    }
    if hasattr(connections._connections, "default"):
        del connections["default"]
    stack.callback(connection.close)
    connection.ensure_connection()
    connection.set_autocommit(autocommit)
    return connection
