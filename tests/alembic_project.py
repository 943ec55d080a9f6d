"""A project of somebody else that has an Alembic of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pgqueue import migrate
from pgqueue.schema_version import REVISION

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


def laid_out(folder: Path, dsn: str, locations: str) -> Shop:
    """Write the files of such a project."""
    versions = folder / "shop" / "versions"
    versions.mkdir(parents=True)
    (folder / "alembic.ini").write_text(INI.format(locations=locations))
    (folder / "shop" / "env.py").write_text(ENV)
    (versions / "0001_orders.py").write_text(FIRST)
    return Shop(folder=folder, url=dsn.replace("postgresql:", "postgresql+psycopg:", 1))
