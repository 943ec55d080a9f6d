"""outbox-relay replay and hold as an operator runs them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import psycopg
import pytest
from click.testing import CliRunner, Result

from relay.cli import main
from tests.db.relaying import cleared
from tests.server import Connection, Server
from tests.waiting import eventually

COUNT = 300


@pytest.fixture(scope="module")
def shop(server: Server) -> Iterator[str]:
    """Give the DSN of one database for the whole module."""
    name = server.migrated()
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def dsn(shop: str) -> str:
    """Give that database with some history."""
    with psycopg.connect(cleared(shop), autocommit=True) as conn:
        conn.execute("TRUNCATE pgqueue.outbox_replay")
        conn.execute(
            "INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload, published_at)"
            " SELECT 'a' || n %% 5, 'order.placed', jsonb_build_object('n', n), now() FROM generate_series(1, %s) n",
            [COUNT],
        )
    return shop


@pytest.fixture
def watch(dsn: str) -> Iterator[Connection]:
    """Give an autocommit connection."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


def run(dsn: str, *args: str) -> Result:
    """Run a command to its end, in this process."""
    return CliRunner().invoke(main, args, env={"PGQUEUE_DSN": dsn}, prog_name="outbox-relay")


def copied(watch: Connection) -> list[object]:
    """Return the numbers of the copies in the order of their ids."""
    rows = watch.execute(
        "SELECT payload->'n' FROM pgqueue.outbox WHERE headers ? 'replay_of' ORDER BY id"
    ).fetchall()
    return [row[0] for row in rows]


def test_without_yes_it_only_says_what_it_would_do(dsn: str, watch: Connection) -> None:
    said = run(dsn, "replay", "--type", "order.*")
    assert f"would publish {COUNT} events again" in said.stdout
    assert "--yes" in said.stdout
    assert json.loads(run(dsn, "replay", "--all", "--json").stdout)["found"] == COUNT
    assert "no published events match" in run(dsn, "replay", "--type", "order").stdout
    assert not copied(watch)
    assert watch.execute("SELECT count(*) FROM pgqueue.outbox_replay").fetchone() == (0,)


def test_with_yes_everything_is_in_the_outbox_again(dsn: str, watch: Connection) -> None:
    done = run(dsn, "replay", "--aggregate", "a1", "--since", "1h", "--rate", "0", "--yes", "--json")
    assert json.loads(done.stdout) == {"replay": json.loads(done.stdout)["replay"], "found": 60, "copied": 60}
    assert copied(watch) == [n for n in range(1, COUNT + 1) if n % 5 == 1]


def test_killed_it_goes_on_where_it_was_and_copies_nothing_twice(dsn: str, watch: Connection) -> None:
    code = "from relay.cli import main; main()"
    for turn in range(3):
        more = ["--resume", _id(watch)] if turn else ["--all"]
        process = subprocess.Popen(
            [sys.executable, "-c", code, "replay", "--rate", "10", "--yes", *more],
            env={k: v for k, v in os.environ.items() if not k.startswith(("PG", "OUTBOX_"))}
            | {"PGQUEUE_DSN": dsn},
            stdout=subprocess.DEVNULL,
        )
        before = len(copied(watch))
        eventually(lambda before=before: len(copied(watch)) > before, 20)  # type: ignore[misc]
        process.kill()
        process.wait(60)
    again = run(dsn, "replay", "--all", "--yes")
    assert again.exit_code == 1
    assert f"--resume {_id(watch)}" in again.stderr
    assert run(dsn, "replay", "--resume", _id(watch), "--rate", "0", "--yes").exit_code == 0
    assert copied(watch) == list(range(1, COUNT + 1))


class Clock:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let the time pass."""
        self.now += seconds


@pytest.mark.parametrize(("rate", "seconds"), [("100", 3.0), ("500", 0.6), ("2.5", 120.0), ("0", 0.0)])
def test_no_more_events_a_second_are_copied_than_asked_for(
    dsn: str, watch: Connection, monkeypatch: pytest.MonkeyPatch, rate: str, seconds: float
) -> None:
    clock = Clock()
    monkeypatch.setattr("relay.cli.replay.time", clock)
    assert run(dsn, "replay", "--all", "--rate", rate, "--yes").exit_code == 0
    assert len(copied(watch)) == COUNT
    # All of them but the last batch, which nothing follows, were waited for.
    assert clock.now == pytest.approx(seconds, abs=0.45 if float(rate) >= 5 else 0.01)


def test_a_terminal_sees_how_far_it_is(dsn: str, watch: Connection) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from relay.cli import main; main()",
            "replay",
            "--all",
            "--rate",
            "0",
            "--yes",
        ],
        env={k: v for k, v in os.environ.items() if not k.startswith(("PG", "OUTBOX_"))}
        | {"PGQUEUE_DSN": dsn},
        stdout=subprocess.PIPE,
        stderr=slave,
    )
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal ends with its last writer
        while part := os.read(master, 65_536):
            shown += part
    os.close(master)
    out, _ = process.communicate(timeout=60)
    assert b"replay" in shown
    assert b"100%" in shown
    assert f"{COUNT} events are in the outbox again" in out.decode()


def test_new_begins_from_the_start(dsn: str, watch: Connection) -> None:
    watch.execute("INSERT INTO pgqueue.outbox_replay (event_type, done_to, upto) VALUES ('order.*', 17, 40)")
    assert run(dsn, "replay", "--type", "order.*", "--rate", "0", "--yes", "--new").exit_code == 0
    assert copied(watch) == list(range(1, COUNT + 1))
    assert watch.execute("SELECT count(*) FROM pgqueue.outbox_replay WHERE ended_at IS NULL").fetchone() == (
        0,
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "--all"),
        (["--all", "--type", "x"], "without filters"),
        (["--resume", "999"], "no replay 999"),
        (["--resume", "1", "--type", "x"], "without filters"),
    ],
)
def test_a_wrong_request_is_one_line(dsn: str, args: list[str], said: str) -> None:
    done = run(dsn, "replay", *args)
    assert done.exit_code == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_held_aggregate_waits_until_it_is_retried(dsn: str, watch: Connection) -> None:
    watch.execute("INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload) VALUES ('x', 'e', '{}')")
    held = run(dsn, "hold", "x", "--why", "the warehouse counts its stock")
    id_ = held.stdout.split("\t")[0]
    assert "the warehouse counts" in run(dsn, "parked").stdout
    assert run(dsn, "retry", id_).exit_code == 0
    assert run(dsn, "parked").stdout == ""
    nothing = run(dsn, "hold", "nobody")
    assert nothing.exit_code == 1
    assert "no unpublished event" in nothing.stderr


def _id(watch: Connection) -> str:
    row = watch.execute("SELECT max(id) FROM pgqueue.outbox_replay").fetchone()
    assert row is not None
    return str(row[0])
