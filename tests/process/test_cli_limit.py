"""`pgqueue limit`: see and change limits while jobs run; what makes no sense is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pgqueue.cli import main
from pgqueue.connection import execute
from pgqueue.declare import Policy, declare
from pgqueue.limits import limits
from tests.factories import enqueue
from tests.server import Connection

Run = Callable[..., Result]


@pytest.fixture
def run(dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Give a way to run `pgqueue` in this process, on a database where two job types are declared."""
    monkeypatch.setenv("PGQUEUE_DSN", dsn)
    execute(conn, declare([Policy(name="export", limit=2), Policy(name="sync")]))
    conn.commit()

    def invoke(*argv: object, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [str(word) for word in argv])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return invoke


def test_limits_of_jobs_and_queues_are_set_listed_and_lifted(run: Run, conn: Connection) -> None:
    assert run("limit", "job", "export", "--limit", 5).stdout == "jobs export: limit 5\n"
    said = run("limit", "job", "export", "--rate", "90/min").stdout
    assert said == "jobs export: limit 5, rate 1.5/s\n"
    said = run("limit", "job", "sync", "--key-limit", 3, "--key-rate", "10/h").stdout
    assert said == "jobs sync: key limit 3, key rate 10/h\n"
    said = run("limit", "queue", "mail", "--limit", 50, "--rate", "100/min", "--burst", 20).stdout
    assert said == "queue mail: limit 50, rate 1.66667/s, burst 20\n"
    head, *rows = [line.split() for line in run("limit", "list").stdout.splitlines()]
    assert head[0] == "KIND"
    assert [row[:2] for row in rows] == [["job", "export"], ["job", "sync"], ["queue", "mail"]]
    listed = json.loads(run("limit", "list", "--json").stdout)
    assert [(f["name"], f["limit"], f["key_limit"], f["changed"]) for f in listed] == [
        ("export", 5, None, True),
        ("sync", None, 3, True),
        ("mail", 50, None, False),
    ]
    assert run("limit", "queue", "mail", "--limit", 0, "--rate", 0).stdout == "queue mail: no limits\n"
    assert run("limit", "job", "sync", "--key-limit", 0, "--key-rate", 0).stdout == "jobs sync: no limits\n"
    assert "pgqueue sync" in run("limit", "job", "export", "--as-declared").stdout
    assert [(f.name, f.changed) for f in execute(conn, limits())] == [("export", False)]


@pytest.mark.parametrize(
    ("argv", "code", "match"),
    [
        (["job", "export"], 1, "give --limit"),
        (["job", "export", "--limit", "3", "--as-declared"], 1, "--as-declared alone"),
        (["job", "export", "--limit", "-1"], 1, "limit"),
        (["job", "export", "--key-limit", "2"], 1, "not both"),
        (["job", "export", "--rate", "abc/min"], 2, "is not a rate"),
        (["job", "exprot", "--limit", "3"], 1, "did you mean 'export'"),
        (["queue", "mail"], 1, "give --limit"),
        (["queue", "mail", "--burst", "0"], 1, "burst"),
        (["queue", "mail", "--burst", "5"], 1, "goes with a rate"),
        (["queue", "mail", "--rate", "0.0000001/h"], 1, "rate"),
        (["queue", " ", "--limit", "1"], 1, "queue"),
    ],
)
def test_what_makes_no_sense_is_one_line(run: Run, argv: list[str], code: int, match: str) -> None:
    result = run("limit", *argv, code=code)
    assert match in result.output
    assert "Traceback" not in result.output


def test_a_limit_of_jobs_that_have_keys_is_one_line(
    run: Run, conn: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job_id,) = enqueue(conn, 1, name="sync", key="acme")
    conn.commit()
    said = f"jobs of sync have, such as job {job_id}"
    assert said in run("limit", "job", "sync", "--limit", 3, code=1).stderr
    (tmp_path / "later.py").write_text(
        "from pgqueue import App\napp = App()\n@app.job('sync', limit=3)\ndef sync(n: int) -> None: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    assert said in run("sync", "later:app", code=1).stderr


def test_jobs_of_a_key_with_a_limit_are_shown_and_found_by_the_key_that_was_given(
    run: Run, conn: Connection
) -> None:
    run("limit", "job", "sync", "--key-limit", 3)
    (job_id,) = enqueue(conn, 1, name="sync", key="acme")
    enqueue(conn, 1, name="sync", key="other")
    conn.commit()
    head, *rows = [line.split() for line in run("jobs", "list", "--key", "acme").stdout.splitlines()]
    assert [(row[0], row[-1]) for row in rows] == [(str(job_id), "acme")]
    assert "acme" in run("jobs", "show", job_id).stdout
    assert "@sync" not in run("jobs", "show", job_id).stdout
    assert head
