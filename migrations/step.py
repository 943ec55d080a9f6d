"""Run one revision: the same text through `pgqueue migrate`, another project's Alembic, and offline.

A revision loads this file by its path (Alembic gives its scripts no package), so it works in a checkout, in
the wheel, and where another project's Alembic has our versions folder among its own. Every revision depends on
it, the old ones too: what it does to a text may not change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from alembic import op

# A statement ends at a semicolon outside of comments, strings, names and dollar quotes.
_TOKEN = re.compile(r"""--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|"[^"]*"|\$(\w*)\$.*?\$\1\$|;""", re.DOTALL)

_AS_BEFORE = re.compile(r"^-- as before: (pgqueue\.\w+)$", re.MULTILINE)
_DEFINES = re.compile(r"^CREATE (?:OR REPLACE )?(?=(?:FUNCTION|VIEW) (pgqueue\.\w+))", re.MULTILINE)

_RECORD = """\
UPDATE pgqueue.alembic_version SET version_num = 'REVISION' WHERE version_num LIKE 'pgqueue@_%' ESCAPE '@';
"""


def up(file: str, revision: str) -> None:
    """Run the script beside the file of a revision, unless the database is there already."""
    if guest() and revision <= recorded():
        return
    run(Path(file).with_suffix(".sql").read_text(encoding="utf-8"))
    _record(revision)


def down(file: str, revision: str, below: str) -> None:
    """Run the down script beside the file of a revision, unless the database is below it already.

    A line `-- as before: pgqueue.name` stands for the function or view as the newest older script defines it.
    """
    if guest() and not op.get_context().as_sql and revision > recorded():
        return
    text = Path(file).with_suffix(".down.sql").read_text(encoding="utf-8")
    run(_AS_BEFORE.sub(lambda line: _definition(Path(file), line[1]) + ";", text))
    _record(below)


def guest() -> bool:
    """Tell whether another project's Alembic runs this: workers do not read its version table."""
    return op.get_context().version_table_schema != "pgqueue"


def recorded() -> str:
    """Return the revision that workers see; "" where there is none, and in a script for a DBA."""
    context = op.get_context()
    if context.as_sql or context.bind is None:
        return ""
    there = context.bind.exec_driver_sql(
        "SELECT pg_catalog.to_regclass('pgqueue.alembic_version') IS NOT NULL"
    )
    if not there.scalar():
        return ""
    found = context.bind.exec_driver_sql("SELECT version_num FROM pgqueue.alembic_version").scalars()
    return max((number for number in found if number.startswith("pgqueue_")), default="")


def run(text: str) -> None:
    """Run a script statement by statement, as asyncpg asks for, with every percent sign as it stands."""
    context = op.get_context()
    for statement in _statements(text):
        if context.as_sql or context.bind is None:
            context.impl.static_output(statement + ";\n")
        else:
            context.bind.exec_driver_sql(statement, execution_options={"no_parameters": True})


def _definition(file: Path, name: str) -> str:
    """Return the statement by which the newest script before this revision defines a function or view."""
    scripts = (
        p for p in file.parent.glob("*.sql") if p.name < file.name and not p.name.endswith(".down.sql")
    )
    for script in sorted(scripts, reverse=True):
        for statement in reversed(list(_statements(script.read_text(encoding="utf-8")))):
            found = _DEFINES.search(statement)
            if found and found[1] == name:
                return "CREATE OR REPLACE " + statement[found.end() :]
    raise LookupError(f"no script before {file.name} defines {name}")


def _record(now: str) -> None:
    """Tell workers the revision where another project's Alembic runs this."""
    if guest():
        run(_RECORD.replace("REVISION", now))


def _statements(text: str) -> Iterator[str]:
    start = 0
    for token in _TOKEN.finditer(text):
        if token[0] == ";":
            yield text[start : token.start()].strip()
            start = token.end()
