"""Which revision of the schema this code needs, and whether the database has it; without Alembic.

A database that is newer than the code is refused, unless its newest migration says that it still serves
this code: one that only adds leaves `COMMENT ON TABLE pgqueue.alembic_version IS 'serves code from
<revision>'`, so that workers of the previous release can restart while a deployment is under way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pgqueue.connection import execute
from pgqueue.errors import SchemaMissing, SchemaOutdated, SchemaTooNew, SchemaUnreadable
from pgqueue.statement import Row, Statement, column, load

REVISION: Final = "pgqueue_0002"

_SQL = load("pgqueue", "schema_version")
_OURS = re.compile(r"pgqueue_\d{4}")
_SERVES = re.compile(r"serves code from (pgqueue_\d{4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledSchema:
    """What a database has: no revision means no tables of ours."""

    database: str
    revision: str | None
    serves_from: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _VersionTable:
    database: str
    readable: bool | None
    comment: str | None


def installed(handle: Any) -> InstalledSchema:
    """Read which revision the database has: one or two SELECTs in the handle's transaction.

    Raises SchemaUnreadable when the role has no rights on the schema.
    """
    table = execute(handle, Statement(_SQL["version_table"], {}, _version_table))
    if table.readable is None:
        return InstalledSchema(database=table.database, revision=None, serves_from=None)
    if not table.readable:
        raise SchemaUnreadable(table.database)
    found = execute(handle, Statement(_SQL["revisions"], {}, column))
    serves = _SERVES.search(table.comment or "")
    return InstalledSchema(
        database=table.database,
        # Another project's Alembic may keep its own head in the same table.
        revision=next((r for r in found if _OURS.fullmatch(r)), found[0] if found else None),
        serves_from=serves[1] if serves else None,
    )


def require_schema(handle: Any) -> None:
    """Raise SchemaMissing, SchemaOutdated or SchemaTooNew unless this code can work on the database.

    One or two SELECTs in the handle's transaction; no lock is kept beyond it.
    """
    schema = installed(handle)
    if schema.revision is None:
        raise SchemaMissing(schema.database)
    if schema.revision == REVISION:
        return
    if _OURS.fullmatch(schema.revision) and schema.revision < REVISION:
        raise SchemaOutdated(schema.revision, REVISION)
    if not serves(schema):
        raise SchemaTooNew(schema.revision, REVISION)


def serves(schema: InstalledSchema) -> bool:
    """Tell whether a schema that is newer than this code says that it still serves it."""
    return schema.serves_from is not None and schema.serves_from <= REVISION


def _version_table(rows: Sequence[Row]) -> _VersionTable:
    database, readable, comment = rows[0]
    return _VersionTable(database=database, readable=readable, comment=comment)
