"""Jobs, lanes, dead letters, outbox, relay, inbox.

Revision ID: pgqueue_0001
Revises:
"""

from __future__ import annotations

import re
from pathlib import Path

from alembic import op
from alembic.util import load_python_file

revision = "pgqueue_0001"
down_revision = None
branch_labels = ("pgqueue",)
depends_on = None

_step = load_python_file(str(Path(__file__).parents[1]), "step.py")

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
    if _step.guest():
        _step.run(_CREATE_SCHEMA)
        if revision <= _step.recorded():
            return
    _step.run(_script())
    if _step.guest():
        _step.run(_RECORD)


def downgrade() -> None:
    if _step.guest() and not op.get_context().as_sql and revision > _step.recorded():
        return
    _step.run(_reverse(_script()))
    if _step.guest():
        _step.run(_FORGET)


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
