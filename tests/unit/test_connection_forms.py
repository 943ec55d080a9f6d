from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from pgqueue import App, ConfigError
from pgqueue.connection import execute, execute_async
from pgqueue.statement import Query, Statement, column, load, nothing, scalar, table

app = App()
ONE = Statement(load("pgqueue", "enqueue")["declared"], {"name": "x"}, scalar)


@app.job("tidy")
def tidy() -> None: ...


NO_HANDLES: list[Callable[[], Any]] = [
    lambda: None,
    lambda: "postgresql://",
    lambda: SimpleNamespace(execute=print),
    lambda: sqlite3.connect(":memory:"),
    lambda: sqlalchemy.create_engine("postgresql+psycopg://"),
    lambda: create_async_engine("postgresql+asyncpg://"),
    sessionmaker,
    lambda: Session,
    lambda: psycopg.Connection,
]


@pytest.mark.parametrize("make", NO_HANDLES)
def test_what_is_no_handle_is_refused_by_its_type_and_the_right_ones_are_named(
    make: Callable[[], Any],
) -> None:
    thing = make()
    kind = type(thing).__qualname__
    with pytest.raises(
        ConfigError, match=f"the first argument is .*{kind}, not a psycopg Connection, SQLAlchemy"
    ):
        tidy.enqueue(thing)
    with pytest.raises(ConfigError, match=f"the first argument is .*{kind}, not a psycopg AsyncConnection"):
        asyncio.run(tidy.aenqueue(thing))
    with pytest.raises(ConfigError, match="the first argument is"):
        execute(thing, ONE)
    with pytest.raises(ConfigError, match="the first argument is"):
        asyncio.run(execute_async(thing, ONE))
    if isinstance(thing, sqlite3.Connection):
        thing.close()


def test_a_database_that_is_not_postgres_is_refused() -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with Session(engine) as session, pytest.raises(ConfigError, match="speaks to sqlite"):
        tidy.enqueue(session)
    engine.dispose()


def test_libraries_that_are_not_loaded_stay_so() -> None:
    program = """
import sys
from pgqueue import App, ConfigError
try:
    App().job("tidy")(lambda: None).enqueue(object())
except ConfigError:
    print(sorted({"sqlalchemy", "alembic", "django", "pydantic", "asyncpg", "asyncio"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("[]", "['asyncio']")  # psycopg itself loads asyncio


def test_a_query_knows_its_parameters_in_both_forms() -> None:
    query = Query("q", "SELECT %(b)s, %(a)s, 5 %% 2, %(b)s::text, '{{}}'", ("b", "a"))
    assert query.numbered() == "SELECT $1, $2, 5 % 2, $1::text, '{{}}'"


def test_rows_are_read_in_the_way_the_verb_asks() -> None:
    rows = [(1, "a"), (2, "b")]
    assert (scalar(rows), scalar([])) == (1, None)
    assert column(rows) == [1, 2]
    assert table(rows) == rows
    assert nothing(rows) is None  # type: ignore[func-returns-value]  # that is what it is for


@pytest.mark.parametrize("package", ["pgqueue", "relay"])
def test_every_block_of_sql_lists_exactly_the_parameters_it_names(package: str) -> None:
    from importlib.resources import files

    for file in files(package).joinpath("sql").iterdir():
        if file.name.endswith(".sql"):
            for query in load(package, file.name.removesuffix(".sql")).values():
                marks = dict.fromkeys(query.names, "")
                assert "%(" not in query.text % marks
                assert query.numbered().count("$") >= len(query.names)
