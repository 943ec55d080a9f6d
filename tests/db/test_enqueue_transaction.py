from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
import sqlalchemy
from psycopg import sql
from sqlalchemy.orm import Session

from pgqueue import App, ConfigError, NotInTransaction
from pgqueue.errors import SchemaError, SchemaIncomplete, SchemaMissing
from tests.db.forms import ASYNC, KINDS, SYNC, opened
from tests.server import Connection, Server

app = App()


@app.job("tidy")
def tidy() -> None: ...


@pytest.fixture(scope="module")
def shop(server: Server) -> Iterator[str]:
    """Give the DSN of one database for the whole module."""
    name = server.migrated()
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def other(shop: str) -> Iterator[Connection]:
    """Give a connection of somebody else, to a database without jobs."""
    with psycopg.connect(shop) as conn:
        conn.execute("TRUNCATE pgqueue.job, pgqueue.dedup")
        conn.commit()
        yield conn
        conn.rollback()


def jobs(conn: Connection) -> int:
    row = conn.execute("SELECT count(*)::int FROM pgqueue.job").fetchone()
    conn.commit()
    assert row is not None
    return int(str(row[0]))


def sqlstate(error: BaseException) -> str | None:
    """Find the error code of Postgres behind whatever the handle's library raises."""
    for candidate in (error, getattr(error, "orig", None), error.__cause__):
        if (found := getattr(candidate, "sqlstate", None)) is not None:
            return str(found)
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_an_autocommit_handle_is_refused_and_nothing_is_written(
    kind: str, other: Connection, shop: str
) -> None:
    with opened(kind, shop, autocommit=True) as form:
        for way in (
            lambda: form.enqueue(tidy),
            lambda: form.enqueue_many(tidy, [None, None]),
            lambda: form.enqueue_many(tidy, []),
            lambda: form.by_name(app, "tidy"),
            lambda: form.by_name(App(), "tidy"),
        ):
            with pytest.raises(NotInTransaction, match=r"committed at once, .* Open one") as caught:
                way()
            assert (
                caught.value.handle_type == f"{type(form.handle).__module__}.{type(form.handle).__qualname__}"
            )
    assert jobs(other) == 0


def test_an_autocommit_connection_inside_a_transaction_is_fine(other: Connection, shop: str) -> None:
    with opened("psycopg", shop, autocommit=True) as form:
        with form.handle.transaction():
            form.enqueue(tidy)
            with suppress(ZeroDivisionError), form.handle.transaction():
                form.enqueue(tidy)
                raise ZeroDivisionError
        assert jobs(other) == 1
        with pytest.raises(NotInTransaction):
            form.enqueue(tidy)
        form.handle.execute("BEGIN")
        form.enqueue(tidy)
        form.handle.execute("COMMIT")
    assert jobs(other) == 2


def test_an_asynchronous_autocommit_connection_inside_a_transaction_is_fine(
    other: Connection, shop: str
) -> None:
    async def business() -> None:
        async with await psycopg.AsyncConnection.connect(shop, autocommit=True) as conn:
            async with conn.transaction():
                await tidy.aenqueue(conn)
            async with conn.pipeline(), conn.transaction():
                await tidy.aenqueue(conn)
            async with conn.pipeline():
                with pytest.raises(NotInTransaction):
                    await tidy.aenqueue(conn)

    asyncio.run(business())
    assert jobs(other) == 2


def test_an_atomic_block_of_django_is_a_transaction(other: Connection, shop: str) -> None:
    with opened("django", shop, autocommit=True) as form:
        from django.db import transaction

        with transaction.atomic():
            form.enqueue(tidy)
            with suppress(ZeroDivisionError), transaction.atomic():
                form.enqueue(tidy)
                raise ZeroDivisionError
            assert jobs(other) == 0
        assert jobs(other) == 1
        with pytest.raises(NotInTransaction):
            form.enqueue(tidy)


def test_autocommit_by_execution_options_is_refused_too(other: Connection, shop: str) -> None:
    engine = sqlalchemy.create_engine(shop.replace("postgresql://", "postgresql+psycopg://", 1))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        with pytest.raises(NotInTransaction):
            tidy.enqueue(conn)
        with conn.begin(), pytest.raises(NotInTransaction):  # such a begin() begins nothing
            tidy.enqueue(conn)
    with Session(engine) as session:
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        with pytest.raises(NotInTransaction):
            tidy.enqueue(session)
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with Session(autocommit) as session, pytest.raises(NotInTransaction):
        tidy.enqueue(session)
    engine.dispose()
    assert jobs(other) == 0


def test_a_pipeline_takes_jobs_in_its_transaction_only(other: Connection, shop: str) -> None:
    with psycopg.connect(shop, autocommit=True) as conn, conn.pipeline():
        with conn.transaction():
            assert tidy.enqueue(conn).created
        conn.execute("SELECT 1")
        with pytest.raises(NotInTransaction):
            tidy.enqueue(conn)
    assert jobs(other) == 1


def test_a_session_used_by_synchronous_code_under_an_asynchronous_one_takes_a_job(
    other: Connection, shop: str
) -> None:
    for kind in ("async_session", "asyncpg_session"):
        with opened(kind, shop) as form:
            form.run(form.handle.run_sync(tidy.enqueue))
            form.commit()
    assert jobs(other) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_only_transaction_refuses_and_nothing_falls_back(
    kind: str, other: Connection, shop: str
) -> None:
    with opened(kind, shop) as form:
        form.execute("SET TRANSACTION READ ONLY")
        with pytest.raises(Exception, match="read-only transaction") as caught:
            form.enqueue(tidy)
        assert sqlstate(caught.value) == "25006"
        form.rollback()
        assert form.enqueue(tidy).created
        form.commit()
    assert jobs(other) == 1


@pytest.mark.parametrize("kind", ["session", "asyncpg_session"])
def test_a_serializable_transaction_that_is_retried_fifty_times_leaves_one_job(
    kind: str, other: Connection, shop: str
) -> None:
    other.execute("CREATE TABLE IF NOT EXISTS account (id int PRIMARY KEY, n int NOT NULL)")
    other.execute("INSERT INTO account VALUES (1, 0) ON CONFLICT DO NOTHING")
    other.commit()
    failures: list[str | None] = []
    with opened(kind, shop) as form:
        for turn in range(51):
            form.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
            form.execute("SELECT n FROM public.account")
            form.enqueue(tidy.using(dedup_key="once"))
            if turn < 50:
                other.execute("UPDATE account SET n = n + 1")
                other.commit()
            try:
                form.execute("UPDATE public.account SET n = n + 1")
                form.commit()
            except sqlalchemy.exc.DBAPIError as error:
                failures.append(sqlstate(error))
                form.rollback()
    assert failures == ["40001"] * 50
    assert jobs(other) == 1


def test_a_database_whose_default_is_serializable_takes_jobs(other: Connection, shop: str) -> None:
    with psycopg.connect(shop, options="-c default_transaction_isolation=serializable") as conn:
        assert tidy.enqueue(conn).created
        assert tidy.using(dedup_key="k").enqueue(conn).created
        assert not tidy.using(dedup_key="k").enqueue(conn).created
    assert jobs(other) == 2


def test_a_two_phase_transaction_commits_its_job_with_notify_off(other: Connection, shop: str) -> None:
    setting = other.execute("SELECT current_setting('max_prepared_transactions')").fetchone()
    if setting == ("0",):
        pytest.skip("server: max_prepared_transactions is 0")
    other.execute("SELECT setval(('pgqueue.idle_' || pgqueue.bucket('default'))::regclass, 4102444800000)")
    other.commit()
    with psycopg.connect(shop) as conn:
        tidy.enqueue(conn)
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="NOTIFY"):
            conn.execute("PREPARE TRANSACTION 'loud'")
        conn.rollback()
        conn.tpc_begin(conn.xid(1, "order", "1"))
        conn.execute("SET LOCAL pgqueue.notify = off")
        tidy.enqueue(conn)
        conn.tpc_prepare()
        assert jobs(other) == 0
        conn.tpc_commit()
    assert jobs(other) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_database_without_the_schema_is_named_with_the_remedy(kind: str, server: Server) -> None:
    with opened(kind, server.dsn()) as form:
        ways: list[Callable[[], object]] = [lambda: form.enqueue(tidy), lambda: form.by_name(App(), "x")]
        for way in ways:
            with pytest.raises(SchemaError, match="run: pgqueue migrate"):
                way()
            form.rollback()
        with pytest.raises(SchemaMissing):
            form.enqueue(tidy)
        form.rollback()


@pytest.mark.parametrize("kind", ["psycopg", "session", "django", "asyncpg_session"])
def test_an_older_schema_is_named_with_the_remedy(kind: str, dsn: str, conn: Connection) -> None:
    conn.execute("ALTER FUNCTION pgqueue.enqueue_many RENAME TO enqueue_many_of_old")
    conn.commit()
    with opened(kind, dsn) as form:
        with pytest.raises(SchemaIncomplete, match=r"function pgqueue.enqueue_many\(.*run: pgqueue migrate"):
            form.enqueue(tidy)
        form.rollback()


def test_a_missing_table_of_the_business_is_not_ours(other: Connection) -> None:
    other.execute(
        "CREATE FUNCTION pg_temp.broken() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM FROM nowhere.at_all; RETURN NULL; END $$"
    )
    other.execute("CREATE TRIGGER broken AFTER INSERT ON pgqueue.job EXECUTE FUNCTION pg_temp.broken()")
    with pytest.raises(psycopg.errors.UndefinedTable):
        tidy.enqueue(other)


def test_an_open_transaction_that_failed_says_so(other: Connection) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        other.execute("SELECT 1 / 0")
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        tidy.enqueue(other)


@pytest.mark.parametrize("kind", SYNC)
def test_a_synchronous_handle_in_an_asynchronous_call_is_refused(kind: str, shop: str) -> None:
    with opened(kind, shop) as form, pytest.raises(ConfigError, match="not a psycopg AsyncConnection"):
        asyncio.run(tidy.aenqueue(form.handle))


@pytest.mark.parametrize("kind", ASYNC)
def test_an_asynchronous_handle_in_a_synchronous_call_is_refused(kind: str, shop: str) -> None:
    with opened(kind, shop) as form, pytest.raises(ConfigError, match="not a psycopg Connection"):
        tidy.enqueue(form.handle)


def test_a_producer_needs_no_more_than_its_grants(server: Server, dsn: str, conn: Connection) -> None:
    if not server.can_create_roles():
        pytest.skip("the role of PGQUEUE_TEST_DSN may not create roles")
    role = sql.Identifier(f"{server.prefix}_shop")
    conn.execute(sql.SQL("CREATE ROLE {}").format(role))
    conn.execute("SELECT pgqueue.grant_role('producer', %s)", [f"{server.prefix}_shop"])
    conn.commit()
    try:
        conn.execute(sql.SQL("SET ROLE {}").format(role))
        plain: Any = conn
        assert tidy.enqueue(plain).created
        assert tidy.using(dedup_key="k").enqueue(plain).created
        assert not tidy.using(dedup_key="k").enqueue(plain).created
        assert tidy.using(dedup_key="l", dedup_window="live", run_after=60).enqueue(plain).created
        conn.execute("INSERT INTO pgqueue.job (name) VALUES ('tidy')")
        conn.commit()
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("SELECT payload FROM pgqueue.job")
    finally:
        conn.rollback()
        conn.execute("RESET ROLE")
        conn.execute(sql.SQL("DROP OWNED BY {}").format(role))
        conn.execute(sql.SQL("DROP ROLE {}").format(role))
        conn.commit()
