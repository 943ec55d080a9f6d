"""`pgqueue dead` shows what died, says what it would do before it does it, and survives being killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pgqueue import App
from pgqueue.cli import main
from tests.factories import Holder, enqueue
from tests.process.apps.fleet import Fleet
from tests.server import Connection
from tests.waiting import eventually

PGQUEUE = str(Path(sys.executable).with_name("pgqueue"))
EVERY = "tests.process.apps.every:app"
LETTER = """
INSERT INTO pgqueue.dead_job (id, queue, name, priority, attempt, lost, payload, enqueued_at, reason, error_type, error,
  traceback, worker, trace_id, first_attempt_at, last_attempt_at, attempts)
SELECT nextval('pgqueue.job_id_seq'), %(queue)s::text, %(name)s::text, 5, 2, 0, %(payload)s::json, now(), 'exhausted',
  %(error_type)s::text, %(error)s::text, %(traceback)s::text, 'host:7', 'trace-9', now(), now(),
  '[{"attempt": 1, "outcome": "retry", "started_at": "2026-03-01T00:00:00+00:00", "at": "2026-03-01T00:00:01+00:00",
     "worker": "host:6", "error_type": "KeyError", "error": "first", "traceback": "Traceback 1"}]'
RETURNING id
"""


Run = Callable[..., Result]


@pytest.fixture
def run(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Give a way to run `pgqueue` in this process."""
    monkeypatch.setenv("PGQUEUE_DSN", dsn)

    def invoke(*argv: object, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [str(word) for word in argv])
        assert result.exit_code == code, (result.output, result.exception)
        assert "Traceback (most" not in result.stderr
        return result

    return invoke


def letter(conn: Connection, **given: Any) -> int:
    """Write a dead letter."""
    usual = {
        "queue": "default", "name": "work", "payload": '{"n": 1}', "error_type": "KeyError", "error": "'x'",
        "traceback": "Traceback 2\n  line",
    }  # fmt: skip
    row = conn.execute(LETTER, usual | given).fetchone()
    conn.commit()
    assert row
    return int(str(row[0]))


def places(conn: Connection) -> tuple[int, int]:
    """Count live jobs and dead letters."""
    row = conn.execute(
        "SELECT (SELECT count(*) FROM pgqueue.job), (SELECT count(*) FROM pgqueue.dead_job)"
    ).fetchone()
    conn.commit()
    assert row
    return int(str(row[0])), int(str(row[1]))


def test_list_groups_by_error_type_for_people_and_scripts(run: Run, conn: Connection) -> None:
    assert run("dead", "list").stdout == "no dead letters\n"
    letter(conn)
    newest = letter(conn, queue="mail", name="send")
    letter(conn, error_type="Odd", error="two\nlines")
    head, first, second = run("dead", "list").stdout.splitlines()
    assert head.split("  ")[0] == "ERROR TYPE"
    assert {line.split()[0]: line.split()[1] for line in (first, second)} == {"KeyError": "2", "Odd": "1"}
    assert r"two\nlines" in first + second
    rows = {g["error_type"]: g for g in json.loads(run("dead", "list", "--json").stdout)}
    assert rows["KeyError"] | {"first_seen": 0, "last_seen": 0} == {
        "error_type": "KeyError", "jobs": 2, "first_seen": 0, "last_seen": 0, "reasons": ["exhausted"],
        "queues": ["default", "mail"], "names": ["send", "work"], "sample": newest, "error": "'x'",
    }  # fmt: skip
    each = run("dead", "list", "--each", "--queue", "mail").stdout.splitlines()
    assert [line.split()[0] for line in each] == ["ID", str(newest)]


def test_what_a_row_holds_never_reaches_the_terminal_as_a_command(run: Run, conn: Connection) -> None:
    """rq-dashboard 526, flower 594: what a job holds was run by whoever looked at it."""
    evil = "\x1b]0;owned\x07\x1b[2J\u202e<script>"
    job_id = letter(
        conn, error_type=evil, error=evil, traceback=evil, name=evil, payload=json.dumps({"a": evil})
    )
    for argv in (
        ("list",),
        ("list", "--each"),
        ("show", job_id),
        ("list", "--json"),
        ("show", job_id, "--json"),
    ):
        out = run("dead", *argv).stdout
        assert not {"\x1b", "\x07", "\u202e"} & set(out) or "--json" in argv
        assert "\x1b" not in out
    assert json.loads(run("dead", "show", job_id, "--json").stdout)["payload"] == {"a": evil}


def test_show_tells_payload_tracebacks_and_every_attempt(run: Run, conn: Connection) -> None:
    job_id = letter(conn)
    out = run("dead", "show", job_id).stdout
    for part in ("KeyError", "host:7", "trace-9", "exhausted", '"n": 1', "Traceback 1", "Traceback 2"):
        assert part in out
    assert out.index("attempt 1: retry, 2026-03-01 00:00:00Z to ") < out.index("last attempt\n")
    shown = json.loads(run("dead", "show", job_id, "--json").stdout)
    assert (shown["payload"], shown["history"][0]["worker"]) == ({"n": 1}, "host:6")
    missing = run("dead", "show", job_id + 1, code=1).stderr
    assert missing.startswith(f"error: there is no dead letter {job_id + 1}")


def test_replay_says_first_and_does_with_yes(run: Run, conn: Connection) -> None:
    made = [letter(conn) for _ in range(3)]
    letter(conn, error_type="Odd")
    assert run("dead", "replay", "--error-type", "KeyError").stdout == (
        "would replay 3 dead letters; nothing was done: add --yes\n"
    )
    assert run("dead", "replay", "--error-type", "KeyError", "--limit", 2).stdout == (
        "would replay the first 2 of 3 dead letters; nothing was done: add --yes\n"
    )
    assert places(conn) == (0, 4)
    assert run("dead", "replay", "--error-type", "KeyError", "--limit", 2, "--yes").stdout == (
        "replayed 2 of 3 dead letters; 1 are left: run it again, or raise --limit\n"
    )
    assert run("dead", "replay", made[2], "--yes").stdout == "replayed 1 of 1 dead letters\n"
    assert places(conn) == (3, 1)
    assert run("dead", "replay", "--name", "nothing", "--yes").stdout == "no dead letters match\n"
    nothing = run("dead", "replay", "--name", "nothing", "--yes", "--json").stdout
    assert json.loads(nothing) == {"found": 0, "replayed": []}
    assert run("dead", "replay", "--name", "nothing").stdout == "no dead letters match\n"
    done = json.loads(run("dead", "replay", "--all", "--yes", "--rate", 0, "--json").stdout)
    assert (done["found"], len(done["replayed"])) == (1, 1)


def test_discard_says_first_and_does_with_yes(run: Run, conn: Connection) -> None:
    one, _ = letter(conn, payload='{"order": {"id": 7}}'), letter(conn)
    assert "would discard 1 dead letters" in run("dead", "discard", "--where", "order.id=7").stdout
    assert places(conn) == (0, 2)
    assert (
        run("dead", "discard", "--where", "order.id=7", "--yes").stdout == "discarded 1 of 1 dead letters\n"
    )
    assert f"none of these is a dead letter: {one}" in run("dead", "discard", one, "--yes", code=1).stderr
    assert json.loads(run("dead", "discard", "--since", "1h", "--json").stdout) == {
        "found": 1,
        "would_discard": 1,
    }


class Clock:
    """A clock that goes on by itself only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("verb", "done"), [("replay", "replayed"), ("discard", "discarded")])
def test_without_options_a_hundred_go_at_fifty_a_second(
    run: Run, conn: Connection, monkeypatch: pytest.MonkeyPatch, verb: str, done: str
) -> None:
    """synapse 13929: everything that had failed came back at once, and what had been mended fell over again."""
    clock = Clock()
    monkeypatch.setattr("pgqueue.cli.dead.time", clock)
    for _ in range(120):
        letter(conn)
    said = run("dead", verb, "--all", "--yes").stdout
    assert said == f"{done} 100 of 120 dead letters; 20 are left: run it again, or raise --limit\n"
    assert clock.now == pytest.approx(100 / 50 - 10 / 50)  # ten at a time, the first ten at once
    run("dead", verb, "--all", "--yes", "--rate", 0)
    assert clock.now == pytest.approx(100 / 50 - 10 / 50)
    assert places(conn)[1] == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["replay"], "name ids or a filter"),
        (["discard", "--yes"], "name ids or a filter"),
        (["replay", "7", "--all"], "--all goes without ids and filters"),
        (["replay", "x"], "'x' is no job id"),
        (["replay", "--all", "--yes", "--rate", "nan"], "nan is no rate"),
        (["discard", "--all", "--yes", "--rate", "inf"], "inf is no rate"),
        (["replay", "--where", "order"], "'order' is not PATH=VALUE"),
        (["list", "--since", "yesterday"], "neither a moment"),
        (["replay", "--name", "x", "--payload", "{}"], "goes with the id of one job"),
        (["replay", "1", "2", "--payload", "{}"], "goes with the id of one job"),
        (["replay", "987654", "--payload", "{}"], "there is no dead letter 987654"),
    ],
)
def test_a_mistake_is_one_line_and_does_nothing(
    run: Run, conn: Connection, argv: list[str], said: str
) -> None:
    letter(conn)
    result = CliRunner().invoke(main, ["dead", *argv])
    assert result.exit_code in (1, 2)
    assert said in " ".join(result.stderr.split())
    assert places(conn) == (0, 1)


def test_an_edited_payload_is_checked_before_it_goes_back(run: Run, conn: Connection, tmp_path: Path) -> None:
    job_id = letter(conn, payload='{"n": "many"}')
    bad = ["not json", '{"n": NaN}', '{"n": "\\u0000"}', '{"n": "\\ud800"}', "9" * 1_100_000]
    for text in bad[:4]:
        assert "payload of 'work'" in run("dead", "replay", job_id, "--payload", text, code=1).stderr
    file = tmp_path / "payload.json"
    file.write_text(f"[{bad[4]}]")
    assert "payload of 'work'" in run("dead", "replay", job_id, "--payload", f"@{file}", code=1).stderr
    assert "cannot read" in run("dead", "replay", job_id, "--payload", "@/nowhere", code=1).stderr
    wrong = run("dead", "replay", job_id, "--payload", '{"n": "x"}', "--app", EVERY, "--yes", code=1)
    assert "does not fit its handler" in wrong.stderr
    assert places(conn) == (0, 1)
    unchecked = run("dead", "replay", job_id, "--payload", '{"n": 2}')
    assert "not checked against the handler's type; give --app" in unchecked.stderr
    file.write_text('{"n": 3}')
    run("dead", "replay", job_id, "--payload", f"@{file}", "--app", EVERY, "--yes")
    assert conn.execute("SELECT payload::text FROM pgqueue.job").fetchone() == ('{"n": 3}',)
    conn.commit()


def test_a_job_that_failed_for_good_runs_after_its_payload_is_mended(
    run: Run, conn: Connection, fleet: Fleet
) -> None:
    app = App()

    @app.job("asks")
    def asks(answer: str) -> None: ...

    ref = asks.enqueue(conn, "permanent")
    conn.commit()
    fleet.start()
    eventually(lambda: places(conn) == (0, 1), 15)
    run("dead", "replay", ref.id, "--payload", '"fine"', "--app", EVERY, "--yes")
    fleet.effects.wait("end")
    eventually(lambda: places(conn) == (0, 0), 15)
    assert [(e.note, e.attempt) for e in fleet.effects.all("start")] == [("permanent", 1), ("fine", 1)]


@pytest.fixture
def operators(dsn: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Give a way to start `pgqueue` as a process of its own; whatever still runs is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [PGQUEUE, *argv],
            env=os.environ | {"PGQUEUE_DSN": dsn},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def test_a_killed_replay_loses_no_job_and_the_next_one_ends_it(
    run: Run, conn: Connection, operators: Callable[..., subprocess.Popen[str]]
) -> None:
    """The sixth fault of the usual design, with a real kill."""
    made = [letter(conn) for _ in range(60)]
    process = operators("dead", "replay", "--all", "--yes", "--rate", "40")
    eventually(lambda: places(conn)[0] >= 16, 20)
    process.kill()
    process.wait(10)
    live, gone = places(conn)
    assert live + gone == 60
    assert gone > 0
    run("dead", "replay", "--all", "--yes", "--rate", "0")
    rows = conn.execute("SELECT id FROM pgqueue.job ORDER BY id").fetchall()
    conn.commit()
    assert [row[0] for row in rows] == made


def test_a_replay_that_is_interrupted_says_how_far_it_came(
    conn: Connection, operators: Callable[..., subprocess.Popen[str]]
) -> None:
    for _ in range(60):
        letter(conn)
    process = operators("dead", "replay", "--all", "--yes", "--rate", "20")
    eventually(lambda: places(conn)[0] >= 8, 20)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert process.returncode == 1
    live, _ = places(conn)
    assert f"stopped: replayed {live} of 60" in said
    assert "Traceback" not in said


def test_two_operators_at_once_replay_each_job_once(
    conn: Connection, operators: Callable[..., subprocess.Popen[str]]
) -> None:
    for _ in range(80):
        letter(conn)
    pair = [operators("dead", "replay", "--all", "--yes", "--rate", "200", "--json") for _ in range(2)]
    done = [json.loads(one.communicate(timeout=30)[0])["replayed"] for one in pair]
    assert not set(done[0]) & set(done[1])
    assert places(conn) == (len(done[0]) + len(done[1]), 80 - len(done[0]) - len(done[1]))
    counted = conn.execute("SELECT sum(n) FROM pgqueue.tally WHERE outcome = 'replayed'").fetchone()
    conn.commit()
    assert counted == (len(done[0]) + len(done[1]),)


def test_a_job_that_dies_again_at_once_is_replayed_once(run: Run, conn: Connection, fleet: Fleet) -> None:
    for _ in range(5):
        letter(conn, name="asks", payload='"permanent"')
    fleet.start()
    assert run("dead", "replay", "--all", "--yes", "--rate", "10").stdout.startswith("replayed 5 of 5")
    eventually(lambda: places(conn) == (0, 5), 15)
    assert [e.attempt for e in fleet.effects.all("start")] == [1] * 5


def test_a_live_job_is_no_dead_letter(run: Run, dsn: str, conn: Connection) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    with Holder(dsn) as holder:
        holder.claim()
    assert "none of these is a dead letter" in run("dead", "discard", job_id, "--yes", code=1).stderr
    assert places(conn) == (1, 0)
