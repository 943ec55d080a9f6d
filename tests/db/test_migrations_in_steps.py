"""Several revisions: each has a transaction of its own, or none where it asks for that."""

from __future__ import annotations

import shutil
from io import StringIO
from pathlib import Path

import psycopg
import pytest
from alembic import command
from alembic.config import Config

from pgqueue import migrate, migration
from pgqueue.errors import MigrationBlocked, MigrationFailed
from pgqueue.migrate import Patience
from pgqueue.schema_version import REVISION
from tests.alembic_project import Shop, laid_out
from tests.catalog import catalog

NEWEST = int(REVISION[-4:])
NEXT, AFTER_NEXT = f"pgqueue_{NEWEST + 1:04d}", f"pgqueue_{NEWEST + 2:04d}"
ADDED = """\
CREATE TABLE pgqueue.note (id int, text text DEFAULT 'a; b' -- c; d
);
INSERT INTO pgqueue.note VALUES (1, '5 %');
"""
ADDED_DOWN = "DROP TABLE pgqueue.note;"


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the folder of a copy of the migrations, which has one more revision made from the template."""
    copy = tmp_path / "migrations"
    shutil.copytree(migration.folder(), copy)
    monkeypatch.setattr(migration, "folder", lambda: copy)
    add(copy, NEXT, ADDED, ADDED_DOWN)
    return copy / "versions"


def add(folder: Path, revision: str, up: str, down: str) -> Path:
    """Write a revision from the template, with its SQL."""
    config = Config(stdout=StringIO())
    config.set_main_option("script_location", str(folder))
    config.set_main_option("file_template", "%%(rev)s_%%(slug)s")
    made = command.revision(config, "one more", rev_id=revision, head="pgqueue@head")
    assert made is not None
    assert not isinstance(made, list)
    path = Path(made.path)
    path.with_suffix(".sql").write_text(up)
    path.with_suffix(".down.sql").write_text(down)
    return path


def test_a_revision_made_from_the_template_goes_up_and_down(versions: Path, empty_dsn: str) -> None:
    migrate.upgrade(empty_dsn, REVISION)
    first = catalog(empty_dsn)
    migrate.upgrade(empty_dsn, NEXT)
    assert migrate.current(empty_dsn) == NEXT
    with psycopg.connect(empty_dsn) as connection:
        assert connection.execute("SELECT * FROM pgqueue.note").fetchall() == [(1, "5 %")]
    migrate.upgrade(empty_dsn, REVISION)
    assert migrate.current(empty_dsn) == NEXT
    migrate.downgrade(empty_dsn, REVISION)
    assert migrate.current(empty_dsn) == REVISION
    assert catalog(empty_dsn) == first
    migrate.downgrade(empty_dsn, NEXT)
    assert migrate.current(empty_dsn) == REVISION


def test_the_script_between_two_revisions_makes_what_the_online_run_makes(
    versions: Path, empty_dsn: str, dsn: str
) -> None:
    migrate.upgrade(empty_dsn, NEXT)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(migrate.sql(REVISION, NEXT).encode())
    assert catalog(dsn) == catalog(empty_dsn)
    assert migrate.current(dsn) == NEXT


def test_a_failing_revision_leaves_those_before_it_in_place(versions: Path, empty_dsn: str) -> None:
    path = add(versions.parent, AFTER_NEXT, "CREATE TABLE pgqueue.more (id int);\nSELECT 1/0;", "")
    with pytest.raises(MigrationFailed, match="division by zero"):
        migrate.upgrade(empty_dsn, AFTER_NEXT)
    assert migrate.current(empty_dsn) == NEXT
    path.with_suffix(".sql").write_text("CREATE TABLE pgqueue.more (id int);")
    migrate.upgrade(empty_dsn, AFTER_NEXT)
    assert migrate.current(empty_dsn) == AFTER_NEXT


def test_a_blocked_revision_keeps_those_before_it_and_goes_on_there(versions: Path, empty_dsn: str) -> None:
    migrate.upgrade(empty_dsn, REVISION)
    add(versions.parent, AFTER_NEXT, "ALTER TABLE pgqueue.job ADD COLUMN more int;", "")
    with psycopg.connect(empty_dsn) as other:
        other.execute("SELECT count(*) FROM pgqueue.job")
        with pytest.raises(MigrationBlocked):
            migrate.upgrade(empty_dsn, AFTER_NEXT, patience=Patience(lock_timeout=0.05, tries=2))
        assert migrate.current(empty_dsn) == NEXT
    migrate.upgrade(empty_dsn, AFTER_NEXT)
    assert migrate.current(empty_dsn) == AFTER_NEXT


def test_a_revision_may_build_an_index_concurrently_outside_of_a_transaction(
    versions: Path, empty_dsn: str
) -> None:
    path = add(versions.parent, AFTER_NEXT, "", "")
    body = (
        "def upgrade() -> None:\n"
        "    with op.get_context().autocommit_block():\n"
        "        op.execute('DROP INDEX CONCURRENTLY IF EXISTS pgqueue.job_by_name')\n"
        "        op.execute('CREATE INDEX CONCURRENTLY job_by_name ON pgqueue.job (name)')\n"
    )
    source = path.read_text()
    start, end = source.index("def upgrade"), source.index("def downgrade")
    source = source[:start] + body + "\n\n" + source[end:]
    path.write_text(source.replace("from alembic.util", "from alembic import op\nfrom alembic.util"))
    migrate.upgrade(empty_dsn, AFTER_NEXT)
    with psycopg.connect(empty_dsn) as connection:
        valid = connection.execute(
            "SELECT indisvalid FROM pg_index WHERE indexrelid = 'pgqueue.job_by_name'::regclass"
        ).fetchone()
    assert valid == (True,)
    assert migrate.current(empty_dsn) == AFTER_NEXT


def test_another_alembic_and_ours_agree_on_later_revisions(
    versions: Path, empty_dsn: str, tmp_path: Path
) -> None:
    shop: Shop = laid_out(tmp_path / "project", empty_dsn, locations=str(versions))
    migrate.upgrade(empty_dsn, REVISION)
    shop.must("upgrade", NEXT)
    assert migrate.current(empty_dsn) == NEXT
    shop.must("downgrade", REVISION)
    assert migrate.current(empty_dsn) == REVISION
    migrate.upgrade(empty_dsn, NEXT)
    shop.must("upgrade", "heads")
    assert migrate.current(empty_dsn) == NEXT
    migrate.downgrade(empty_dsn, REVISION)
    shop.must("downgrade", REVISION)
    assert migrate.current(empty_dsn) == REVISION
