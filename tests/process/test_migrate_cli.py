"""`pgqueue migrate` says in one line what it did, or what is wrong and what to do about it."""

from __future__ import annotations

import os
import pty
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from pgqueue import migrate
from pgqueue.embedded import EmbeddedUnavailable
from pgqueue.embedded.binaries import installed
from pgqueue.schema_version import REVISION
from tests.catalog import catalog
from tests.server import Server, url
from tests.waiting import eventually

PGQUEUE = str(Path(sys.executable).with_name("pgqueue"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    code: int
    out: str
    err: str


def run(*argv: str, **environ: str) -> Done:
    """Run pgqueue with an environment that names no database but the one that is given."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "DATABASE_URL"))}
    done = subprocess.run(
        [PGQUEUE, *argv],
        env=clean | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Done(code=done.returncode, out=done.stdout, err=done.stderr)


def fails(*argv: str, **environ: str) -> str:
    """Run pgqueue, expect one error line and status 1, and return the line."""
    done = run(*argv, **environ)
    assert done.code == 1, done
    errors = [line for line in done.err.splitlines() if not line.startswith("warning:")]
    assert len(errors) == 1, done.err
    assert errors[0].startswith("error: ")
    assert "Traceback" not in done.err
    assert done.out == ""
    return errors[0]


def test_migrate_goes_up_and_says_from_where_to_where(empty_dsn: str) -> None:
    assert run("migrate", "current", PGQUEUE_DSN=empty_dsn).out == "none\n"
    done = run("migrate", PGQUEUE_DSN=empty_dsn)
    assert (done.code, done.out, done.err) == (0, f"the schema went from none to {REVISION}\n", "")
    assert run("migrate", "up", PGQUEUE_DSN=empty_dsn).out == f"the schema is at {REVISION}: nothing to do\n"
    assert run("migrate", "current", PGQUEUE_DSN=empty_dsn).out == f"{REVISION}\n"
    assert run("migrate", "check", PGQUEUE_DSN=empty_dsn).code == 0


def test_check_fails_with_the_remedy_while_the_tables_are_missing(empty_dsn: str) -> None:
    assert "run: pgqueue migrate" in fails("migrate", "check", PGQUEUE_DSN=empty_dsn)


def test_going_down_asks_first_and_refuses_where_nobody_can_answer(dsn: str) -> None:
    assert "--yes" in fails("migrate", "down", PGQUEUE_DSN=dsn)
    assert migrate.current(dsn) == REVISION
    done = run("migrate", "down", "--yes", PGQUEUE_DSN=dsn)
    below = migrate.previous(REVISION)
    assert done.out == f"the schema went from {REVISION} to {below}\n"
    assert migrate.current(dsn) == below
    assert run("migrate", "base", "--yes", PGQUEUE_DSN=dsn).code == 0
    assert run("migrate", "down", PGQUEUE_DSN=dsn).code == 0


@pytest.mark.parametrize(("answer", "left"), [("y", None), ("n", REVISION)])
def test_going_down_at_a_terminal_follows_the_answer(dsn: str, answer: str, left: str | None) -> None:
    master, terminal = pty.openpty()
    try:
        process = subprocess.Popen(
            [PGQUEUE, "migrate", "base", "--dsn", dsn], stdin=terminal, stdout=terminal, stderr=terminal
        )
        os.close(terminal)
        os.write(master, f"{answer}\n".encode())
        process.wait(60)
    finally:
        os.close(master)
    assert process.returncode == (0 if answer == "y" else 1)
    assert migrate.current(dsn) == left


def test_a_revision_is_a_target_up_and_down(empty_dsn: str) -> None:
    assert run("migrate", "1", PGQUEUE_DSN=empty_dsn).code == 0
    assert migrate.current(empty_dsn) == "pgqueue_0001"
    assert run("migrate", "base", "--yes", PGQUEUE_DSN=empty_dsn).code == 0
    assert migrate.current(empty_dsn) is None
    assert "there is no revision 'nonsense'" in fails("migrate", "nonsense", PGQUEUE_DSN=empty_dsn)


def test_sql_prints_the_script_without_any_database_and_the_script_runs(empty_dsn: str, dsn: str) -> None:
    done = run("migrate", "--sql")
    assert done.code == 0
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(done.out.encode())
    assert catalog(empty_dsn) == catalog(dsn)
    down = run("migrate", "base", "--sql", "--from", "head")
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(down.out.encode())
    assert migrate.current(empty_dsn) is None


def test_sql_with_grants_ends_with_them(dsn: str) -> None:
    script = run("migrate", "--sql", "--grant", "producer=it's").out
    assert script.endswith("SELECT pgqueue.grant_role('producer', 'it''s');\n")


def test_from_without_sql_is_refused(dsn: str) -> None:
    assert "goes with --sql" in fails("migrate", "--from", "base", PGQUEUE_DSN=dsn)


def test_ten_commands_at_once_all_succeed(empty_dsn: str) -> None:
    argv = [PGQUEUE, "migrate", "--dsn", empty_dsn]
    running = [subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(10)]
    for process in running:
        _, complaint = process.communicate(timeout=120)
        assert (process.returncode, complaint) == (0, b"")
    assert migrate.current(empty_dsn) == REVISION


def test_flags_come_from_the_environment_too(dsn: str) -> None:
    migrate.downgrade(dsn, "1")
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE pgqueue.job IN ACCESS SHARE MODE")
        line = fails(
            "migrate",
            "base",
            PGQUEUE_DSN=dsn,
            PGQUEUE_MIGRATE_YES="1",
            PGQUEUE_MIGRATE_LOCK_TIMEOUT="0.05",
            PGQUEUE_MIGRATE_TRIES="2",
        )
    assert "2 times 0.05 s were too short to get a lock" in line
    assert migrate.current(dsn) == "pgqueue_0001"


@pytest.mark.parametrize(
    "respell",
    [
        pytest.param(lambda dsn: {"DATABASE_URL": dsn}, id="DATABASE_URL"),
        pytest.param(
            lambda dsn: {"PGQUEUE_DSN": dsn.replace("postgresql:", "postgresql+psycopg:")}, id="sqlalchemy"
        ),
        pytest.param(
            lambda dsn: {
                {"dbname": "PGDATABASE"}.get(name, f"PG{name.upper()}"): str(value)
                for name, value in psycopg.conninfo.conninfo_to_dict(dsn).items()
            },
            id="libpq",
        ),
    ],
)
def test_a_database_is_named_by_the_usual_variables(
    dsn: str, respell: Callable[[str], dict[str, str]]
) -> None:
    done = run("migrate", "current", **respell(dsn))
    assert (done.code, done.out) == (0, f"{REVISION}\n"), done.err


def test_no_database_at_all_is_explained() -> None:
    line = fails("migrate")
    assert "PGQUEUE_DSN" in line
    assert "DATABASE_URL" in line


def test_an_unreachable_server_is_one_line_with_the_password_masked() -> None:
    line = fails("migrate", PGQUEUE_DSN="postgresql://u:hunter2@127.0.0.1:1/d")
    assert "hunter2" not in line
    assert "postgresql://u:***@127.0.0.1:1/d" in line


def test_a_missing_database_is_one_line(server: Server) -> None:
    assert "nosuch_database" in fails("migrate", PGQUEUE_DSN=server.dsn("nosuch_database"))


def test_a_dsn_of_another_database_is_one_line() -> None:
    assert "is not a PostgreSQL URL" in fails("migrate", PGQUEUE_DSN="mysql://u:hunter2@h/d")


def test_a_password_on_the_command_line_is_warned_about_and_not_repeated(server: Server) -> None:
    done = run("migrate", "current", "--dsn", "host=127.0.0.1 port=1 password=hunter2")
    assert done.err.startswith("warning: ")
    assert "PGQUEUE_DSN" in done.err
    assert "hunter2" not in done.err


@pytest.fixture
def stranger(server: Server) -> Iterator[str]:
    """Give a role that may log in with the password `right` and has no rights."""
    if not server.can_create_roles():
        pytest.skip("the role of PGQUEUE_TEST_DSN may not create roles")
    name = f"{server.prefix}_stranger"
    with server.admin() as admin:
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'right'").format(sql.Identifier(name)))
        yield name
        admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def login(dsn: str, role: str, password: str) -> str:
    return url(psycopg.conninfo.make_conninfo(dsn, user=role, password=password))


@pytest.fixture
def doorman() -> Iterator[int]:
    """Give the port of a server that asks everybody for a password and takes none.

    The servers of a test run trust whoever reaches them; this one speaks the few messages of a refusal.
    """
    complaint = b'SFATAL\0VFATAL\0C28P01\0Mpassword authentication failed for user "u"\0\0'
    refusal = b"E" + (len(complaint) + 4).to_bytes(4) + complaint

    class Door(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while True:
                size = int.from_bytes(self.rfile.read(4))
                code = int.from_bytes(self.rfile.read(size - 4)[:4])
                if code == 196608:
                    break
                self.wfile.write(b"N")  # neither TLS nor GSSAPI
            self.wfile.write(b"R" + (8).to_bytes(4) + (3).to_bytes(4))
            self.rfile.read(1)
            self.rfile.read(int.from_bytes(self.rfile.read(4)) - 4)
            self.wfile.write(refusal)

    with socketserver.TCPServer(("127.0.0.1", 0), Door) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_wrong_password_is_one_line(doorman: int) -> None:
    line = fails("migrate", PGQUEUE_DSN=f"postgresql://u:hunter2@127.0.0.1:{doorman}/d")
    assert 'password authentication failed for user "u"' in line
    assert "hunter2" not in line


def test_a_role_without_rights_is_one_line_with_the_remedy(empty_dsn: str, dsn: str, stranger: str) -> None:
    line = fails("migrate", PGQUEUE_DSN=login(empty_dsn, stranger, "right"))
    assert "CREATE SCHEMA pgqueue AUTHORIZATION" in line
    line = fails("migrate", "check", PGQUEUE_DSN=login(dsn, stranger, "right"))
    assert "--grant" in line


def test_grants_go_with_up_and_let_the_role_in(server: Server, empty_dsn: str, stranger: str) -> None:
    done = run("migrate", "--grant", f"reader={stranger}", PGQUEUE_DSN=empty_dsn)
    assert done.code == 0, done.err
    assert done.out.endswith(f"{stranger}: has the rights of a reader\n")
    with psycopg.connect(login(empty_dsn, stranger, "right")) as reader:
        reader.execute("SELECT * FROM pgqueue.queue_depth")
    with psycopg.connect(empty_dsn) as owner:
        owner.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(stranger)))


def test_a_grant_that_cannot_be_read_is_a_usage_error(dsn: str) -> None:
    done = run("migrate", "--grant", "admin=x", PGQUEUE_DSN=dsn)
    assert done.code == 2
    assert "producer, worker, relay, reader" in done.err


def test_ctrl_c_while_waiting_leaves_without_a_traceback(dsn: str) -> None:
    migrate.downgrade(dsn, "1")
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE pgqueue.job IN ACCESS SHARE MODE")
        process = subprocess.Popen(
            [PGQUEUE, "migrate", "base", "--yes", "--lock-timeout", "60", "--dsn", dsn],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        with psycopg.connect(dsn, autocommit=True) as look:
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation IS NOT NULL"
            eventually(lambda: look.execute(waiting).fetchone() != (0,), timeout=30)
        process.send_signal(2)
        _, complaint = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in complaint
    assert migrate.current(dsn) == "pgqueue_0001"


def test_help_and_version_need_no_database_and_load_no_alembic() -> None:
    assert "migrate" in run("--help").out
    assert "PGQUEUE_MIGRATE_LOCK_TIMEOUT" in run("migrate", "--help").out
    assert run("--version").out.startswith("pgqueue, version ")
    code = "import sys, pgqueue.cli.migrate; print(sorted({'alembic', 'sqlalchemy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_embedded_database_is_started_migrated_and_gone_again() -> None:
    try:
        installed()
    except EmbeddedUnavailable as error:
        pytest.skip(f"server: {error}")
    done = run("migrate", "--dsn", "embedded:")
    assert (done.code, done.out) == (0, f"the schema went from none to {REVISION}\n"), done.err


def test_an_embedded_database_in_a_place_that_cannot_be_is_one_line() -> None:
    try:
        installed()
    except EmbeddedUnavailable as error:
        pytest.skip(f"server: {error}")
    assert "name a folder" in fails("migrate", "--dsn", "embedded:/proc/nowhere")
