"""Bring the schema of a database to the revision this code needs, with Alembic.

Safe when many processes start it at once: one works, the others wait for it and find nothing to do. Each
revision has a transaction of its own, so a stop in between leaves a valid older revision and never half a one.
A lock that a revision cannot get within `lock_timeout` is given up and tried again a few times, because a
waiting ALTER TABLE makes everybody behind it wait too.

Alembic and SQLAlchemy are imported when a migration runs and not before.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
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
from pgqueue.schema_version import REVISION, InstalledSchema, installed, require_schema
from pgqueue.statement import Statement, load, nothing, scalar, table

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

OLDEST_SERVER = 15
_SQL = load("pgqueue", "migrate")
_PREFIX = "pgqueue_"
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


def upgrade(dsn: str, revision: str = "head", *, patience: Patience | None = None) -> None:
    """Migrate up to `revision`; nothing happens if the database is there already.

    Makes the schema if it is missing and the role may. Raises SchemaTooNew, UnknownRevision, MigrationBlocked
    (somebody's lock), MigrationRefused (rights, server version, read-only) or DatabaseUnreachable.
    """
    target = _target(revision)
    if target is None:
        return
    _move(dsn, target, down=False, patience=patience or Patience())


def downgrade(dsn: str, revision: str, *, patience: Patience | None = None) -> None:
    """Migrate down to `revision`, or to `base`: below a revision its tables go, with all they hold.

    Raises as `upgrade` does.
    """
    _move(dsn, _target(revision) or "base", down=True, patience=patience or Patience())


def current(dsn: str) -> str | None:
    """Return the revision of the database, None if it has no tables of ours."""
    with dsns.connect(dsn) as connection:
        return installed(connection).revision


def check(dsn: str) -> None:
    """Raise SchemaMissing, SchemaOutdated or SchemaTooNew unless this code can work on the database."""
    with dsns.connect(dsn) as connection:
        require_schema(connection)


def sql(from_: str = "base", to: str = "head", *, patience: Patience | None = None) -> str:
    """Return the script that takes a database from one revision to another; needs no connection.

    The same text `upgrade` and `downgrade` run, each revision in BEGIN .. COMMIT, version table included.
    """
    from alembic import command

    start, end = _target(from_), _target(to)
    down = (end or "") < (start or "")
    script = StringIO()
    with _ONE_RUN:
        config = _config(script, down=down, patience=patience or Patience())
        move = command.downgrade if down else command.upgrade
        move(config, f"{start or 'base'}:{end or 'base'}", sql=True)
    return script.getvalue()


def grant(dsn: str, grants: Mapping[str, str]) -> None:
    """Give database roles the rights of their kind: {role: "producer" | "worker" | "relay" | "reader"}.

    All in one transaction, as the owner of the schema. Rights that a role has already stay.
    """
    with dsns.connect(dsn) as connection, _explained(dsn, connection):
        require_schema(connection)
        for role, kind in grants.items():
            execute(connection, Statement(_SQL["grant_role"], {"kind": kind, "role": role}, nothing))


def heads() -> tuple[str, ...]:
    """Return the newest revision of the migrations, as a tuple of one."""
    return tuple(_scripts().get_heads())


def previous(revision: str) -> str:
    """Return the revision before this one, "base" before the first."""
    script = _scripts().get_revision(revision)
    return str(script.down_revision or "base") if script else "base"


def locations() -> str:
    """Return the folder of the revisions, for `version_locations` of another project's Alembic."""
    return str(_folder() / "versions")


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
    """Keep schema pgqueue out of another project's autogenerate: pass it to `context.configure`."""
    if type_ == "schema":
        return name != "pgqueue"
    return parent_names.get("schema_name") != "pgqueue"


def include_object(object_: Any, _name: str | None, _type: str, _reflected: bool, _compare_to: Any) -> bool:  # noqa: FBT001 - the shape is Alembic's
    """Keep tables of schema pgqueue, and what hangs on them, out of another project's autogenerate."""
    owner = getattr(object_, "table", object_)
    return getattr(owner, "schema", None) != "pgqueue"


def _move(dsn: str, target: str, *, down: bool, patience: Patience) -> None:
    with _ONE_RUN, dsns.connect(dsn) as guard, _explained(dsn, guard):
        # A role's default may be SERIALIZABLE, whose snapshot would not show what others did while this waits.
        guard.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        _require_server(guard)
        if _look(guard).revision == target:
            return
        _lock(guard, patience)
        # A look under the lock: whoever held it may have done the work.
        schema = _look(guard)
        if schema.revision == target:
            return
        _require_known(schema)
        if down and schema.revision is None:
            return
        for attempt in range(1, patience.tries + 1):
            try:
                _run(dsn, target, down=down, patience=patience)
            except _LockNotFree as error:
                if attempt == patience.tries:
                    raise MigrationBlocked(
                        f"{attempt} times {patience.lock_timeout:g} s were too short to get a lock "
                        f"({dsns.one_line(error.cause)})",
                        remedy="end the transaction that holds it (see pg_stat_activity), or raise --lock-timeout",
                    ) from error.cause
                time.sleep(random.uniform(0.1, min(5.0, 0.25 * 2**attempt)))  # noqa: S311 - jitter
            else:
                return


class _LockNotFree(Exception):
    """A statement of a revision did not get its lock; its transaction was rolled back."""

    def __init__(self, cause: psycopg.Error) -> None:
        self.cause = cause
        super().__init__(str(cause))


def _run(dsn: str, target: str, *, down: bool, patience: Patience) -> None:
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
    settings = {"lock_timeout": f"{round(patience.lock_timeout * 1000)}ms"}

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(_SQL["settings"].text, settings)

    try:
        with engine.connect() as connection:
            config = _config(StringIO(), down=down, patience=patience)
            config.attributes["connection"] = connection
            (command.downgrade if down else command.upgrade)(config, target)
            connection.commit()
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.Error):
            if error.orig.sqlstate in _TRY_AGAIN:
                raise _LockNotFree(error.orig) from error
            raise error.orig from error
        raise
    finally:
        engine.dispose()


def _lock(guard: psycopg.Connection[Any], patience: Patience) -> None:
    """Take the lock of migrations in the guard's transaction; ask again until the deadline, never wait in line."""
    execute(guard, Statement(_SQL["guard"], {}, nothing))
    deadline = time.monotonic() + patience.wait
    while not execute(guard, Statement(_SQL["try_lock"], {}, scalar)):
        if time.monotonic() >= deadline:
            raise MigrationBlocked(
                f"another migration of this database has been running for {patience.wait:g} s",
                remedy="wait for it and start again, or raise --wait",
            )
        time.sleep(random.uniform(0.05, 0.25))  # noqa: S311 - jitter


def _look(guard: psycopg.Connection[Any]) -> InstalledSchema:
    """Read the revision and keep no lock on the version table: the rollback gives it back."""
    with guard.transaction(force_rollback=True):
        return installed(guard)


def _require_server(guard: psycopg.Connection[Any]) -> None:
    number, name, standby = execute(guard, Statement(_SQL["server"], {}, table))[0]
    if number < OLDEST_SERVER * 10_000:
        raise MigrationRefused(
            f"the server is PostgreSQL {name}", remedy=f"use PostgreSQL {OLDEST_SERVER} or newer"
        )
    if standby:
        raise MigrationRefused("the server is a standby", remedy="give the DSN of the primary")


def _require_known(schema: InstalledSchema) -> None:
    if schema.revision is not None and schema.revision not in {s.revision for s in _scripts().walk_revisions()}:
        raise SchemaTooNew(schema.revision, REVISION)


@contextmanager
def _explained(dsn: str, connection: psycopg.Connection[Any]) -> Iterator[None]:
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
            remedy=f"the revisions before it are in place at {dsns.mask(dsn) or 'this database'}; start again",
        ) from error


def _target(revision: str) -> str | None:
    """Return the full name of a revision: `head`, `base` (None), `pgqueue_0001`, or its number, `1` or `0001`."""
    if revision == "head":
        return REVISION
    if revision == "base":
        return None
    name = f"{_PREFIX}{int(revision):04d}" if revision.isdecimal() else revision
    known = sorted(script.revision for script in _scripts().walk_revisions())
    if name not in known:
        raise UnknownRevision(revision, tuple(known))
    return name


def _scripts() -> ScriptDirectory:
    from alembic.script import ScriptDirectory

    return ScriptDirectory(str(_folder()))


def _config(output: StringIO, *, down: bool, patience: Patience) -> Config:
    from alembic.config import Config

    config = Config(output_buffer=output, stdout=output)
    # Alembic's options know percent signs as interpolation.
    config.set_main_option("script_location", str(_folder()).replace("%", "%%"))
    config.attributes["down"] = down
    config.attributes["lock_timeout_ms"] = round(patience.lock_timeout * 1000)
    return config


def _folder() -> Path:
    """Return the folder of the migrations: inside the installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "_migrations"
    return inside if inside.is_dir() else package.parent / "migrations"
