"""A project with its own Alembic runs our revisions as part of its history, and leaves our tables alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from pgqueue import migrate
from pgqueue.schema_version import REVISION
from tests.alembic_project import Shop, laid_out
from tests.catalog import catalog


@pytest.fixture
def shop(empty_dsn: str, tmp_path: Path) -> Shop:
    return laid_out(tmp_path, empty_dsn, migrate.locations())


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_project_depends_on_our_revisions_and_workers_accept_what_its_alembic_made(
    shop: Shop, driver: str, empty_dsn: str, dsn: str
) -> None:
    shop = replace(shop, url=shop.url.replace("psycopg", driver))
    shop.must("upgrade", "shop@head")
    migrate.check(empty_dsn)
    assert migrate.current(empty_dsn) == REVISION
    assert catalog(empty_dsn) == catalog(dsn)
    shop.must("upgrade", "heads")


def test_an_autogenerate_of_the_project_finds_nothing_to_do_with_our_tables(shop: Shop) -> None:
    shop.must("upgrade", "heads")
    for schemas, hooks in ((True, "both"), (False, "both"), (True, "include_name"), (True, "include_object")):
        done = shop.alembic("check", schemas=schemas, hooks=hooks)
        assert done.returncode == 0, (schemas, hooks, done.stderr)
        assert "No new upgrade operations detected" in done.stdout


def test_without_the_hooks_an_autogenerate_over_all_schemas_would_drop_our_tables(shop: Shop) -> None:
    shop.must("upgrade", "heads")
    done = shop.alembic("check", schemas=True, hooks="none")
    assert done.returncode != 0
    assert "remove_table" in done.stdout + done.stderr


def test_both_ways_of_migrating_one_database_agree(shop: Shop, empty_dsn: str) -> None:
    migrate.upgrade(empty_dsn)
    before = catalog(empty_dsn)
    shop.must("upgrade", "heads")
    assert catalog(empty_dsn) == before
    migrate.upgrade(empty_dsn)
    migrate.downgrade(empty_dsn, "base")
    shop.must("downgrade", "base")
    shop.must("upgrade", "heads")
    assert catalog(empty_dsn) == before


def test_the_project_goes_down_through_our_revisions_too(shop: Shop, empty_dsn: str) -> None:
    shop.must("upgrade", "heads")
    shop.must("downgrade", "base")
    with psycopg.connect(empty_dsn) as connection:
        left = connection.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'pgqueue'").fetchone()
    assert left == (0,)
    assert migrate.current(empty_dsn) is None


def test_the_offline_script_of_the_project_leaves_a_schema_that_workers_accept(
    shop: Shop, empty_dsn: str, dsn: str
) -> None:
    script = shop.must("upgrade", "heads", "--sql")
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(script.encode())
    migrate.check(empty_dsn)
    assert catalog(empty_dsn) == catalog(dsn)
