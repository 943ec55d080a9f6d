"""A worker outlives its connections and its database: no restart, no flood of lines, nothing lost or done twice."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psycopg
import psycopg.sql
import pytest
from click.testing import CliRunner

from pgqueue.cli._worker import command
from pgqueue.embedded import Embedded, EmbeddedUnavailable
from pgqueue.migrate import upgrade
from tests.process.apps import every
from tests.process.apps.every import Work
from tests.process.apps.fleet import EVERY, Fleet, Process
from tests.process.apps.proxy import Proxy
from tests.server import FAST, Connection, Server
from tests.waiting import eventually


def count(conn: Connection, query: str) -> int:
    row = conn.execute(query).fetchone()
    conn.rollback()
    return int(str(row[0])) if row else 0


JOBS = "SELECT count(*) FROM pgqueue.job"
ACKED = (
    "SELECT coalesce((SELECT sum(n) FROM pgqueue.tally WHERE outcome = 'ok'), 0)"
    " + coalesce((SELECT sum(n) FROM pgqueue.tally_minute WHERE outcome = 'ok'), 0)"
)
BACKENDS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'pgqueue-worker %'"
)


def backends(conn: Connection) -> list[int]:
    rows = conn.execute(BACKENDS.replace("count(*)", "pid") + " ORDER BY backend_start").fetchall()
    conn.rollback()
    return [int(str(row[0])) for row in rows]


def trouble(worker: Process) -> list[str]:
    return [line for line in worker.log.splitlines() if " WARNING " in line or " ERROR " in line]


def test_a_job_survives_the_loss_of_every_connection_of_its_worker(fleet: Fleet, conn: Connection) -> None:
    gate = fleet.gate("open")
    every.work.enqueue(conn, Work(n=1, gate=str(gate)))
    conn.commit()
    worker = fleet.start()
    fleet.effects.wait("start")
    other = fleet.start()
    eventually(lambda: len(backends(conn)) == 4)
    lost = set(backends(conn))
    conn.execute("SELECT pg_terminate_backend(p) FROM unnest(%s::int[]) p", [list(lost)])
    conn.commit()
    eventually(lambda: len(back := set(backends(conn))) == 4 and not back & lost)
    gate.touch()
    eventually(lambda: count(conn, JOBS) == 0)
    assert [e.attempt for e in fleet.effects.all("start")] == [1]
    assert count(conn, ACKED) == 1
    assert "lost on" not in worker.log + other.log


def test_each_connection_of_a_worker_is_replaced_and_jobs_are_picked_up_meanwhile(
    fleet: Fleet, conn: Connection
) -> None:
    fleet.start()
    eventually(lambda: len(backends(conn)) == 2)
    for n, pid in enumerate(backends(conn)):
        conn.execute("SELECT pg_terminate_backend(%s)", [pid])
        every.work.enqueue(conn, Work(n=n))
        conn.commit()
        fleet.effects.wait("end", n + 1, timeout=15)
        eventually(lambda pid=pid: len(back := backends(conn)) == 2 and pid not in back)  # type: ignore[misc]


@pytest.mark.parametrize("delivered", [True, False], ids=["after the commit", "before the commit"])
def test_an_ack_whose_answer_was_lost_is_repeated(
    fleet: Fleet, conn: Connection, dsn: str, delivered: bool
) -> None:
    gate = fleet.gate("open")
    conn.execute("ALTER TABLE pgqueue.job ALTER COLUMN id RESTART WITH 987654321")
    every.work.enqueue(conn, Work(n=1, gate=str(gate)))
    conn.commit()
    with Proxy(dsn) as proxy:
        fleet.dsn = proxy.dsn
        worker = fleet.start()
        fleet.effects.wait("start")
        proxy.cut(b"{987654321}", b"COMMIT", delivered=delivered)
        gate.touch()
        assert proxy.cuts.wait(10)
        worker.says("claim loop works again")
        eventually(lambda: count(conn, JOBS) == 0)
        assert count(conn, ACKED) == 1
        assert [e.attempt for e in fleet.effects.all("start")] == [1]
        assert "lost on" not in worker.log
        every.work.enqueue(conn, Work(n=2))  # nothing is left in hand that would keep a slot
        conn.commit()
        fleet.effects.wait("end", 2)
        assert worker.stop() == 0


def test_hostile_settings_of_the_database_harm_nobody(fleet: Fleet, conn: Connection, server: Server) -> None:
    name = psycopg.sql.Identifier(conn.info.dbname)
    with server.admin() as admin:
        for setting in (
            "statement_timeout = '500ms'",
            "idle_in_transaction_session_timeout = '1s'",
            "default_transaction_isolation = 'serializable'",
            "lock_timeout = '200ms'",
        ):
            admin.execute(psycopg.sql.SQL("ALTER DATABASE {} SET " + setting).format(name))
    every.work.enqueue_many(conn, [Work(n=n, seconds=0.01, fails=int(n % 10 == 0)) for n in range(100)])
    every.awaits.using(key="k").enqueue_many(conn, [Work(n=n) for n in range(100, 120)])
    every.work.enqueue(conn, Work(n=120, seconds=1.5))
    conn.commit()
    one, other = fleet.start(), fleet.start()
    eventually(lambda: count(conn, JOBS) == 0, 20)
    assert sorted(fleet.effects.ns("end")) == list(range(121))
    assert " loop: " not in one.log + other.log
    assert len(fleet.effects.all("start")) == 131


@pytest.fixture
def own(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Embedded]:
    """Give a server that may be killed, with the settings of the parameter if there are some; the fleet works on it."""
    try:
        server = Embedded(settings=FAST | getattr(request, "param", {}))
        server.start()
    except EmbeddedUnavailable as error:
        pytest.skip(f"server: {error}")
    with server:
        fleet.dsn = server.dsn()
        upgrade(fleet.dsn)
        yield server


def test_every_job_ends_though_postgres_crashes_under_load(fleet: Fleet, own: Embedded) -> None:
    with psycopg.connect(fleet.dsn) as conn:
        every.work.enqueue_many(conn, [Work(n=n, seconds=0.005) for n in range(600)])
        every.work.using(max_attempts=1).enqueue_many(conn, [Work(n=n, fails=99) for n in range(600, 610)])
        every.awaits.using(key="k").enqueue_many(conn, [Work(n=n, seconds=0.005) for n in range(700, 750)])
    workers = [fleet.start("--visibility=2s"), fleet.start("--visibility=2s")]
    for place in (100, 300):
        fleet.effects.wait("end", place)
        own.restart(immediate=True)
    with psycopg.connect(fleet.dsn) as conn:
        eventually(lambda: count(conn, JOBS) == 0, 40)
        assert count(conn, "SELECT count(*) FROM pgqueue.dead_job") == 10
        assert count(conn, ACKED) == 650
    assert set(fleet.effects.ns("end")) == {*range(600), *range(700, 750)}
    for worker in workers:
        assert worker.process.poll() is None
        assert len(trouble(worker)) < 30, worker.log
        assert "Traceback" not in worker.log
        assert worker.stop() == 0


@pytest.mark.parametrize("own", [{"wal_writer_delay": "10s"}], indirect=True, ids=["slow log writer"])
def test_a_job_in_hand_is_not_begun_again_where_a_crash_of_postgres_undid_its_claim(
    fleet: Fleet, own: Embedded
) -> None:
    """A claim is committed without waiting for the disk: its worker makes it again before it claims anything else."""
    gate = fleet.gate("open")
    fleet.start("--concurrency=16")
    for n in range(1, 6):
        with psycopg.connect(fleet.dsn) as conn:
            every.work.enqueue(conn, Work(n=n, gate=str(gate)))
        eventually(lambda n=n: n in fleet.effects.ns("start"), look=0.001)  # type: ignore[misc]
        own.restart(immediate=True)
    with psycopg.connect(fleet.dsn) as conn:
        every.work.enqueue(conn, Work(n=6))
        conn.commit()
        fleet.effects.wait("end")
        gate.touch()
        eventually(lambda: count(conn, JOBS) == 0)
        assert count(conn, ACKED) == 6
    assert fleet.effects.ns("start") == [1, 2, 3, 4, 5, 6]


def test_workers_wait_for_a_database_that_is_away_and_tell_the_health_check(
    fleet: Fleet, own: Embedded, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    health = tmp_path / "healthy"

    def answer() -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except urllib.error.URLError:
            return 0  # the port opens a moment after the start

    gate = fleet.gate("open")
    with psycopg.connect(fleet.dsn) as conn:
        every.work.enqueue(conn, Work(n=1, gate=str(gate)))
    busy = fleet.start("--concurrency=1")
    fleet.effects.wait("start")
    idle = fleet.start(
        *("--visibility=3s", "--concurrency=1"),
        *(f"--health-port={port}", "--health-host=127.0.0.1", f"--health-file={health}"),
    )
    eventually(lambda: answer() == 200)
    assert health.exists()
    own.stop(immediate=True)
    gate.touch()  # the job of the busy worker ends while nobody can be told
    eventually(lambda: answer() == 503, timeout=30)
    eventually(lambda: not health.exists(), timeout=30)
    own.start()
    eventually(lambda: answer() == 200, timeout=30)
    eventually(health.exists, timeout=30)
    with psycopg.connect(fleet.dsn) as conn:
        eventually(lambda: count(conn, JOBS) == 0)
        every.work.enqueue(conn, Work(n=2))
        conn.commit()
        fleet.effects.wait("end", 2, timeout=30)
        assert count(conn, "SELECT count(*) FROM pgqueue.dead_job") == 0
    assert [(e.n, e.attempt) for e in fleet.effects.all("start")] == [(1, 1), (2, 1)]
    for worker in (busy, idle):
        assert len(trouble(worker)) <= 4, worker.log  # a line for each of the two loops, not one for each try
        worker.says("claim loop works again after")
        worker.says("heartbeat loop works again after")
        assert worker.stop() == 0
    assert not health.exists()


@pytest.mark.parametrize(
    ("app", "options", "says"),
    [
        (EVERY, [], "cannot reach Postgres at"),
        ("tests.process.apps.nothing:app", [], "cannot load tests.process.apps.nothing:app"),
        ("tests.process.apps.every:nothing", [], "cannot load tests.process.apps.every:nothing"),
        ("tests.process.apps.every:AT_ONCE", [], "not a pgqueue.App"),
        ("tests.process.apps.every", [], "is not module:name"),
        ("tests.process.apps.empty:app", [], "the app has no jobs"),
        (EVERY, ["--queues=a,a"], "names one twice"),
        (EVERY, ["--queues=a=x"], "should read NAME or NAME=SLOTS"),
        (EVERY, ["--queues= "], "name at least one"),
        (EVERY, ["--queues=a=8"], "leave none of 8"),
        (EVERY, ["--concurrency=0"], "concurrency: 0 is not between"),
        (EVERY, ["--visibility=1ms"], "visibility: 0.001 s is not between"),
    ],
)
def test_an_operator_s_mistake_is_one_line_and_status_1(app: str, options: list[str], says: str) -> None:
    result = CliRunner().invoke(command, [app, *options], env={"PGQUEUE_DSN": "host=/nowhere"})
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_the_same_from_a_shell(tmp_path: Path) -> None:
    worker = Fleet("host=/nowhere", tmp_path).launch()
    assert worker.wait() == 1
    assert worker.log.startswith("error: cannot reach Postgres at host=/nowhere")
    assert len(worker.log.splitlines()) == 1


@pytest.mark.parametrize(
    ("revision", "says"),
    [("pgqueue_0000", "run: pgqueue migrate"), ("pgqueue_9999", "upgrade pgqueue-relay here")],
)
def test_a_worker_refuses_a_schema_that_is_not_its_own(
    fleet: Fleet, conn: Connection, revision: str, says: str
) -> None:
    conn.execute("UPDATE pgqueue.alembic_version SET version_num = %s", [revision])
    conn.execute(
        "COMMENT ON TABLE pgqueue.alembic_version IS NULL"
    )  # which named the older code that it serves
    conn.commit()
    worker = fleet.launch()
    assert worker.wait() == 1
    (line,) = worker.log.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_a_worker_says_how_to_migrate(fleet: Fleet, empty_dsn: str) -> None:
    fleet.dsn = empty_dsn
    worker = fleet.launch()
    assert worker.wait() == 1
    (line,) = worker.log.splitlines()
    assert line.startswith("error: ")
    assert "run: pgqueue migrate" in line


def test_several_processes_do_not_repeat_an_operator_s_mistake_for_ever(fleet: Fleet, empty_dsn: str) -> None:
    fleet.dsn = empty_dsn
    worker = fleet.launch("--processes=2")
    assert worker.wait() == 1
    lines = worker.log.splitlines()
    assert len(lines) <= 2
    assert all("run: pgqueue migrate" in line for line in lines)
