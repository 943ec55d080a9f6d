"""`pgqueue depth`, `queue`, `workers`, `sync` and `doctor`: for people as aligned text, for scripts as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import sql

from pgqueue.cli import main
from pgqueue.connection import execute
from pgqueue.depth import sample
from pgqueue.heartbeat import register
from tests.factories import MINUTE, enqueue
from tests.process.apps import every
from tests.process.apps.every import Work
from tests.process.apps.fleet import Fleet
from tests.server import Connection, Server
from tests.waiting import eventually

Run = Callable[..., Result]
COMMANDS = [
    *(["depth"], ["queue", "list"], ["workers"], ["doctor"], ["jobs", "list"], ["dead", "list"]),
    *(["sync", "tests.process.apps.every:app"], ["queue", "pause", "x"], ["jobs", "show", "1"]),
]


@pytest.fixture
def run(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Give a way to run `pgqueue` in this process."""
    monkeypatch.setenv("PGQUEUE_DSN", dsn)

    def invoke(*argv: object, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [str(word) for word in argv])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return invoke


def table(result: Result) -> list[list[str]]:
    """Split the lines of a table, without its head."""
    return [line.split() for line in result.stdout.splitlines()[1:]]


def test_depth_counts_where_nobody_samples_and_reads_the_sample_else(run: Run, conn: Connection) -> None:
    assert run("depth").stdout == "no jobs\n"
    enqueue(conn, 3)
    enqueue(conn, delay=MINUTE)
    conn.commit()
    counted = run("depth")
    assert table(counted)[0][:5] == ["default", "3", "1", "0", "0"]
    assert counted.stderr == "counted now: no worker samples 'default'\n"
    execute(conn, sample(["default"]))
    enqueue(conn, 5)
    conn.commit()
    sampled = run("depth")
    assert (table(sampled)[0][:5], sampled.stderr) == (["default", "3", "1", "0", "0"], "")
    assert table(run("depth", "--exact"))[0][1] == "8"
    (row,) = json.loads(run("depth", "--json").stdout)
    assert (row["queue"], row["ready"], row["delayed"], row["capped"]) == ("default", 3, 1, False)


def test_depth_names_jobs_that_no_worker_knows_with_the_commands_for_them(run: Run, conn: Connection) -> None:
    enqueue(conn, 2, name="it's new")
    execute(conn, sample(["default"]))
    execute(
        conn,
        register(nonce=1, host="h", pid=1, version="1", queues=["default"], names=["work"], concurrency=8),
    )
    conn.commit()
    said = run("depth").stderr
    assert said.startswith(
        "2 jobs \"it's new\" in queue 'default' wait for a worker that knows them: start one, or "
    )
    assert "pgqueue jobs move --name 'it'\"'\"'s new' --queue default --to QUEUE" in said
    assert "pgqueue jobs cancel --name 'it'\"'\"'s new' --queue default" in said
    assert (
        run("jobs", "cancel", "--name", "it's new", "--queue", "default", "--yes").stdout
        == "cancelled 2 jobs\n"
    )
    assert run("depth").stderr == ""


def test_the_last_sample_of_a_queue_that_nobody_serves_any_more_is_not_shown_as_its_depth(
    run: Run, conn: Connection
) -> None:
    enqueue(conn, 3, queue="gone")
    execute(conn, sample(["gone"]))
    conn.execute("UPDATE pgqueue.depth_sample SET at = now() - interval '31 s', in_flight = 2")
    conn.commit()
    assert table(run("depth"))[0][:4] == ["gone", "3", "0", "0"]  # counted
    conn.execute("DELETE FROM pgqueue.job")
    conn.commit()
    assert run("depth").stdout == "no jobs\n"
    (queue,) = json.loads(run("queue", "list", "--json").stdout)
    assert (queue["name"], queue["in_flight"], queue["ready"]) == ("gone", 0, 0)


def test_a_queue_that_only_has_jobs_is_listed_too(run: Run, conn: Connection) -> None:
    enqueue(conn, 2, queue="stray")
    conn.commit()
    (row,) = json.loads(run("queue", "list", "--json").stdout)
    assert (row["name"], row["ready"], row["workers"], row["paused"]) == ("stray", 2, 0, False)
    run("queue", "pause", "stray")
    assert table(run("queue", "list"))[0][:7] == ["stray", "yes", "0", "0", "0", "0", "2"]


def test_a_paused_queue_is_left_alone_until_it_is_resumed(run: Run, conn: Connection, fleet: Fleet) -> None:
    assert run("queue", "pause", "default").stderr == "warning: nothing else is known of a queue 'default'\n"
    fleet.start()
    every.work.enqueue(conn, Work(n=1))
    conn.commit()
    eventually(lambda: table(run("depth")) and table(run("depth"))[0][1:5] == ["0", "0", "0", "1"], 20)
    assert fleet.effects.all() == []
    (row,) = json.loads(run("queue", "list", "--json").stdout)
    assert (row["name"], row["paused"], row["workers"]) == ("default", True, 1)
    assert run("queue", "resume", "default").stdout == "resumed queue default\n"
    fleet.effects.wait("end")


def test_a_paused_job_type_is_left_alone_and_the_others_run(run: Run, conn: Connection, fleet: Fleet) -> None:
    run("sync", "tests.process.apps.every:app")
    assert run("queue", "pause", "--name", "work").stdout == "paused the jobs work\n"
    every.work.enqueue(conn, Work(n=1))
    every.payload_only.enqueue(conn, Work(n=2))
    conn.commit()
    fleet.start()
    fleet.effects.wait("end")
    assert fleet.effects.ns("end") == [2]
    assert "work" in run("queue", "list").stdout
    run("queue", "resume", "--name", "work")
    fleet.effects.wait("end", 2)


def test_a_mistake_is_one_line(run: Run, conn: Connection) -> None:
    run("sync", "tests.process.apps.heeds:app")
    unknown = run("queue", "pause", "--name", "hedes", code=1).stderr
    assert unknown.endswith("has declared a job 'hedes' yet; did you mean 'heeds'?\n")
    assert "give the name of a queue" in run("queue", "pause", code=1).stderr
    assert "not both" in run("queue", "pause", "a", "--name", "b", code=1).stderr
    assert "not blank" in run("queue", "pause", " ", code=1).stderr
    assert "not blank" in run("queue", "pause", "x" * 10_240, code=1).stderr
    assert "is not module:name" in run("sync", "nonsense", code=1).stderr
    assert "cannot load no.such:app" in run("sync", "no.such:app", code=1).stderr
    assert "is JobType, not a pgqueue.App" in run("sync", "tests.process.apps.heeds:heeds", code=1).stderr


def test_sync_writes_the_policies_without_a_worker(run: Run, conn: Connection) -> None:
    out = run("sync", "tests.process.apps.every:app").stdout
    assert "work\tqueue default\n" in out
    row = conn.execute(
        "SELECT timeout_s, max_attempts FROM pgqueue.job_type WHERE name = 'awaits-short'"
    ).fetchone()
    assert row is not None
    assert row[1] == 1
    assert conn.execute("SELECT count(*) FROM pgqueue.worker").fetchone() == (0,)


def test_workers_are_listed_with_what_they_serve(run: Run, fleet: Fleet) -> None:
    assert run("workers").stdout == "no workers\n"
    worker = fleet.start("--queues=mail,bulk", "--concurrency=3")
    (row,) = json.loads(run("workers", "--json").stdout)
    assert (row["pid"], row["queues"], row["concurrency"], row["overrun"], row["alive"]) == (
        worker.pid, ["mail", "bulk"], 3, 0, True,
    )  # fmt: skip
    line = run("workers").stdout.splitlines()[1]
    assert f":{worker.pid}  alive" in line
    assert "mail,bulk" in line
    assert worker.stop() == 0
    assert run("workers").stdout == "no workers\n"


def test_doctor_exits_1_on_a_problem_and_0_without(run: Run, conn: Connection, fleet: Fleet) -> None:
    enqueue(conn, name="work")
    conn.commit()
    told = run("doctor", code=1)
    lines = told.stdout.splitlines()
    assert any(line.startswith("ok       schema") for line in lines)
    place = next(i for i, line in enumerate(lines) if line.startswith("problem  jobs"))
    assert "1 jobs wait in queue 'default', which no worker serves" in lines[place]
    assert lines[place + 1].strip() == "-> start one: pgqueue-worker APP --queues default"
    found = json.loads(run("doctor", "--json", code=1).stdout)
    assert found["ok"] is False
    assert {"check": "schema", "level": "ok"}.items() <= found["findings"][0].items()
    fleet.start()
    eventually(lambda: json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)["ok"], 20)


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_a_database_without_the_schema_is_said_in_one_line(
    argv: list[str], empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGQUEUE_DSN", empty_dsn)
    result = CliRunner().invoke(main, argv)
    assert result.exit_code == 1
    said = result.stdout if argv == ["doctor"] else result.stderr
    assert len(said.splitlines()) == 1
    assert "has no pgqueue tables; run: pgqueue migrate" in said


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_a_server_that_is_not_there_is_said_in_one_line(
    argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGQUEUE_DSN", "postgresql://nobody:secret@127.0.0.1:1/none")
    result = CliRunner().invoke(main, argv)
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "error: cannot reach Postgres at postgresql://nobody:***@127.0.0.1:1/none"
    )
    assert len(result.stderr.splitlines()) == 1
    assert "secret" not in result.output


def test_a_role_without_rights_is_told_which_to_ask_for(
    server: Server, dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not server.can_create_roles():
        pytest.skip("the role of the tests may not create roles")
    role = f"{server.prefix}_reader"
    conn.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(sql.Identifier(role)))
    conn.execute("SELECT pgqueue.grant_role('reader', %s)", [role])
    conn.commit()
    try:
        monkeypatch.setenv("PGQUEUE_DSN", psycopg.conninfo.make_conninfo(dsn, user=role, password="x"))
        assert CliRunner().invoke(main, ["workers"]).exit_code == 0
        refused = CliRunner().invoke(main, ["dead", "list"])
        assert refused.exit_code == 1
        assert "pgqueue migrate --grant KIND=ROLE" in refused.stderr
    finally:
        conn.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
        conn.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))
        conn.commit()
