"""The doctor finds each fault when it is there, names it, and says what to do; a healthy database has none."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from pgqueue.connection import execute
from pgqueue.doctor import Finding, _connections, checkup
from pgqueue.heartbeat import register
from tests.factories import MINUTE, enqueue, wipe
from tests.server import Connection
from tests.waiting import eventually

OF_THE_TEST_SERVER = {"fsync is off", "full_page_writes is off"}


@pytest.fixture
def dsn(database: str) -> str:
    """Give the module's database: what a test does is rolled back at its end."""
    return wipe(database)


def findings(conn: Connection, check: str | None = None) -> list[Finding]:
    """Run the doctor; return what is not ok, the test server's own settings left out."""
    found = checkup(conn)
    return [
        one
        for one in found
        if one.level != "ok"
        and (check is None or one.check == check)
        and not any(one.text.startswith(known) for known in OF_THE_TEST_SERVER)
    ]


def only(conn: Connection, check: str) -> Finding:
    (found,) = findings(conn)
    assert found.check == check
    return found


def works(conn: Connection, nonce: int = 1, queue: str = "default", name: str = "work") -> None:
    """Register a live worker."""
    execute(
        conn,
        register(
            nonce=nonce, host="here", pid=nonce, version="1", queues=[queue], names=[name], concurrency=8
        ),
    )


def test_a_healthy_database_has_no_findings_and_every_check_reports(conn: Connection) -> None:
    works(conn)
    enqueue(conn, 3)
    enqueue(conn, name="later", queue="later", delay=MINUTE)
    assert findings(conn) == []
    assert {one.check for one in checkup(conn)} == {
        *(
            "schema",
            "settings",
            "connections",
            "snapshots",
            "jobs",
            "limits",
            "keys",
            "fleets",
            "sequences",
            "tables",
            "indexes",
        ),
        *("publications", "outbox", "schedules", "batches", "slots", "workers", "dead letters"),
    }


def test_without_a_schema_that_is_the_only_finding(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn) as conn:
        (found,) = checkup(conn)
        assert (found.check, found.level) == ("schema", "problem")
        assert "run: pgqueue migrate" in found.text


def test_a_session_that_holds_a_snapshot_is_named_with_its_application(
    dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.doctor.OLD_SNAPSHOT_S", -1.0)
    with psycopg.connect(dsn, application_name="report-tool") as report:
        report.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        report.execute("SELECT count(*) FROM pgqueue.job")
        found = only(conn, "snapshots")
        assert found.level == "problem"
        assert f"session pid {report.info.backend_pid}" in found.text
        assert "application report-tool" in found.text
        assert "idle in transaction" in found.text
        assert found.remedy == f"end it: SELECT pg_terminate_backend({report.info.backend_pid})"


def test_a_session_that_speaks_the_protocol_of_replication_holds_a_snapshot_like_any_other(
    dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subscription that copies a table for hours is one."""
    monkeypatch.setattr("pgqueue.doctor.OLD_SNAPSHOT_S", -1.0)
    rights = conn.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone()
    if rights != (True,):
        pytest.skip("only a superuser may replicate")
    wire = psycopg.pq.PGconn.connect(_conninfo(dsn).encode())
    try:
        for statement in (b"BEGIN ISOLATION LEVEL REPEATABLE READ", b"SELECT count(*) FROM pgqueue.job"):
            assert not wire.exec_(statement).error_message
        found = only(conn, "snapshots")
        assert found.text.startswith(f"session pid {wire.backend_pid} (walsender, application reader")
        assert "pg_terminate_backend" in found.remedy
    finally:
        pid = wire.backend_pid
        wire.finish()
        with psycopg.connect(dsn, autocommit=True) as other:
            gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
            eventually(lambda: other.execute(gone, [pid]).fetchone() == (True,))


def test_a_prepared_transaction_that_was_forgotten_is_named(
    dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.doctor.OLD_SNAPSHOT_S", -1.0)
    with psycopg.connect(dsn, autocommit=True) as other:
        if other.execute("SHOW max_prepared_transactions").fetchone() == ("0",):
            pytest.skip("server: max_prepared_transactions is 0")
        other.execute("BEGIN")
        other.execute("SELECT pg_current_xact_id()")
        other.execute("PREPARE TRANSACTION 'forgotten'")
        try:
            found = only(conn, "snapshots")
        finally:
            other.execute("ROLLBACK PREPARED 'forgotten'")
    assert "prepared transaction 'forgotten'" in found.text
    assert "ROLLBACK PREPARED 'forgotten'" in found.remedy


def test_the_oldest_of_several_snapshots_is_named_first(
    dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.doctor.OLD_SNAPSHOT_S", -1.0)
    with psycopg.connect(dsn) as older, psycopg.connect(dsn) as younger:
        for one in (older, younger):
            one.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            one.execute("SELECT count(*) FROM pgqueue.job")
            with psycopg.connect(dsn, autocommit=True) as writer:
                writer.execute("SELECT pg_current_xact_id()")
        first, second = findings(conn, "snapshots")
        assert f"session pid {older.info.backend_pid}" in first.text
        assert f"session pid {younger.info.backend_pid}" in second.text


def test_jobs_of_a_limited_type_in_two_queues_are_named(conn: Connection) -> None:
    works(conn)
    works(conn, nonce=2, queue="second")
    conn.execute("INSERT INTO pgqueue.job_type (name, slots) VALUES ('work', 1)")
    enqueue(conn, 2)
    assert findings(conn) == []
    enqueue(conn, 1, queue="second")
    found = only(conn, "limits")
    assert found.level == "warning"
    assert "'work' wait in 2 queues (default, second)" in found.text
    assert "--queue second --to default" in found.remedy


@pytest.mark.parametrize("slot", ["standby_1", None])
def test_a_standby_that_holds_a_snapshot_is_named_by_its_slot_or_by_its_application(
    dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch, slot: str | None
) -> None:
    monkeypatch.setattr("pgqueue.doctor.OLD_SNAPSHOT_XIDS", -1)
    rights = conn.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone()
    if rights != (True,):
        pytest.skip("only a superuser sees who replicates")
    with standby(dsn, slot):
        found = only(conn, "snapshots")
    assert found.level == "problem"
    if slot:
        assert "replication slot 'standby_1' (physical, active) holds a snapshot" in found.text
        assert "pg_drop_replication_slot('standby_1')" in found.remedy
    else:
        assert "standby reader (hot_standby_feedback) holds a snapshot" in found.text
        assert "hot_standby_feedback" in found.remedy
    assert findings(conn, "snapshots") == []


@contextmanager
def standby(dsn: str, slot: str | None) -> Iterator[None]:
    """Be a standby with hot_standby_feedback, whose oldest query needs what is now the newest transaction."""
    with psycopg.connect(dsn, autocommit=True) as admin:
        if slot:
            admin.execute("SELECT pg_create_physical_replication_slot(%s)", [slot])
        row = admin.execute(
            "SELECT pg_current_xact_id()::text::bigint, pg_current_wal_lsn()::text"
        ).fetchone()
        assert row
        wire = psycopg.pq.PGconn.connect(_conninfo(dsn).encode())
        try:
            assert wire.status == psycopg.pq.ConnStatus.OK, wire.error_message
            named = f"SLOT {slot} " if slot else ""
            sent = wire.exec_(f"START_REPLICATION {named}PHYSICAL {row[1]}".encode())
            assert sent.status == psycopg.pq.ExecStatus.COPY_BOTH, sent.error_message
            epoch, xid = divmod(row[0], 2**32)
            wire.put_copy_data(struct.pack("!cqIIII", b"h", 0, xid, epoch, 0, 0))
            wire.flush()
            eventually(lambda: admin.execute(_PINNED[slot is not None]).fetchone() is not None)
            yield
        finally:
            wire.finish()
            eventually(
                lambda: (
                    admin.execute(
                        "SELECT FROM pg_stat_replication WHERE application_name = 'reader'"
                    ).fetchone()
                    is None
                )
            )
            if slot:
                admin.execute("SELECT pg_drop_replication_slot(%s)", [slot])


_PINNED = (
    "SELECT FROM pg_stat_replication WHERE application_name = 'reader' AND backend_xmin IS NOT NULL",
    "SELECT FROM pg_replication_slots WHERE xmin IS NOT NULL",
)


def _conninfo(dsn: str) -> str:
    return psycopg.conninfo.make_conninfo(dsn, replication="database", application_name="reader")


def test_a_name_that_no_worker_of_the_queue_knows_comes_with_the_command(conn: Connection) -> None:
    works(conn)
    enqueue(conn, 2, name="it's new")
    enqueue(conn)
    found = only(conn, "jobs")
    assert found.level == "problem"
    assert found.text.startswith("2 jobs \"it's new\" wait in queue 'default'")
    assert "pgqueue jobs cancel --name 'it'\"'\"'s new' --queue default" in found.remedy
    assert "pgqueue jobs move --name 'it'\"'\"'s new' --queue default --to QUEUE" in found.remedy


def test_a_queue_that_no_worker_serves_is_one_finding(conn: Connection) -> None:
    works(conn)
    enqueue(conn, 2, name="a", queue="mail")
    enqueue(conn, 3, name="b", queue="mail", key="k")
    found = only(conn, "jobs")
    assert (found.level, found.text) == ("problem", "5 jobs wait in queue 'mail', which no worker serves")
    assert "--queues mail" in found.remedy


def test_a_paused_queue_with_jobs_is_a_warning(conn: Connection) -> None:
    enqueue(conn, 2)
    conn.execute("INSERT INTO pgqueue.queue (name, paused) VALUES ('default', true)")
    assert only(conn, "jobs").level == "warning"


def test_two_fleets_on_one_queue_are_told_to_use_two_queues(conn: Connection) -> None:
    works(conn, 1)
    works(conn, 2, name="other")
    works(conn, 3, queue="mail")
    works(conn, 4, queue="mail")
    found = only(conn, "fleets")
    assert (found.level, "queue 'default' is served by 2 fleets" in found.text) == ("warning", True)


@pytest.mark.parametrize("sequence", ["pos_seq", "job_id_seq", "outbox_id_seq"])
def test_a_sequence_behind_what_is_in_use_comes_with_the_setval(conn: Connection, sequence: str) -> None:
    works(conn)
    enqueue(conn, 5)
    conn.execute(
        "INSERT INTO pgqueue.outbox (event_type, payload) SELECT 'x', '1' FROM generate_series(1, 5)"
    )
    conn.execute("UPDATE pgqueue.outbox SET published_at = now()")
    last = conn.execute(f"SELECT last_value FROM pgqueue.{sequence}".encode()).fetchone()
    assert last
    conn.execute("SELECT setval(%s, 2)", [f"pgqueue.{sequence}"])
    found = only(conn, "sequences")
    assert found.text.startswith(f"pgqueue.{sequence} stands at 2, but {last[0]} is in use")
    conn.execute(found.remedy.encode())
    assert findings(conn) == []


def test_a_sequence_that_caches_numbers_is_a_problem(conn: Connection) -> None:
    conn.execute("ALTER SEQUENCE pgqueue.pos_seq CACHE 20")
    found = only(conn, "sequences")
    assert "hands out 20 numbers at a time" in found.text
    conn.execute(found.remedy.encode())
    assert findings(conn) == []


def test_a_commit_that_does_not_wait_is_a_problem(conn: Connection) -> None:
    conn.execute("SET synchronous_commit = off")
    found = only(conn, "settings")
    assert (found.level, "synchronous_commit is off" in found.text) == ("problem", True)


def test_a_publication_of_all_tables_is_a_problem(conn: Connection) -> None:
    conn.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    assert "publication everything carries" in only(conn, "publications").text
    conn.execute("DROP PUBLICATION everything")
    conn.execute("CREATE PUBLICATION pgqueue_outbox FOR TABLE pgqueue.outbox (id) WITH (publish = 'insert')")
    assert findings(conn) == []
    conn.execute("ALTER PUBLICATION pgqueue_outbox ADD TABLE pgqueue.job")
    assert "publication pgqueue_outbox carries 1 tables" in only(conn, "publications").text
    conn.execute("DROP PUBLICATION pgqueue_outbox")
    conn.execute("CREATE TABLE public.orders (id int)")
    conn.execute("CREATE PUBLICATION shop FOR TABLE public.orders")
    assert findings(conn) == []


def test_events_that_nobody_publishes_are_a_problem(conn: Connection) -> None:
    conn.execute("INSERT INTO pgqueue.outbox (event_type, payload) VALUES ('x', '1')")
    found = only(conn, "outbox")
    assert (found.level, found.text.startswith("1 events wait")) == ("problem", True)
    conn.execute(
        "INSERT INTO pgqueue.relay (id, name, lease_until) VALUES (gen_random_uuid(), 'r', now() + interval '1 min')"
    )
    found = only(conn, "outbox")
    assert (found.level, found.text) == ("warning", "64 partitions have no live relay")
    conn.execute("UPDATE pgqueue.relay_partition SET owner = (SELECT id FROM pgqueue.relay)")
    assert findings(conn) == []


def test_rejected_events_are_findings(conn: Connection) -> None:
    conn.execute(
        "INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload, last_error, next_attempt_at, parked_at) "
        "VALUES ('a', 'x', '1', 'no', 'infinity', 'infinity'), ('b', 'x', '1', 'no', NULL, 'infinity')"
    )
    conn.execute(
        "INSERT INTO pgqueue.relay (id, name, lease_until) VALUES (gen_random_uuid(), 'r', now() + interval '1 min')"
    )
    conn.execute("UPDATE pgqueue.relay_partition SET owner = (SELECT id FROM pgqueue.relay)")
    blocked, parked = findings(conn)
    assert (blocked.level, blocked.text.startswith("1 aggregates are held up")) == ("problem", True)
    assert (parked.level, parked.text) == ("warning", "2 events are parked")


def test_a_schedule_that_makes_no_jobs_is_a_problem(conn: Connection) -> None:
    conn.execute("SELECT pgqueue.schedule_add('nightly', '0 2 * * *', 'work')")
    assert findings(conn) == []
    conn.execute("UPDATE pgqueue.schedule SET next_at = now() - interval '5 min'")
    assert only(conn, "schedules").text.startswith("schedule 'nightly' is 300 s late")
    conn.execute("UPDATE pgqueue.schedule SET problem = 'no such zone', problem_at = now()")
    assert only(conn, "schedules").text == "schedule 'nightly' makes no jobs: no such zone"
    works(conn, name="report")
    conn.execute("UPDATE pgqueue.schedule SET source = 'code', job = 'report'")
    assert only(conn, "schedules").level == "warning"


def test_a_batch_whose_completion_cannot_be_enqueued_comes_with_what_helps(conn: Connection) -> None:
    conn.execute("INSERT INTO pgqueue.batch (size, done, completion) VALUES (1, 0, '{\"payloads\": [1]}')")
    conn.execute("INSERT INTO pgqueue.batch_tally VALUES (1, 'done', 1)")
    conn.execute("SELECT pgqueue.fold_batches()")
    found = only(conn, "batches")
    assert found.level == "problem"
    assert "completion job of batch 1 cannot be enqueued: pgqueue.enqueue of job" in found.text
    conn.execute(found.remedy.partition("without the job: ")[2].encode())
    assert conn.execute("SELECT pgqueue.fold_batches()").fetchall() == [(1,)]
    assert findings(conn, "batches") == []


def test_a_worker_that_fell_silent_is_a_warning(conn: Connection) -> None:
    works(conn, 9)
    conn.execute("UPDATE pgqueue.worker SET beat_at = now() - interval '5 min', in_flight = 3")
    found = only(conn, "workers")
    assert (found.level, "worker here:9 has not been heard of for 300 s; it held 3 jobs" in found.text) == (
        "warning",
        True,
    )


def test_slots_that_handlers_over_their_time_keep_are_a_warning(conn: Connection) -> None:
    works(conn, 9)
    conn.execute("UPDATE pgqueue.worker SET overrun = 2, concurrency = 8")
    found = only(conn, "workers")
    assert found.level == "warning"
    assert found.text.startswith("worker here:9: 2 of 8 slots are kept by handlers")


@pytest.mark.parametrize(("count", "level"), [(300, "warning"), (301, "problem")])
def test_more_than_three_hundred_dead_letters_in_ten_minutes_are_a_problem(
    conn: Connection, count: int, level: str
) -> None:
    conn.execute(
        "INSERT INTO pgqueue.dead_job "
        "(id, queue, name, priority, attempt, lost, payload, enqueued_at, reason, error_type) "
        "SELECT nextval('pgqueue.job_id_seq'), 'mail', 'send', 5, 1, 0, '1', now(), 'exhausted', 'KeyError' "
        "FROM generate_series(1, %s) g",
        [count],
    )
    assert only(conn, "dead letters").level == level
    conn.execute("UPDATE pgqueue.dead_job SET died_at = now() - interval '11 min'")
    assert findings(conn) == []


def test_an_index_that_is_not_valid_is_a_problem(conn: Connection) -> None:
    rights = conn.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user").fetchone()
    if rights != (True,):
        pytest.skip("only a superuser can break an index on purpose")
    conn.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'pgqueue.job_ready'::regclass")
    found = only(conn, "indexes")
    assert found.remedy == "REINDEX INDEX pgqueue.job_ready"


@pytest.mark.usefixtures("alone")
def test_dead_rows_that_nobody_cleans_are_a_warning(
    conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.doctor.DEAD_ROWS", 50)
    conn.execute("TRUNCATE pgqueue.job")  # what others have counted is forgotten
    conn.execute("ALTER TABLE pgqueue.job SET (autovacuum_enabled = false)")
    enqueue(conn, 100)
    conn.commit()
    conn.execute("DELETE FROM pgqueue.job")
    conn.commit()
    conn.execute("SELECT pg_stat_force_next_flush()")
    conn.commit()
    found = only(conn, "tables")
    assert found.text == "pgqueue.job has 100 dead rows beside 0 live ones (never cleaned)"


def test_connections_that_run_out_are_a_problem() -> None:
    rows = [(180_000, "18", "on", "on", "on", 100, used) for used in (70, 76, 91)]
    assert [[one.level for one in _connections([row])] for row in rows] == [[], ["warning"], ["problem"]]
