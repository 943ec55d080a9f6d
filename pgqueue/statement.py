"""A verb as a value: SQL, parameters, and how to read the rows.

SQL lives in `.sql` files, one per verb module, in blocks headed `-- name: claim`; parameters are written
`%(name)s`, a literal percent sign `%%`. `load` reads a file once. A Statement does nothing by itself:
`pgqueue.connection.execute` runs it on the connection the caller gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Generic, LiteralString, TypeVar, cast

T = TypeVar("T")
Row = tuple[Any, ...]

_HEAD = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_PARAM = re.compile(r"%\((\w+)\)s|%%")


@dataclass(frozen=True, slots=True)
class Query:
    """One named block of SQL. `text` is psycopg's form; `names` its parameters in order of first use."""

    name: str
    text: LiteralString
    names: tuple[str, ...]

    def numbered(self) -> str:
        """Return the text with `$1`-style parameters, numbered as in `names` (asyncpg's form)."""
        place = {name: str(i) for i, name in enumerate(self.names, 1)}
        return _PARAM.sub(lambda m: "$" + place[m[1]] if m[1] else "%", self.text)


@dataclass(frozen=True, slots=True)
class Statement(Generic[T]):
    """A query with its parameters, and `read`, which turns the rows into the answer."""

    query: Query
    params: Mapping[str, object]
    read: Callable[[Sequence[Row]], T]


@cache
def load(package: str, name: str) -> Mapping[str, Query]:
    """Read `<package>/sql/<name>.sql`; return its blocks by name."""
    source = files(package).joinpath("sql", f"{name}.sql").read_text(encoding="utf-8")
    parts = _HEAD.split(source)[1:]
    queries: dict[str, Query] = {}
    for block, body in zip(parts[::2], parts[1::2], strict=True):
        if block in queries:
            raise ValueError(f"{package}/sql/{name}.sql names {block} twice")
        text = body.strip().rstrip(";")
        names = tuple(dict.fromkeys(m[1] for m in _PARAM.finditer(text) if m[1]))
        # The text comes from a file of this package, never from a user: as literal as SQL in source code.
        queries[block] = Query(block, cast("LiteralString", text), names)
    return queries


def nothing(rows: Sequence[Row]) -> None:
    """Read no rows."""


def scalar(rows: Sequence[Row]) -> Any:
    """Read the first column of the first row; None if there is no row."""
    return rows[0][0] if rows else None


def column(rows: Sequence[Row]) -> list[Any]:
    """Read the first column of every row."""
    return [row[0] for row in rows]


def table(rows: Sequence[Row]) -> list[Row]:
    """Read the rows as they are."""
    return list(rows)
