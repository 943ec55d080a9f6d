"""outbox-relay as an operator runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner, Result

from relay import Outbox
from relay.cli import main
from relay.cli._service import command as service
from tests.db.relaying import cleared
from tests.server import Connection, Server
from tests.sinks.brokers import free_port
from tests.sinks.receiver import OK, Answer, Delivery, Receiver
from tests.waiting import eventually

RELAY = [sys.executable, "-c", "from relay.cli import main; main()"]

outbox = Outbox()

Started = subprocess.Popen[str]
Starter = Callable[..., Started]


def environment(**more: str) -> dict[str, str]:
    """Return an environment that names no database."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "OUTBOX_", "DATABASE_"))}
    return kept | {"PYTHONUNBUFFERED": "1", "OUTBOX_ALLOW_PRIVATE": "1"} | more


def run(dsn: str | None, *args: str) -> Result:
    """Run a command to its end, in this process."""
    return CliRunner().invoke(main, args, env={"PGQUEUE_DSN": dsn}, prog_name="outbox-relay")


@pytest.fixture(scope="module")
def shop(server: Server) -> Iterator[str]:
    """Give the DSN of one database for the whole module."""
    name = server.migrated()
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def dsn(shop: str) -> str:
    """Give that database, emptied."""
    return cleared(shop)


@pytest.fixture
def start(dsn: str) -> Iterator[Starter]:
    """Give a function that starts the service, gone at the end."""
    with ExitStack() as stack:

        def begin(*args: str, **env: str) -> Started:
            made = subprocess.Popen(
                [*RELAY, *args],
                env=environment(PGQUEUE_DSN=dsn, **env),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(made.communicate)
            stack.callback(made.kill)
            return made

        yield begin


@pytest.fixture
def writer(dsn: str) -> Iterator[Connection]:
    """Give an autocommit connection."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


def add(writer: Connection, *aggregates: str) -> list[int]:
    """Write one event for each aggregate named."""
    with writer.transaction():
        return [
            outbox.add(writer, "order.placed", {"n": n}, aggregate_id=a) for n, a in enumerate(aggregates)
        ]


def published(writer: Connection) -> int:
    """Count the marked events."""
    row = writer.execute("SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NOT NULL").fetchone()
    assert row is not None
    return int(str(row[0]))


def test_the_service_writes_lines_and_stops_at_sigterm(start: Starter, writer: Connection) -> None:
    ids = add(writer, "a", "a", "b")
    relay = start("--sink", "stdout:", "--source", "/outbox/tests")
    assert relay.stdout is not None
    lines = [json.loads(relay.stdout.readline()) for _ in ids]
    assert [(x["id"], x["source"], x["type"]) for x in lines] == [
        (f"outbox:{id_}", "/outbox/tests", "order.placed") for id_ in ids
    ]
    relay.send_signal(signal.SIGTERM)
    out, err = relay.communicate(timeout=60)
    assert (relay.returncode, out) == (0, "")
    assert "started" in err
    assert "drained" in err
    assert "Traceback" not in err
    assert published(writer) == 3
    assert writer.execute("SELECT count(*) FROM pgqueue.relay").fetchone() == (0,)


def test_every_option_has_an_environment_variable(start: Starter, writer: Connection, tmp_path: Path) -> None:
    names = {param.name: param.envvar for param in service.params if param.name not in ("dsn", "help")}
    assert all(env == f"OUTBOX_{str(name).upper()}" for name, env in names.items())
    with Receiver() as receiver:
        add(writer, "a")
        start(
            OUTBOX_SINK=receiver.url,
            OUTBOX_SOURCE="/outbox/env",
            OUTBOX_WEBHOOK_SECRET="whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLjSw whsec_bmV3bmV3bmV3bmV3bmV3bmV3bmV3bmV3",
            OUTBOX_BATCH="10",
            OUTBOX_HEALTH_FILE=str(tmp_path / "alive"),
        )
        eventually(lambda: receiver.kept)
        assert receiver.kept[0].headers["ce-source"] == "/outbox/env"
        assert len(receiver.kept[0].headers["webhook-signature"].split()) == 2
        assert (tmp_path / "alive").exists()


def test_routes_send_each_type_to_its_own_sink_under_a_source_of_the_epoch(
    start: Starter, writer: Connection, tmp_path: Path
) -> None:
    file = tmp_path / "routes.toml"
    with Receiver() as one, Receiver() as other:
        file.write_text(f'[routes]\n"order.*" = "{one.url}"\n')
        relay = start(
            *("--sink", "stdout:", "--route", f"order.paid={other.url}", "--routes", str(file)),
            *("--source", "/outbox/shop", "--source-epoch", "2"),
        )
        with writer.transaction():
            for kind in ("order.placed", "order.paid", "customer.added"):
                outbox.add(writer, kind, {}, aggregate_id="a")
        eventually(lambda: published(writer) == 3)
        assert [d.headers["ce-type"] for d in one.kept] == ["order.placed"]
        assert [d.headers["ce-type"] for d in other.kept] == ["order.paid"]
        assert one.kept[0].headers["ce-source"] == "/outbox/shop/2"
        assert relay.stdout is not None
        assert json.loads(relay.stdout.readline())["type"] == "customer.added"


def test_killed_between_publish_and_mark_the_event_comes_again_with_the_same_key(
    start: Starter, writer: Connection
) -> None:
    running: list[Started] = []

    def answer(_: Delivery) -> Answer:
        if len(receiver.seen) == 1:
            running[0].kill()
            running[0].wait(60)
        return OK

    with Receiver(answer) as receiver:
        running.append(start("--sink", receiver.url, "--lease", "1"))
        (id_,) = add(writer, "a")
        eventually(lambda: receiver.seen, 40)
        eventually(lambda: running[0].poll() is not None, 40)
        assert published(writer) == 0
        start("--sink", receiver.url, "--lease", "1")
        eventually(lambda: published(writer) == 1, 40)
        assert [d.key for d in receiver.seen] == [f"outbox:{id_}"] * 2


def test_a_receiver_that_gives_no_answer_is_logged_once_and_waited_for(
    start: Starter, writer: Connection
) -> None:
    with Receiver(lambda _: Answer(hang_up=True)) as receiver:
        ids = add(writer, "a", "b")
        relay = start("--sink", receiver.url, "--max-attempts", "1")
        eventually(lambda: len(receiver.seen) >= 4 * len(ids))
        receiver.answer = lambda _: OK
        eventually(lambda: published(writer) == len(ids))
    relay.terminate()
    _, err = relay.communicate(timeout=60)
    assert err.count("is away") == 1
    assert err.count("is back") == 1
    assert "rejected" not in err


def _ended_by_another(relay: Started) -> bool:
    """Send SIGINT and tell whether the process is gone; the first one may come before it listens."""
    relay.send_signal(signal.SIGINT)
    return relay.poll() is not None


def test_a_second_signal_ends_the_service_at_once(start: Starter, writer: Connection) -> None:
    hanging: list[bool] = []

    def hang(_: Delivery) -> Answer:
        hanging.append(True)
        eventually(lambda: not hanging, 30)
        return OK

    with Receiver(hang) as receiver:
        relay = start("--sink", receiver.url)
        add(writer, "a")
        eventually(lambda: hanging, 40)
        relay.send_signal(signal.SIGINT)
        eventually(lambda: _ended_by_another(relay), 20, look=0.3)
        assert relay.wait(60) == 130
        hanging.clear()


def test_the_health_port_and_file_turn_red_when_the_loop_stalls(
    start: Starter, writer: Connection, tmp_path: Path
) -> None:
    alive = tmp_path / "alive"
    go_on: list[bool] = []

    def hang(_: Delivery) -> Answer:
        eventually(lambda: go_on, 30)
        return OK

    port = free_port()

    def status() -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    with Receiver(hang) as receiver:
        start(
            *("--sink", receiver.url, "--lease", "1", "--send-timeout", "0.2"),
            *("--health-port", str(port), "--health-host", "127.0.0.1", "--health-file", str(alive)),
        )
        eventually(lambda: status() == 200)
        eventually(alive.exists)
        add(writer, "a")
        eventually(lambda: status() == 503, 15)
        eventually(lambda: not alive.exists(), 10)
        go_on.append(True)
        eventually(lambda: status() == 200)
        eventually(alive.exists)


def test_rejected_events_are_shown_retried_and_skipped(start: Starter, dsn: str, writer: Connection) -> None:
    with Receiver(lambda _: Answer(status=422, body=b"no such customer")) as receiver:
        relay = start("--sink", receiver.url, "--max-attempts", "1")
        first, second = add(writer, "a", "b")
        eventually(lambda: run(dsn, "parked").stdout.count("no such customer") == 2)
        shown = run(dsn, "parked", "--limit", "1")
        assert shown.stdout.split("\t")[:4] == [str(first), "blocks", "order.placed", "a"]
        assert f"--after {first}" in shown.stderr
        assert re.search(r"parked +2\n", run(dsn, "status").stdout)
        skipped = run(dsn, "skip", str(second), "999")
        assert skipped.exit_code == 0
        assert skipped.stdout.splitlines() == [
            f"{second}\tskipped",
            "999\tunchanged: published, unknown, or not in trouble",
        ]
        receiver.answer = lambda _: OK
        assert run(dsn, "retry", str(first)).stdout == f"{first}\tdue again\n"
        eventually(lambda: published(writer) == 1)
        assert run(dsn, "retry", str(first)).exit_code == 1
        relay.terminate()
        _, err = relay.communicate(timeout=60)
        assert f"parked outbox:{first} attempt=1: HTTP 422: no such customer" in err


@pytest.mark.parametrize(
    "options", [["--sink", "queue:"], ["--sink", "stdout:", "--route", "order.*=QUEUE:"]]
)
def test_the_queue_sink_enqueues_for_the_subscribers_of_an_app_under_their_policy(
    options: list[str], start: Starter, writer: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shopjobs.py").write_text(
        "from pgqueue import App\n"
        "app = App()\n"
        "@app.on_event('order.placed', queue='stock', priority=3)\n"
        "def reserve(order: dict) -> None: ...\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path.cwd()}")
    add(writer, "a")
    writer.execute("DELETE FROM pgqueue.job_type")
    start("shopjobs:app", *options)
    eventually(lambda: published(writer) == 1)
    rows = writer.execute("SELECT name, key, payload, queue, priority FROM pgqueue.job").fetchall()
    assert rows == [("order.placed/reserve", "a", {"n": 0}, "stock", 3)]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--sink", "foo:"], "no sink for 'foo'"),
        (["--sink", "stdout:", "--route", "a=foo:"], "no sink for 'foo'"),
        (["--route", "a=stdout:"], "no default"),
        (["--sink", "stdout:", "--routes", "/nowhere.toml"], "cannot read /nowhere.toml"),
        (["--sink", "queue:"], "needs the app"),
        (["nowhere", "--sink", "queue:"], "module:name"),
        (["nowhere.at:all", "--sink", "queue:"], "cannot load nowhere.at:all"),
        (["os:path", "--sink", "queue:"], "not a pgqueue.App"),
        (["--sink", "https:///x"], "has no host"),
        (["--sink", "stdout:", "--batch", "0"], "batch: 0"),
        (["--sink", "stdout:", "--lease", "0"], "lease: 0"),
        (["--sink", "stdout:", "--max-attempts", "0"], "max-attempts: 0"),
        (["--sink", "stdout:", "--inbox-retention", "10m"], "inbox-retention"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(dsn: str, args: list[str], said: str) -> None:
    done = run(dsn, *args)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "args", [["--sink", "stdout:"], ["status"], ["parked"], ["retry", "1"], ["skip", "1"]]
)
def test_a_database_without_our_tables_is_named_with_the_remedy(empty_dsn: str, args: list[str]) -> None:
    done = run(empty_dsn, *args)
    assert done.exit_code == 1
    assert "run: pgqueue migrate" in done.stderr


@pytest.mark.parametrize("option", ["--source", "--read-from"])
def test_following_the_log_is_refused_where_the_server_does_not_decode(dsn: str, option: str) -> None:
    with psycopg.connect(dsn) as conn:
        if conn.execute("SHOW wal_level").fetchone() == ("logical",):
            pytest.skip("this server decodes its log")
    done = run(dsn, "--sink", "stdout:", option, "wal")
    assert done.exit_code == 1
    assert "wal_level = logical" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_list_of_no_parked_events_says_so(dsn: str) -> None:
    done = run(dsn, "parked")
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == "no event is parked, and none waits after a rejection\n"


def test_a_missing_sink_or_a_wrong_duration_is_a_usage_error(dsn: str) -> None:
    missing = run(dsn)
    assert missing.exit_code == 2
    assert missing.stderr.startswith("Usage: outbox-relay [OPTIONS] [APP]\n")
    assert "Missing option '--sink': where events go" in missing.stderr
    wrong = run(dsn, "--sink", "stdout:", "--retention", "a while")
    assert wrong.exit_code == 2
    assert "7d" in wrong.stderr


LARGE = "99999999999999999999"


@pytest.mark.parametrize(
    "args",
    [
        ["retry", LARGE],
        ["skip", "1", LARGE],
        ["skip", "0"],
        ["parked", "--after", LARGE],
        ["replay", "--resume", LARGE],
        ["replay", "--all", "--yes", "--rate", "nan"],
        ["replay", "--all", "--yes", "--rate", "inf"],
        ["replay", "--all", "--yes", "--rate", "1e-300"],
    ],
)
def test_a_number_that_cannot_be_is_a_usage_error_and_nothing_is_begun(
    dsn: str, writer: Connection, args: list[str]
) -> None:
    done = run(dsn, *args)
    assert done.exit_code == 2
    assert f"{args[-1]}" in done.stderr
    assert writer.execute("SELECT count(*) FROM pgqueue.outbox_replay").fetchone() == (0,)


def test_help_shows_the_options_of_the_service_and_the_commands() -> None:
    text = run(None, "--help").stdout
    for param in service.params:
        if param.name not in {"help", "app"}:
            assert param.opts[0] in text
    assert all(f"\n  {name} " in text for name in ("status", "parked", "retry", "skip"))
