"""${message}.

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}

# A statement ends at a semicolon outside of comments, strings, names and dollar quotes.
_TOKEN = re.compile(r"""--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|"[^"]*"|\$(\w*)\$.*?\$\1\$|;""", re.DOTALL)


def upgrade() -> None:
    if _guest() and revision <= _recorded():
        return
    _run(Path(__file__).with_suffix(".sql"))
    _record(revision)


def downgrade() -> None:
    if _guest() and not op.get_context().as_sql and revision > _recorded():
        return
    _run(Path(__file__).with_suffix(".down.sql"))
    _record(down_revision)


def _guest() -> bool:
    """Tell whether another project's Alembic runs this: workers do not read its version table."""
    return op.get_context().version_table_schema != "pgqueue"


def _recorded() -> str:
    """Return the revision that workers see, "" in a script for a DBA."""
    context = op.get_context()
    if context.as_sql or context.bind is None:
        return ""
    found = context.bind.exec_driver_sql("SELECT version_num FROM pgqueue.alembic_version").scalars()
    return max((number for number in found if number.startswith("pgqueue_")), default="")


def _record(now: str) -> None:
    """Tell workers the revision where another project's Alembic runs this."""
    if _guest():
        op.execute(
            f"UPDATE pgqueue.alembic_version SET version_num = '{now}' WHERE starts_with(version_num, 'pgqueue_')"
        )


def _run(path: Path) -> None:
    """Run a script statement by statement, as asyncpg asks for, with every percent sign as it stands."""
    context = op.get_context()
    for statement in _statements(path.read_text(encoding="utf-8")):
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
