"""A database of the first revision goes up and down with its rows in place, by each way of migrating."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from pgqueue import migrate
from pgqueue.schema_version import REVISION, installed
from tests.alembic_project import laid_out
from tests.catalog import catalog

FIRST = "pgqueue_0001"
POPULATE = """
INSERT INTO pgqueue.job_type (name, queue) VALUES ('send-receipt', 'mail');
INSERT INTO pgqueue.job_type (name, queue, slots, rate_per_s) VALUES ('fetch', 'mail', 3, 100);
SELECT pgqueue.enqueue('send-receipt', '{"order_id": 1}', key => 'c1', dedup_key => 'd1', idempotency_key => 'i1');
SELECT pgqueue.enqueue('send-receipt', '{"order_id": 2}', delay => '1 h', dedup_key => 'd2', dedup_live => true);
SELECT pgqueue.enqueue('fetch', '{"n": 3}');
INSERT INTO pgqueue.lane (queue, key, priority, head_name) VALUES ('mail', 'c1', 5, 'send-receipt');
INSERT INTO pgqueue.queue (name, max_depth) VALUES ('mail', 1000);
INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload) VALUES ('o-1', 'order.placed', '{"id": 1}');
INSERT INTO pgqueue.tally (queue, name, outcome, n) VALUES ('mail', 'send-receipt', 'ok', 3);
"""


def rows(dsn: str) -> dict[str, list[str]]:
    """Return every row of every table, as text."""
    with psycopg.connect(dsn) as connection:
        tables = [
            str(row[0])
            for row in connection.execute(
                "SELECT relname FROM pg_class WHERE relnamespace = 'pgqueue'::regnamespace"
                " AND relkind IN ('r', 'p') AND relname <> 'alembic_version' ORDER BY 1"
            )
        ]
        return {
            name: sorted(
                str(row[0]) for row in connection.execute(f"SELECT t::text FROM pgqueue.{name} t".encode())
            )
            for name in tables
        }


@pytest.fixture
def populated(empty_dsn: str) -> str:
    """Give the DSN of a database of the first revision with rows in its tables."""
    migrate.upgrade(empty_dsn, FIRST)
    with psycopg.connect(empty_dsn) as connection:
        connection.execute(POPULATE.encode())
    return empty_dsn


def test_rows_survive_the_way_up_and_back_and_the_catalog_is_the_one_of_each_revision(
    populated: str, dsn: str
) -> None:
    first, before = catalog(populated), rows(populated)
    assert len(before["job"]) == 3
    migrate.upgrade(populated)
    assert catalog(populated) == catalog(dsn)
    migrate.downgrade(populated, FIRST)
    assert catalog(populated) == first
    assert rows(populated) == before
    migrate.upgrade(populated)
    assert catalog(populated) == catalog(dsn)


def test_the_script_for_a_dba_takes_the_first_revision_up_and_back(populated: str, dsn: str) -> None:
    first, before = catalog(populated), rows(populated)
    with psycopg.connect(populated, autocommit=True) as connection:
        connection.execute(migrate.sql(FIRST, "head").encode())
        assert catalog(populated) == catalog(dsn)
        migrate.check(populated)
        connection.execute(migrate.sql("head", FIRST).encode())
    assert migrate.current(populated) == FIRST
    assert (catalog(populated), rows(populated)) == (first, before)


@pytest.mark.parametrize("by_script", [False, True])
def test_rights_on_a_view_that_the_way_back_makes_anew_survive(populated: str, by_script: bool) -> None:
    with psycopg.connect(populated, autocommit=True) as connection:
        connection.execute("GRANT SELECT ON pgqueue.workers TO PUBLIC, pg_monitor")
        first = catalog(populated)
        migrate.upgrade(populated)
        if by_script:
            connection.execute(migrate.sql("head", FIRST).encode())
        else:
            migrate.downgrade(populated, FIRST)
    assert catalog(populated) == first


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_another_alembic_takes_what_we_migrated_up_and_back(
    populated: str, dsn: str, tmp_path: Path, driver: str
) -> None:
    url = populated.replace("postgresql:", f"postgresql+{driver}:", 1)
    shop = laid_out(tmp_path, url, migrate.locations())
    first, before = catalog(populated), rows(populated)
    shop.must("upgrade", "pgqueue@head")
    migrate.check(populated)
    assert catalog(populated) == catalog(dsn)
    shop.must("downgrade", FIRST)
    assert migrate.current(populated) == FIRST
    assert (catalog(populated), rows(populated)) == (first, before)


def test_the_offline_script_of_another_alembic_goes_up_from_the_first(
    populated: str, dsn: str, tmp_path: Path
) -> None:
    shop = laid_out(tmp_path, populated, migrate.locations())
    script = shop.must("upgrade", f"{FIRST}:{REVISION}", "--sql")
    with psycopg.connect(populated, autocommit=True) as connection:
        # Offline, Alembic takes it that its own version table is there.
        connection.execute("CREATE TABLE public.alembic_version (version_num text)")
        connection.execute(f"INSERT INTO public.alembic_version VALUES ('{FIRST}')".encode())
        connection.execute(script.encode())
    migrate.check(populated)
    assert catalog(populated) == catalog(dsn)


def test_the_schema_says_which_older_code_it_still_serves(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        assert installed(connection).serves_from == FIRST
    migrate.downgrade(dsn, FIRST)
    with psycopg.connect(dsn) as connection:
        assert installed(connection).serves_from is None
