"""A project with its own Alembic runs our revisions as part of its history, and leaves our tables alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest

from pgqueue import migrate
from pgqueue.schema_version import REVISION
from tests.catalog import catalog

INI = """\
[alembic]
script_location = %(here)s/shop
path_separator = space
version_locations = %(here)s/shop/versions {locations}
"""

ENV = """\
import asyncio
import os
from alembic import context
from sqlalchemy import BigInteger, Column, Index, MetaData, Table, create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool
from pgqueue import migrate

metadata = MetaData()
Table("orders", metadata, Column("id", BigInteger, primary_key=True))
hooks = {"include_name": migrate.include_name, "include_object": migrate.include_object}
if os.environ["HOOKS"] != "both":
    hooks = {k: v for k, v in hooks.items() if k == os.environ["HOOKS"]}
url = os.environ["URL"]


def run(connection):
    context.configure(connection=connection, target_metadata=metadata,
                      include_schemas=os.environ["SCHEMAS"] == "yes", **hooks)
    with context.begin_transaction():
        context.run_migrations()


async def run_async():
    async with create_async_engine(url, poolclass=NullPool).connect() as connection:
        await connection.run_sync(run)
        await connection.commit()


if context.is_offline_mode():
    context.configure(url=url, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
elif "asyncpg" in url:
    asyncio.run(run_async())
else:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        run(connection)
"""

FIRST = f"""\
from alembic import op

revision = "0001"
down_revision = None
branch_labels = ("shop",)
depends_on = "{REVISION}"


def upgrade():
    op.execute("CREATE TABLE public.orders (id bigserial PRIMARY KEY)")


def downgrade():
    op.execute("DROP TABLE public.orders")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """A project of somebody else with an Alembic of its own."""

    folder: Path
    url: str

    def alembic(
        self, *argv: str, schemas: bool = True, hooks: str = "both"
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "alembic", *argv],
            cwd=self.folder,
            env={
                "PATH": "/usr/bin:/bin",
                "PYTHONPATH": str(Path(migrate.__file__).parents[1]),
                "URL": self.url,
                "SCHEMAS": "yes" if schemas else "no",
                "HOOKS": hooks,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def must(self, *argv: str) -> str:
        done = self.alembic(*argv)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def shop(empty_dsn: str, tmp_path: Path) -> Shop:
    versions = tmp_path / "shop" / "versions"
    versions.mkdir(parents=True)
    (tmp_path / "alembic.ini").write_text(INI.format(locations=migrate.locations()))
    (tmp_path / "shop" / "env.py").write_text(ENV)
    (versions / "0001_orders.py").write_text(FIRST)
    return Shop(folder=tmp_path, url=empty_dsn.replace("postgresql:", "postgresql+psycopg:", 1))


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
