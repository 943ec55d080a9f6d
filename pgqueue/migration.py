"""One run of Alembic over a database: the lock that keeps others out, the retries, the errors that explain.

A lock that a revision cannot get within `lock_timeout` is given up and tried again a few times, because a
waiting ALTER TABLE makes everybody behind it wait too.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from pgqueue import dsn as dsns
from pgqueue.connection import execute
from pgqueue.errors import (
    BadOption,
    MigrationBlocked,
    MigrationFailed,
    MigrationRefused,
    SchemaTooNew,
    UnknownRevision,
)
from pgqueue.schema_version import REVISION, InstalledSchema, installed, serves
from pgqueue.statement import Statement, load, nothing, scalar, table

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

OLDEST_SERVER = 15
_SQL = load("pgqueue", "migrate")
# Alembic keeps the context of a run in module globals: one run at a time in a process.
_ONE_RUN = threading.Lock()
_TRY_AGAIN = ("55P03", "40P01")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a migration waits, in seconds: for the lock of one statement, and for another migration."""

    lock_timeout: float = 5.0
    tries: int = 5
    wait: float = 60.0

    def __post_init__(self) -> None:
        if not 0.001 <= self.lock_timeout <= 86_400:
            raise BadOption("lock_timeout", f"{self.lock_timeout} s is not between 1 ms and a day")
        if not 1 <= self.tries <= 1000:
            raise BadOption("tries", f"{self.tries} is not between 1 and 1000")
        if not 0 <= self.wait <= 86_400:
            raise BadOption("wait", f"{self.wait} s is not between 0 s and a day")


class LockNotFree(Exception):
    """A statement of a revision did not get its lock; its transaction was rolled back."""

    def __init__(self, cause: psycopg.Error) -> None:
        self.cause = cause
        super().__init__(str(cause))


def move(dsn: str, goal: str | None, *, down: bool, patience: Patience) -> None:
    """Take a database up or down to a revision (None: base), alone, with retries.

    The lock of migrations is held by an open transaction of a connection of its own: it ends with the
    process, and a pooler that hands out transactions does not break it.
    """
    with _ONE_RUN, dsns.connect(dsn) as guard, explained(guard):
        # A role's default may be SERIALIZABLE: its snapshot would not show what others did while this waits.
        guard.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        _require_server(guard)
        if _look(guard).revision == goal:
            return
        _lock(guard, patience)
        # A look under the lock: whoever held it may have done the work.
        schema = _look(guard)
        if schema.revision == goal:
            return
        if schema.revision is not None and schema.revision not in known():
            if serves(schema) and not down and goal == REVISION:
                return
            raise SchemaTooNew(schema.revision, REVISION)
        at, to = schema.revision or "", goal or ""
        if (at < to) if down else (at > to):
            return
        for attempt in range(1, patience.tries + 1):
            try:
                _run(dsn, goal or "base", down=down, patience=patience)
            except LockNotFree as error:
                if attempt == patience.tries:
                    raise MigrationBlocked(
                        f"{attempt} times {patience.lock_timeout:g} s were too short to get a lock "
                        f"({dsns.one_line(error.cause)})",
                        remedy="end the transaction that holds it (see pg_locks), or raise --lock-timeout",
                    ) from error.cause
                time.sleep(random.uniform(0.1, min(5.0, 0.25 * 2**attempt)))
            else:
                return


def offline(start: str | None, goal: str | None, *, patience: Patience) -> str:
    """Return the script from one revision to another (None: base)."""
    from alembic import command

    script = StringIO()
    down = (goal or "") < (start or "")
    with _ONE_RUN:
        go = command.downgrade if down else command.upgrade
        go(_config(script, down=down, patience=patience), f"{start or 'base'}:{goal or 'base'}", sql=True)
    return script.getvalue()


@contextmanager
def explained(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Turn what Postgres refuses into an error that names the remedy."""
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        role, database = connection.info.user, connection.info.dbname
        raise MigrationRefused(
            f"role {role!r} lacks a right: {dsns.one_line(error)}",
            remedy=f'as a superuser: CREATE SCHEMA pgqueue AUTHORIZATION "{role}" in database {database!r}, '
            "or migrate as the role that owns the schema",
        ) from error
    except psycopg.errors.ReadOnlySqlTransaction as error:
        raise MigrationRefused(
            "transactions here are read-only", remedy="give the DSN of the primary"
        ) from error
    except psycopg.errors.UndefinedObject as error:
        raise MigrationRefused(dsns.one_line(error), remedy="create the role first") from error
    except psycopg.Error as error:
        raise MigrationFailed(
            f"{type(error).__name__}: {dsns.one_line(error)}",
            remedy="nothing of that revision is in place; remove the cause and start again",
        ) from error


def target(revision: str) -> str | None:
    """Return the full name of a revision given as head, base (None), pgqueue_0001, 0001 or 1."""
    if revision == "head":
        return REVISION
    if revision == "base":
        return None
    name = f"pgqueue_{int(revision):04d}" if revision.isdecimal() else revision
    if name not in (names := known()):
        raise UnknownRevision(revision, names)
    return name


def known() -> tuple[str, ...]:
    """Return the names of all revisions, oldest first."""
    return tuple(sorted(script.revision for script in scripts().walk_revisions()))


def scripts() -> ScriptDirectory:
    """Return Alembic's view of the revisions."""
    from alembic.script import ScriptDirectory

    return ScriptDirectory(str(folder()))


def folder() -> Path:
    """Return the folder of the migrations: inside the installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "_migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def _run(dsn: str, goal: str, *, down: bool, patience: Patience) -> None:
    from alembic import command
    from sqlalchemy import Connection, create_engine, event
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.pool import NullPool

    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: dsns.connect(dsn),
        poolclass=NullPool,
        isolation_level="READ COMMITTED",
    )
    settings = {"lock_timeout": f"{_milliseconds(patience)}ms"}

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(_SQL["settings"].text, settings)

    try:
        with engine.connect() as connection:
            config = _config(StringIO(), down=down, patience=patience)
            config.attributes["connection"] = connection
            (command.downgrade if down else command.upgrade)(config, goal)
            connection.commit()
    except DBAPIError as error:
        if not isinstance(error.orig, psycopg.Error):
            raise
        if error.orig.sqlstate in _TRY_AGAIN:
            raise LockNotFree(error.orig) from error
        raise error.orig from error
    finally:
        engine.dispose()


def _config(output: StringIO, *, down: bool, patience: Patience) -> Config:
    from alembic.config import Config

    config = Config(output_buffer=output, stdout=output)
    # Alembic's options know percent signs as interpolation.
    config.set_main_option("script_location", str(folder()).replace("%", "%%"))
    config.attributes["down"] = down
    config.attributes["lock_timeout_ms"] = _milliseconds(patience)
    return config


def _milliseconds(patience: Patience) -> int:
    return round(patience.lock_timeout * 1000)


def _look(guard: psycopg.Connection[Any]) -> InstalledSchema:
    """Read the revision and keep no lock on the version table: the rollback gives it back."""
    with guard.transaction(force_rollback=True):
        return installed(guard)


def _lock(guard: psycopg.Connection[Any], patience: Patience) -> None:
    """Take the lock of migrations in the guard's transaction; ask until the deadline, never wait in line."""
    execute(guard, Statement(_SQL["guard"], {}, nothing))
    deadline = time.monotonic() + patience.wait
    while not execute(guard, Statement(_SQL["try_lock"], {}, scalar)):
        if time.monotonic() >= deadline:
            raise MigrationBlocked(
                f"another migration of this database has been running for {patience.wait:g} s",
                remedy="wait for it and start again, or raise --wait",
            )
        time.sleep(random.uniform(0.05, 0.25))


def _require_server(guard: psycopg.Connection[Any]) -> None:
    number, name, standby = execute(guard, Statement(_SQL["server"], {}, table))[0]
    if number < OLDEST_SERVER * 10_000:
        raise MigrationRefused(
            f"the server is PostgreSQL {name}", remedy=f"use PostgreSQL {OLDEST_SERVER} or newer"
        )
    if standby:
        raise MigrationRefused("the server is a standby", remedy="give the DSN of the primary")
