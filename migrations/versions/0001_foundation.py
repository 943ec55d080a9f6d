"""Jobs, lanes, dead letters, outbox, relay, inbox.

Revision ID: pgqueue_0001
Revises:
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from alembic import op

revision = "pgqueue_0001"
down_revision = None
branch_labels = ("pgqueue",)
depends_on = None

# A statement ends at a semicolon outside of comments, strings, names and dollar quotes.
_TOKEN = re.compile(r"""--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|"[^"]*"|\$(\w*)\$.*?\$\1\$|;""", re.DOTALL)

# The loops of the script make their sequences with names ending in 00 to 63.
_MADE = re.compile(r"CREATE (TABLE|SEQUENCE|FUNCTION|VIEW) (pgqueue\.\w+)(%s)?")
# A function that returns rows of a table goes before the table; a trigger's function goes after it.
_OF_ROWS = re.compile(r"CREATE FUNCTION (pgqueue\.\w+)\([^$]*?RETURNS SETOF pgqueue\.")

_CREATE_SCHEMA = """\
DO $$ BEGIN
  IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = 'pgqueue') THEN
    CREATE SCHEMA pgqueue;
    COMMENT ON SCHEMA pgqueue IS 'made by the pgqueue migrations';
  END IF;
END $$;
CREATE TABLE IF NOT EXISTS pgqueue.alembic_version (
  version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num));
"""
_RECORD = """\
DELETE FROM pgqueue.alembic_version WHERE version_num LIKE 'pgqueue@_%' ESCAPE '@';
INSERT INTO pgqueue.alembic_version (version_num) VALUES ('pgqueue_0001');
"""
_FORGET = """\
DO $$ BEGIN
  DROP TABLE pgqueue.alembic_version;
  IF pg_catalog.obj_description(pg_catalog.to_regnamespace('pgqueue'), 'pg_namespace')
       = 'made by the pgqueue migrations' THEN
    BEGIN
      DROP SCHEMA pgqueue;
    EXCEPTION WHEN dependent_objects_still_exist THEN
      RAISE NOTICE 'schema pgqueue holds objects of somebody else and stays';
    END;
  END IF;
END $$;
"""


def upgrade() -> None:
    if _guest():
        _run(_CREATE_SCHEMA)
        if _recorded():
            return
    _run(_script())
    if _guest():
        _run(_RECORD)


def downgrade() -> None:
    if _guest() and not op.get_context().as_sql and not _recorded():
        return
    _run(_reverse(_script()))
    if _guest():
        _run(_FORGET)


def _reverse(script: str) -> str:
    """Return the script that drops what the script creates, and nothing else."""
    made: dict[str, list[str]] = {"VIEW": [], "TABLE": [], "FUNCTION": [], "SEQUENCE": []}
    first = _OF_ROWS.findall(script)
    for kind, name, numbered in _MADE.findall(script):
        if name not in first:
            made[kind] += [f"{name}{n:02d}" for n in range(64)] if numbered else [name]
    drops = [("FUNCTION", first), *made.items()]
    return "".join(f"DROP {kind} {', '.join(reversed(names))};\n" for kind, names in drops)


def _script() -> str:
    return Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")


def _guest() -> bool:
    """Tell whether another project's Alembic runs this: workers do not read its version table."""
    return op.get_context().version_table_schema != "pgqueue"


def _recorded() -> bool:
    """Tell whether `pgqueue migrate` has run this revision already."""
    context = op.get_context()
    if context.as_sql or context.bind is None:
        return False
    there = context.bind.exec_driver_sql(
        "SELECT pg_catalog.to_regclass('pgqueue.alembic_version') IS NOT NULL"
    )
    if not there.scalar():
        return False
    found = context.bind.exec_driver_sql("SELECT version_num FROM pgqueue.alembic_version").scalars()
    return any(number.startswith("pgqueue_") and number >= revision for number in found)


def _run(text: str) -> None:
    """Run a script statement by statement, as asyncpg asks for, with every percent sign as it stands."""
    context = op.get_context()
    for statement in _statements(text):
        if context.as_sql or context.bind is None:
            context.impl.static_output(statement + ";\n")
        else:
            context.bind.exec_driver_sql(statement, execution_options={"no_parameters": True})


def _statements(text: str) -> Iterator[str]:
    start = 0
    for token in _TOKEN.finditer(text):
        if token[0] == ";":
            yield text[start : token.start()].strip()
            start = token.end()
