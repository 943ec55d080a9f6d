"""Bring the schema of a database to the revision this code needs, with Alembic.

Safe when many processes start it at once: one works, the others wait for it and find nothing to do. Each
revision has a transaction of its own, so a stop in between leaves a valid older revision, never half a one.

Alembic and SQLAlchemy are imported when a migration runs and not before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg.sql

from pgqueue import dsn as dsns
from pgqueue.connection import execute
from pgqueue.errors import BadOption
from pgqueue.migration import Patience, explained, folder, known, move, offline, scripts, target
from pgqueue.schema_version import installed, require_schema
from pgqueue.statement import Statement, load, nothing

KINDS = ("producer", "worker", "relay", "reader")
_SQL = load("pgqueue", "migrate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The rights of one kind for one database role."""

    kind: str
    role: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadOption("grant", f"{self.kind!r} is not one of {', '.join(KINDS)}")


def upgrade(dsn: str, revision: str = "head", *, patience: Patience | None = None) -> None:
    """Migrate up to `revision`; nothing happens if the database is there or beyond.

    Makes the schema if it is missing and the role may. Raises SchemaTooNew, UnknownRevision, MigrationBlocked
    (somebody's lock), MigrationRefused (rights, server version, read-only) or DatabaseUnreachable.
    """
    goal = target(revision)
    if goal is not None:
        move(dsn, goal, down=False, patience=patience or Patience())


def downgrade(dsn: str, revision: str, *, patience: Patience | None = None) -> None:
    """Migrate down to `revision`, or to `base`: the tables of the revisions above it go, with all they hold.

    Raises as `upgrade` does.
    """
    move(dsn, target(revision), down=True, patience=patience or Patience())


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
    return offline(target(from_), target(to), patience=patience or Patience())


def grant(dsn: str, grants: Iterable[Grant]) -> None:
    """Give database roles the rights of their kind: all in one transaction, as the owner of the schema.

    Rights that a role has already stay.
    """
    with dsns.connect(dsn) as connection, explained(connection):
        require_schema(connection)
        for given in grants:
            values = {"kind": given.kind, "role": given.role}
            execute(connection, Statement(_SQL["grant_role"], values, nothing))


def grant_sql(grants: Iterable[Grant]) -> str:
    """Return what `grant` runs, as a script."""
    query = _SQL["grant_role"].text.replace("%(kind)s", "{kind}").replace("%(role)s", "{role}")
    text = psycopg.sql.SQL(query)
    return "".join(text.format(kind=g.kind, role=g.role).as_string() + ";\n" for g in grants)


def is_below(revision: str, current: str | None) -> bool:
    """Tell whether `revision` lies below `current`: going there is a downgrade."""
    return current is not None and (target(revision) or "") < current


def previous(revision: str) -> str:
    """Return the revision before this one, "base" before the first."""
    below = [name for name in known() if name < revision]
    return below[-1] if below else "base"


def heads() -> tuple[str, ...]:
    """Return the newest revision of the migrations, as a tuple of one."""
    return tuple(scripts().get_heads())


def locations() -> str:
    """Return the folder of the revisions, for `version_locations` of another project's Alembic."""
    return str(folder() / "versions")


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:
    """Keep schema pgqueue out of another project's autogenerate: pass it to `context.configure`."""
    if type_ == "schema":
        return name != "pgqueue"
    return parent_names.get("schema_name") != "pgqueue"


def include_object(
    object_: Any,
    _name: str | None,
    _type: str,
    _reflected: bool,  # noqa: FBT001 - the shape is Alembic's
    _compare_to: Any,
) -> bool:
    """Keep tables of schema pgqueue, and what hangs on them, out of another project's autogenerate."""
    owner = getattr(object_, "table", object_)
    return getattr(owner, "schema", None) != "pgqueue"


__all__ = [
    "KINDS",
    "Grant",
    "Patience",
    "check",
    "current",
    "downgrade",
    "grant",
    "grant_sql",
    "heads",
    "include_name",
    "include_object",
    "is_below",
    "locations",
    "previous",
    "require_schema",
    "sql",
    "upgrade",
]
