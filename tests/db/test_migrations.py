"""The schema goes up and down whole, alone, and never further than the code knows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgqueue import migrate
from pgqueue.errors import (
    DatabaseUnreachable,
    MigrationBlocked,
    MigrationFailed,
    MigrationRefused,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    SchemaUnreadable,
    UnknownRevision,
)
from pgqueue.migrate import Patience
from pgqueue.schema_version import REVISION, require_schema
from tests.catalog import catalog
from tests.server import Connection, Server
from tests.waiting import eventually

FIRST = "pgqueue_0001"
HASTY = Patience(lock_timeout=0.1, tries=2, wait=0.2)
POPULATE = """
SELECT pgqueue.enqueue('send-receipt', '{"order_id": 1}', key => 'c1', dedup_key => 'd1');
SELECT pgqueue.enqueue('send-receipt', '{"order_id": 2}', delay => interval '1 hour');
INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload) VALUES ('o-1', 'order.placed', '{"id": 1}');
INSERT INTO pgqueue.job_type (name, queue) VALUES ('send-receipt', 'mail');
INSERT INTO pgqueue.tally (queue, name, outcome, n) VALUES ('mail', 'send-receipt', 'ok', 3);
"""


def run(dsn: str, text: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(text.encode())


def one(dsn: str, text: str) -> object:
    with psycopg.connect(dsn) as connection:
        row = connection.execute(text.encode()).fetchone()
    assert row is not None
    return row[0]


def in_schema(dsn: str) -> list[str]:
    """Name everything that lives in schema pgqueue, whatever its kind."""
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "SELECT pg_describe_object(d.classid, d.objid, 0) FROM pg_depend d "
            "WHERE d.refclassid = 'pg_namespace'::regclass AND d.refobjid = to_regnamespace('pgqueue')"
        )
        return [str(row[0]) for row in rows]


@contextmanager
def held(dsn: str, statement: str) -> Iterator[Connection]:
    """Keep a transaction open that has run a statement."""
    with psycopg.connect(dsn) as connection:
        connection.execute(statement.encode())
        yield connection
        connection.rollback()


def waits_for_a_lock(dsn: str) -> bool:
    return one(dsn, "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation IS NOT NULL") != 0


def test_the_revision_that_the_code_needs_is_the_newest_migration() -> None:
    assert migrate.heads() == (REVISION,)


def test_revisions_sort_by_name_as_they_follow_each_other() -> None:
    from pgqueue.migration import scripts

    oldest_first = [s.revision for s in scripts().walk_revisions()][::-1]
    assert oldest_first == sorted(oldest_first)
    assert all(len(name) == len(REVISION) and name.startswith("pgqueue_") for name in oldest_first)


APPENDED = {
    "autovacuum_vacuum_scale_factor=0",
    "autovacuum_vacuum_threshold=5000",
    "autovacuum_vacuum_cost_delay=0",
}
OPTIONS = {
    "job": {
        "fillfactor=50",
        "autovacuum_vacuum_scale_factor=0",
        "autovacuum_vacuum_threshold=20000",
        "autovacuum_vacuum_insert_threshold=-1",
        "autovacuum_vacuum_cost_delay=0",
        "vacuum_truncate=off",
    },
    "lane": {
        "fillfactor=50",
        "autovacuum_vacuum_scale_factor=0.05",
        "autovacuum_vacuum_cost_delay=0",
        "vacuum_truncate=off",
    },
    "tally": APPENDED,
    "batch_tally": APPENDED,
    "permit": APPENDED,
    "outbox": {
        "fillfactor=50",
        "autovacuum_vacuum_scale_factor=0.02",
        "autovacuum_vacuum_insert_scale_factor=0.2",
    },
}


@pytest.mark.parametrize("table", OPTIONS)
def test_a_hot_table_keeps_room_for_updates_and_is_cleaned_long_before_the_default_would(
    dsn: str, table: str
) -> None:
    """With the defaults a fifth of a table is dead before anybody cleans, slowly; claims read all of that."""
    found = one(dsn, f"SELECT reloptions FROM pg_catalog.pg_class WHERE oid = 'pgqueue.{table}'::regclass")
    assert isinstance(found, list)
    assert set(found) == OPTIONS[table]


def test_up_makes_the_schema_and_a_second_up_finds_nothing_to_do(empty_dsn: str) -> None:
    assert migrate.current(empty_dsn) is None
    migrate.upgrade(empty_dsn)
    before = catalog(empty_dsn)
    migrate.upgrade(empty_dsn)
    assert migrate.current(empty_dsn) == REVISION
    assert catalog(empty_dsn) == before
    migrate.check(empty_dsn)


def test_up_down_up_on_a_populated_database_leaves_the_catalog_as_it_was(empty_dsn: str) -> None:
    migrate.upgrade(empty_dsn)
    fresh = catalog(empty_dsn)
    run(empty_dsn, POPULATE)
    migrate.downgrade(empty_dsn, "base")
    assert one(empty_dsn, "SELECT count(*) FROM pg_namespace WHERE nspname = 'pgqueue'") == 0
    migrate.upgrade(empty_dsn)
    assert catalog(empty_dsn) == fresh
    run(empty_dsn, POPULATE)


def test_down_drops_all_that_up_made_and_keeps_a_schema_that_was_there_before(empty_dsn: str) -> None:
    run(empty_dsn, "CREATE SCHEMA pgqueue; COMMENT ON SCHEMA pgqueue IS 'for the queue'")
    migrate.upgrade(empty_dsn)
    migrate.downgrade(empty_dsn, "base")
    assert (
        one(empty_dsn, "SELECT obj_description('pgqueue'::regnamespace, 'pg_namespace')") == "for the queue"
    )
    assert in_schema(empty_dsn) == []


def test_down_keeps_what_somebody_else_put_into_the_schema(empty_dsn: str) -> None:
    migrate.upgrade(empty_dsn)
    run(empty_dsn, "CREATE TABLE pgqueue.note_of_the_dba (x int)")
    migrate.downgrade(empty_dsn, "base")
    assert in_schema(empty_dsn) == ["table pgqueue.note_of_the_dba"]
    migrate.upgrade(empty_dsn)
    migrate.check(empty_dsn)


def test_down_on_a_database_without_our_tables_does_nothing(empty_dsn: str) -> None:
    migrate.downgrade(empty_dsn, "base")
    migrate.downgrade(empty_dsn, REVISION)
    assert migrate.current(empty_dsn) is None


def test_a_role_with_an_odd_search_path_isolation_and_timeouts_migrates_alike(
    empty_dsn: str, dsn: str
) -> None:
    odd = make_conninfo(
        empty_dsn,
        options="-c search_path=nowhere -c default_transaction_isolation=serializable "
        "-c statement_timeout=1h -c idle_in_transaction_session_timeout=1h",
    )
    migrate.upgrade(odd)
    assert catalog(empty_dsn) == catalog(dsn)


def test_ten_processes_at_once_end_with_one_schema_and_no_error(empty_dsn: str, dsn: str) -> None:
    code = f"from pgqueue.migrate import upgrade; upgrade({empty_dsn!r})"
    running = [
        subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(10)
    ]
    for process in running:
        _, complaint = process.communicate(timeout=180)
        assert process.returncode == 0, complaint
    assert catalog(empty_dsn) == catalog(dsn)
    assert one(empty_dsn, "SELECT count(*) FROM pgqueue.alembic_version") == 1


def test_threads_of_one_process_may_migrate_at_once(empty_dsn: str) -> None:
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(migrate.upgrade, [empty_dsn] * 5))
    migrate.check(empty_dsn)


def test_a_migration_that_runs_already_is_waited_for_and_then_reported(empty_dsn: str) -> None:
    lock = "SELECT pg_advisory_xact_lock(hashtextextended('pgqueue.migrate', 0))"
    with held(empty_dsn, lock), pytest.raises(MigrationBlocked, match=r"another migration.*--wait"):
        migrate.upgrade(empty_dsn, patience=HASTY)
    assert migrate.current(empty_dsn) is None
    migrate.upgrade(empty_dsn, patience=HASTY)


def test_a_lock_held_elsewhere_ends_in_a_clear_error_and_no_half_state(dsn: str) -> None:
    migrate.downgrade(dsn, FIRST)
    before = catalog(dsn)
    with held(dsn, "LOCK TABLE pgqueue.job IN ACCESS SHARE MODE"):
        with pytest.raises(
            MigrationBlocked, match=r"2 times 0\.1 s were too short.*--lock-timeout"
        ) as caught:
            migrate.downgrade(dsn, "base", patience=HASTY)
        assert caught.value.remedy
        assert catalog(dsn) == before
        assert migrate.current(dsn) == FIRST


def test_a_lock_given_up_between_two_tries_lets_the_migration_through(dsn: str) -> None:
    patience = Patience(lock_timeout=0.05, tries=1000)
    migrate.downgrade(dsn, FIRST)
    with held(dsn, "LOCK TABLE pgqueue.job IN ACCESS SHARE MODE") as other:
        thread = threading.Thread(target=migrate.downgrade, args=(dsn, "base"), kwargs={"patience": patience})
        thread.start()
        eventually(lambda: waits_for_a_lock(dsn))
        eventually(lambda: not waits_for_a_lock(dsn))
        other.rollback()
    thread.join(120)
    assert not thread.is_alive()
    assert migrate.current(dsn) is None


def test_kill_9_in_the_middle_leaves_the_old_revision_whole_and_the_lock_free(dsn: str) -> None:
    migrate.downgrade(dsn, FIRST)
    before = catalog(dsn)
    code = (
        "from pgqueue.migrate import Patience, downgrade; "
        f"downgrade({dsn!r}, 'base', patience=Patience(lock_timeout=60))"
    )
    with held(dsn, "LOCK TABLE pgqueue.job IN ACCESS SHARE MODE"):
        process = subprocess.Popen([sys.executable, "-c", code])
        eventually(lambda: waits_for_a_lock(dsn), timeout=30)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    eventually(lambda: not waits_for_a_lock(dsn))
    assert catalog(dsn) == before
    migrate.downgrade(dsn, "base")
    assert migrate.current(dsn) is None


def test_a_revision_that_fails_is_rolled_back_as_a_whole(empty_dsn: str) -> None:
    run(empty_dsn, "CREATE SCHEMA pgqueue; CREATE TABLE pgqueue.outbox (id int)")
    with pytest.raises(MigrationFailed, match=r"outbox.*already exists"):
        migrate.upgrade(empty_dsn)
    assert migrate.current(empty_dsn) is None
    assert "table pgqueue.job" not in in_schema(empty_dsn)
    run(empty_dsn, "DROP TABLE pgqueue.outbox")
    migrate.upgrade(empty_dsn)


@pytest.mark.parametrize("found", ["pgqueue_9999", "5f3a1c"])
def test_a_schema_newer_than_the_code_is_refused_everywhere(conn: Connection, dsn: str, found: str) -> None:
    run(dsn, f"UPDATE pgqueue.alembic_version SET version_num = '{found}'")
    run(dsn, "COMMENT ON TABLE pgqueue.alembic_version IS NULL")
    attempts: list[Callable[[], None]] = [
        lambda: migrate.upgrade(dsn),
        lambda: migrate.downgrade(dsn, "base"),
        lambda: migrate.check(dsn),
        lambda: require_schema(conn),
    ]
    for attempt in attempts:
        with pytest.raises(SchemaTooNew, match=f"{found}.*{REVISION}.*upgrade") as caught:
            attempt()
        assert (caught.value.found, caught.value.needed) == (found, REVISION)


def test_a_newer_schema_that_says_it_serves_this_code_is_accepted(conn: Connection, dsn: str) -> None:
    run(dsn, "UPDATE pgqueue.alembic_version SET version_num = 'pgqueue_9999'")
    run(dsn, f"COMMENT ON TABLE pgqueue.alembic_version IS 'serves code from {REVISION}'")
    require_schema(conn)
    migrate.upgrade(dsn)
    with pytest.raises(SchemaTooNew):
        migrate.downgrade(dsn, "base")
    run(dsn, "COMMENT ON TABLE pgqueue.alembic_version IS 'serves code from pgqueue_9998'")
    with pytest.raises(SchemaTooNew):
        require_schema(conn)


def test_a_schema_older_than_the_code_is_refused_by_check(conn: Connection, dsn: str) -> None:
    run(dsn, "UPDATE pgqueue.alembic_version SET version_num = 'pgqueue_0000'")
    attempts: list[Callable[[], None]] = [lambda: migrate.check(dsn), lambda: require_schema(conn)]
    for attempt in attempts:
        with pytest.raises(SchemaOutdated, match=r"pgqueue_0000.*run: pgqueue migrate"):
            attempt()


def test_a_database_without_our_tables_is_named_by_check(empty_dsn: str) -> None:
    name = one(empty_dsn, "SELECT current_database()")
    with pytest.raises(SchemaMissing, match=f"{name}.*run: pgqueue migrate"):
        migrate.check(empty_dsn)


def test_the_check_of_the_schema_works_on_an_empty_search_path_and_keeps_the_transaction_usable(
    empty_dsn: str,
) -> None:
    with psycopg.connect(empty_dsn, options="-c search_path=") as connection:
        with pytest.raises(SchemaMissing):
            require_schema(connection)
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_an_unknown_revision_is_refused_with_the_known_ones(dsn: str) -> None:
    with pytest.raises(UnknownRevision, match=f"'17'.*head, base, .*{REVISION}"):
        migrate.upgrade(dsn, "17")


@pytest.mark.parametrize("name", ["1", "0001", "pgqueue_0001"])
def test_a_revision_is_named_in_full_or_by_its_number(empty_dsn: str, name: str) -> None:
    migrate.upgrade(empty_dsn, name)
    assert migrate.current(empty_dsn) == "pgqueue_0001"


def test_a_read_only_server_is_refused(empty_dsn: str) -> None:
    dsn = make_conninfo(empty_dsn, options="-c default_transaction_read_only=on")
    with pytest.raises(MigrationRefused, match=r"read-only.*primary"):
        migrate.upgrade(dsn)


def test_a_missing_database_is_named(server: Server) -> None:
    with pytest.raises(DatabaseUnreachable, match="nosuch_database"):
        migrate.upgrade(server.dsn("nosuch_database"))


def test_the_offline_script_makes_and_drops_the_same_catalog_as_the_online_run(
    empty_dsn: str, dsn: str
) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(migrate.sql().encode())
        assert catalog(empty_dsn) == catalog(dsn)
        assert migrate.current(empty_dsn) == REVISION
        migrate.upgrade(empty_dsn)
        connection.execute(migrate.sql("head", "base").encode())
    assert one(empty_dsn, "SELECT count(*) FROM pg_namespace WHERE nspname = 'pgqueue'") == 0


@pytest.fixture
def role(server: Server) -> Iterator[str]:
    """Give a role without any right, which whoever runs the tests may become."""
    if not server.can_create_roles():
        pytest.skip("the role of PGQUEUE_TEST_DSN may not create roles")
    name = f"{server.prefix}_owner"
    with server.admin() as admin:
        admin.execute(f"CREATE ROLE {name} NOLOGIN; GRANT {name} TO CURRENT_USER".encode())
        yield name
        admin.execute(f"DROP ROLE {name}".encode())


def as_role(dsn: str, role: str) -> str:
    return make_conninfo(dsn, options=f"-c role={role}")


def test_a_role_that_owns_only_its_schema_migrates_up_and_down(empty_dsn: str, role: str) -> None:
    owner = as_role(empty_dsn, role)
    with pytest.raises(MigrationRefused, match="CREATE SCHEMA pgqueue AUTHORIZATION"):
        migrate.upgrade(owner)
    run(empty_dsn, f"CREATE SCHEMA pgqueue AUTHORIZATION {role}")
    try:
        migrate.upgrade(owner)
        migrate.check(owner)
        assert one(empty_dsn, "SELECT tableowner FROM pg_tables WHERE tablename = 'alembic_version'") == role
        migrate.downgrade(owner, "base")
        assert in_schema(empty_dsn) == []
        run(owner, migrate.sql().replace("BEGIN;", "").replace("COMMIT;", ""))
        migrate.check(owner)
    finally:
        run(empty_dsn, f"DROP OWNED BY {role} CASCADE")


def test_a_role_without_rights_is_told_which_grant_it_needs(dsn: str, role: str) -> None:
    with pytest.raises(SchemaUnreadable, match="pgqueue migrate --grant"):
        migrate.check(as_role(dsn, role))
