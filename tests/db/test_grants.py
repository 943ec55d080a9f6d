"""Each kind of role can do its work with its grants alone, and nothing beyond."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgqueue import App, migrate
from pgqueue.cli._app import declare_types
from pgqueue.connection import execute
from pgqueue.declare import declare
from pgqueue.doctor import checkup
from pgqueue.errors import BadOption, ConfigError, MigrationRefused
from pgqueue.migrate import Grant
from pgqueue.schema_version import require_schema
from pgqueue.statement import load
from relay import Inbox, Outbox
from tests.server import Connection, Server
from tests.waiting import eventually

OWNER_ONLY = {"migrate"}
PRODUCERS = {"enqueue", "outbox", "inbox"}


@pytest.fixture
def granted(server: Server, dsn: str) -> Iterator[Callable[[str], Connection]]:
    """Give a function that makes a role with the grants of one kind and connects with it."""
    if not server.can_create_roles():
        pytest.skip("the role of PGQUEUE_TEST_DSN may not create roles")
    made: list[tuple[str, Connection]] = []

    def connect(kind: str) -> Connection:
        role = f"{server.prefix}_{kind}"
        with server.admin() as admin:
            admin.execute(
                sql.SQL("CREATE ROLE {0} NOLOGIN; GRANT {0} TO CURRENT_USER").format(sql.Identifier(role))
            )
        migrate.grant(dsn, [Grant(kind=kind, role=role)])
        connection: Connection = psycopg.connect(
            make_conninfo(dsn, options=f"-c role={role} -c search_path=")
        )
        made.append((role, connection))
        return connection

    yield connect
    for role, connection in made:
        connection.close()
        with psycopg.connect(dsn) as owner:
            owner.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
        with server.admin() as admin:
            admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    order_id: int


app = App()


@app.job("send-receipt")
def send_receipt(receipt: Receipt) -> None:
    raise AssertionError(receipt)


def refused(connection: Connection, *statements: str) -> list[str]:
    """Return the statements that were not refused for want of a right."""
    passed = []
    for statement in statements:
        try:
            with connection.transaction():
                connection.execute(statement.encode())
        except psycopg.errors.InsufficientPrivilege:
            continue
        passed.append(statement)
    return passed


def beyond_the_rights(connection: Connection, package: str, names: set[str]) -> list[str]:
    """Plan every statement of the SQL files as this role; return those that it may not run."""
    missing = []
    for name in sorted(names):
        for query in load(package, name).values():
            try:
                with connection.transaction(force_rollback=True):
                    connection.execute(f"PREPARE probe AS {query.numbered()}".encode())
                    nulls = ", ".join(["NULL"] * len(query.names))
                    connection.execute(
                        f"EXPLAIN EXECUTE probe{f'({nulls})' if nulls else ''}".encode(), prepare=False
                    )
            except psycopg.errors.InsufficientPrivilege as error:
                missing.append(f"{package}/sql/{name}.sql {query.name}: {error.diag.message_primary}")
            except psycopg.errors.SyntaxError:
                continue  # SET, LISTEN, LOCK: not to be planned, and no table to have rights on
            finally:
                with suppress(psycopg.errors.InvalidSqlStatementName), connection.transaction():
                    connection.execute("DEALLOCATE probe")
    return missing


def files(package: str) -> set[str]:
    folder = resources.files(package) / "sql"
    return {entry.name.removesuffix(".sql") for entry in folder.iterdir() if entry.name.endswith(".sql")}


def test_a_producer_enqueues_and_adds_events_and_reads_no_payload(
    granted: Callable[[str], Connection],
) -> None:
    producer = granted("producer")
    first = send_receipt.using(dedup_key="d", key="k").enqueue(producer, Receipt(order_id=1))
    again = send_receipt.using(dedup_key="d", key="k").enqueue(producer, Receipt(order_id=2))
    assert (again.id, again.created) == (first.id, False)
    latest = send_receipt.using(dedup_key="d", dedup_mode="replace")
    assert latest.enqueue(producer, Receipt(order_id=9)).changed
    send_receipt.enqueue_many(producer, [Receipt(order_id=3), Receipt(order_id=4)])
    producer.execute("SELECT pgqueue.enqueue('from-sql', '{}', delay => interval '1 h', queue => 'bulk')")
    receipt = send_receipt.with_payload(Receipt(order_id=5))
    batch = app.batch(
        producer, [receipt, send_receipt.using(then=[receipt]).with_payload(Receipt(order_id=6))], receipt
    )
    assert app.batch(producer, [], receipt).jobs == ()
    assert app.batch_status(producer, batch) is not None
    assert app.status(producer, batch.jobs[0]) is not None
    Outbox().add(producer, "order.placed", {"id": 1}, aggregate_id="order-1", version=1)
    producer.execute(
        "INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload) VALUES ('a', 'order.paid', '{}')"
    )
    assert Inbox().claim(producer, "outbox:1", consumer="warehouse", source="shop")
    assert Inbox().newer(producer, consumer="warehouse", source="shop", aggregate_id="a", version=2)
    producer.commit()
    assert refused(
        producer,
        "SELECT payload FROM pgqueue.job",
        "UPDATE pgqueue.job SET priority = 0",
        "DELETE FROM pgqueue.job",
        "SELECT payload FROM pgqueue.outbox",
        "UPDATE pgqueue.outbox SET published_at = now()",
        "SELECT payload FROM pgqueue.dead_job",
        "INSERT INTO pgqueue.job_type (name) VALUES ('x')",
        "CREATE TABLE pgqueue.mine (x int)",
    ) == []  # fmt: skip


def test_a_worker_may_run_every_statement_of_the_job_half(granted: Callable[[str], Connection]) -> None:
    worker = granted("worker")
    require_schema(worker)
    assert beyond_the_rights(worker, "pgqueue", files("pgqueue") - OWNER_ONLY) == []
    assert refused(worker, "DROP TABLE pgqueue.job", "ALTER TABLE pgqueue.job ADD x int") == []
    assert refused(worker, "CREATE TABLE pgqueue.mine (x int)", "TRUNCATE pgqueue.job") == []
    worker.execute("INSERT INTO pgqueue.job_type (name, keep_s) VALUES ('kept', 86400)")
    assert worker.execute("SELECT pgqueue.history_days()").fetchone() == (
        3,
    )  # it owns no table, and needs to
    worker.execute(
        "INSERT INTO pgqueue.job (name, lease, deadline) VALUES ('kept', 7, now() + interval '1 min')"
    )
    assert worker.execute('SELECT pgqueue.complete(\'[{"id": 1, "lease": 7}]\')').fetchone() == (1,)
    assert worker.execute("SELECT state FROM pgqueue.status(1)").fetchone() == ("done",)
    worker.commit()


def test_a_worker_reads_the_revision_and_cannot_write_it_also_where_an_older_grant_let_it(
    granted: Callable[[str], Connection], conn: Connection, dsn: str
) -> None:
    worker = granted("worker")
    role = str(
        (conn.execute("SELECT rolname FROM pg_roles WHERE rolname LIKE '%\\_worker'").fetchone() or ("",))[0]
    )
    conn.execute(
        sql.SQL("GRANT INSERT, UPDATE, DELETE ON pgqueue.alembic_version TO {}").format(sql.Identifier(role))
    )
    conn.commit()
    migrate.grant(dsn, [Grant(kind="worker", role=role)])
    require_schema(worker)
    assert refused(
        worker,
        "UPDATE pgqueue.alembic_version SET version_num = 'pgqueue_0009'",
        "INSERT INTO pgqueue.alembic_version VALUES ('pgqueue_0009')",
        "DELETE FROM pgqueue.alembic_version",
    ) == []  # fmt: skip


def test_the_owner_who_is_its_own_worker_can_still_migrate(conn: Connection, dsn: str) -> None:
    (owner,) = conn.execute("SELECT current_user").fetchone() or ("",)
    conn.commit()
    migrate.grant(dsn, [Grant(kind="worker", role=str(owner))])
    conn.execute("UPDATE pgqueue.alembic_version SET version_num = version_num")
    held = conn.execute("SELECT has_table_privilege(%s, 'pgqueue.alembic_version', 'UPDATE')", [owner])
    assert held.fetchone() == (True,)


def test_a_relay_may_run_every_statement_of_the_event_half_and_reads_no_job(
    granted: Callable[[str], Connection],
) -> None:
    relaying = granted("relay")
    require_schema(relaying)
    assert beyond_the_rights(relaying, "relay", files("relay") - PRODUCERS) == []
    send_receipt.enqueue(relaying, Receipt(order_id=1))
    relaying.commit()
    assert refused(
        relaying,
        "SELECT payload FROM pgqueue.job",
        "DELETE FROM pgqueue.job",
        "SELECT payload FROM pgqueue.dead_job",
    ) == []  # fmt: skip


def test_a_relay_that_may_not_declare_the_types_of_queue_starts_once_somebody_did(
    granted: Callable[[str], Connection], conn: Connection
) -> None:
    shop = App()
    shop.on_event("order.placed", queue="stock", name="reserve-stock")(lambda: None)
    relaying = granted("relay")
    relaying.autocommit = True
    with pytest.raises(ConfigError, match=r"reserve-stock.*pgqueue sync"):
        declare_types(relaying, shop)
    execute(conn, declare(kind.policy for kind in shop.types.values()))
    conn.commit()
    declare_types(relaying, shop)


def test_a_reader_sees_the_views_and_no_payload(
    granted: Callable[[str], Connection], conn: Connection
) -> None:
    reader = granted("reader")
    require_schema(reader)
    views = [
        str(name)
        for (name,) in conn.execute("SELECT viewname FROM pg_catalog.pg_views WHERE schemaname = 'pgqueue'")
    ]
    assert "queue_depth" in views
    for view in views:
        reader.execute(sql.SQL("SELECT * FROM pgqueue.{}").format(sql.Identifier(view)))
    reader.commit()
    tables = [
        str(name)
        for (name,) in conn.execute(
            "SELECT table_name FROM information_schema.columns JOIN information_schema.tables "
            "USING (table_schema, table_name) WHERE table_schema = 'pgqueue' AND column_name = 'payload' "
            "AND table_type = 'BASE TABLE'"
        )
    ]
    assert {"job", "dead_job", "outbox"} <= set(tables)
    assert refused(reader, *(f"SELECT payload FROM pgqueue.{table}" for table in tables)) == []
    assert beyond_the_rights(reader, "pgqueue", {"claim"})
    assert reader.execute("SELECT * FROM pgqueue.status(1)").fetchone() is None
    reader.commit()
    assert refused(reader, "SELECT pgqueue.enqueue('x')", "DELETE FROM pgqueue.tally_minute") == []


def test_the_statements_of_a_producer_are_within_its_rights(granted: Callable[[str], Connection]) -> None:
    producer = granted("producer")
    assert beyond_the_rights(producer, "pgqueue", {"enqueue"}) == []
    assert beyond_the_rights(producer, "relay", {"outbox"}) == []


def test_a_grant_to_a_role_that_does_not_exist_names_it_and_grants_nothing(dsn: str) -> None:
    with pytest.raises(MigrationRefused, match=r'role "nosuch" does not exist; create the role first'):
        migrate.grant(dsn, [Grant(kind="reader", role="nosuch")])


def test_a_grant_of_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadOption, match="'admin' is not one of producer, worker, relay, reader"):
        Grant(kind="admin", role="x")


def test_a_role_that_cannot_see_the_sessions_of_others_is_told_so_by_the_doctor_with_the_grant(
    server: Server, dsn: str, granted: Callable[[str], Connection]
) -> None:
    lowly = granted("worker")

    def snapshots() -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = [
            (one.level, one.remedy) for one in checkup(lowly) if one.check == "snapshots"
        ]
        lowly.rollback()
        return found

    eventually(lambda: snapshots() == [("ok", "")])
    with psycopg.connect(dsn):
        assert snapshots() == [("warning", f"GRANT pg_read_all_stats TO {server.prefix}_worker")]
        with server.admin() as owner:
            owner.execute(
                sql.SQL("GRANT pg_read_all_stats TO {}").format(sql.Identifier(f"{server.prefix}_worker"))
            )
        assert snapshots() == [("ok", "")]
