"""Schedules across real processes: ten of them, one asleep, some killed; each tick runs once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psycopg
import pytest

from tests.process.apps.fleet import Fleet
from tests.server import Connection, Server
from tests.waiting import eventually

TIMED = "tests.process.apps.timed:app"
FORGETFUL = "tests.process.apps.timed:forgetful"
PGQUEUE = str(Path(sys.executable).with_name("pgqueue"))


def pgqueue(dsn: str, *arguments: str, status: int = 0) -> str:
    """Run the command; return what it printed."""
    done = subprocess.run(
        [PGQUEUE, *arguments], env=os.environ | {"PGQUEUE_DSN": dsn}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def state(conn: Connection, name: str = "beat") -> str:
    found = conn.execute("SELECT state FROM pgqueue.schedule_status WHERE name = %s", [name]).fetchone()
    conn.rollback()
    return str(found[0]) if found else "gone"


def holes(ticks: list[int]) -> set[int]:
    """Return the seconds that are missing between the first tick and the last."""
    return set(range(min(ticks), max(ticks))) - set(ticks)


@pytest.mark.slow
def test_each_tick_runs_once_while_schedulers_sleep_die_and_start(
    fleet: Fleet, server: Server, conn: Connection
) -> None:
    """oban 1488, oban-py 32 and 17, good_job 731, river 791: doubled ticks, lost ticks, errors in the log."""
    several = [fleet.launch("--processes=3", "--poll=200ms", app=TIMED) for _ in range(3)]
    single = fleet.start("--poll=200ms", app=TIMED)
    for process in several:
        process.says("started queues=")
    fleet.effects.wait("beat", 3)
    single.freeze()
    seen = len(fleet.effects.all("beat"))
    fleet.effects.wait("beat", seen + 3)
    single.thaw()
    for process in several[:2]:
        os.killpg(process.pid, signal.SIGKILL)  # its own session, started by the fleet
        process.wait()
        seen = len(fleet.effects.all("beat"))
        fleet.effects.wait("beat", seen + 3)
        fleet.start("--poll=200ms", app=TIMED)
    seen = len(fleet.effects.all("beat"))
    fleet.effects.wait("beat", seen + 3)

    rows = conn.execute("SELECT extract(epoch FROM tick)::bigint::text FROM pgqueue.tick").fetchall()
    ticks = [int(str(epoch)) for (epoch,) in rows]
    assert not holes(ticks)
    made = conn.execute("SELECT count(*), count(DISTINCT job_id) FROM pgqueue.tick").fetchone()
    assert made == (len(ticks), len(ticks))
    doubled = [tick for tick, count in Counter(fleet.effects.ns("beat")).items() if count > 1]
    assert len(doubled) <= 3 * 3  # at most what ran in a process at the moment it was killed
    if server.embedded:
        assert "tick_pkey" not in server.embedded.log(1_000_000)


def test_ticks_that_fell_due_while_no_worker_ran_are_caught_up(fleet: Fleet, conn: Connection) -> None:
    first = fleet.start(app=TIMED)
    fleet.effects.wait("beat", 2)
    first.kill()
    seen = len(fleet.effects.all("beat"))
    due = "SELECT count(*) FROM pgqueue.schedule WHERE next_at < clock_timestamp() - interval '2 s'"

    def is_late() -> bool:
        late = conn.execute(due).fetchone() == (1,)
        conn.rollback()
        return late

    eventually(is_late)
    fleet.lose(first.pid)
    fleet.start(app=TIMED)
    fleet.effects.wait("beat", seen + 4)
    eventually(lambda: not holes(fleet.effects.ns("beat")))


def test_a_schedule_that_left_the_code_rests_until_it_is_removed(fleet: Fleet, conn: Connection) -> None:
    old = fleet.start(app=TIMED)
    fleet.effects.wait("beat", 1)
    assert old.stop() == 0
    fleet.start(app=FORGETFUL)
    assert eventually(lambda: state(conn) == "orphan")
    assert "orphan" in pgqueue(fleet.dsn, "schedule", "list")
    assert (
        json.loads(pgqueue(fleet.dsn, "schedule", "list", "--json").partition("\nfor good")[0])[0]["state"]
        == "orphan"
    )
    assert pgqueue(fleet.dsn, "schedule", "remove", "beat") == "removed beat\n"
    assert state(conn) == "gone"


def test_a_schedule_is_added_paused_resumed_and_removed_at_run_time(fleet: Fleet, conn: Connection) -> None:
    fleet.start(app=FORGETFUL)
    added = pgqueue(
        fleet.dsn, "schedule", "add", "often", "* * * * * *", "beat", "--timezone", "Asia/Damascus"
    )
    assert added.startswith("added often; next ")
    fleet.effects.wait("beat", 2)
    assert pgqueue(fleet.dsn, "schedule", "pause", "often") == "paused often\n"
    assert state(conn, "often") == "paused"
    count = "SELECT count(*) FROM pgqueue.tick"
    paused_at = conn.execute(count).fetchone()
    conn.rollback()
    assert "paused" in pgqueue(fleet.dsn, "schedule", "list")
    assert conn.execute(count).fetchone() == paused_at
    conn.rollback()
    pgqueue(fleet.dsn, "schedule", "resume", "often")
    seen = len(fleet.effects.all("beat"))
    fleet.effects.wait("beat", seen + 1)
    pgqueue(fleet.dsn, "schedule", "remove", "often")
    assert "no schedules" in pgqueue(fleet.dsn, "schedule", "list")


def test_the_next_ticks_need_no_database() -> None:
    shown = pgqueue(
        "host=nowhere", "schedule", "next", "30 2 * * *", "--timezone", "America/New_York", "-n3", "--from=2026-03-07"
    )  # fmt: skip
    assert shown.splitlines() == [
        "Sat 2026-03-07 02:30:00 -0500 America/New_York  2026-03-07 07:30:00Z",
        "Sun 2026-03-08 03:00:00 -0400 America/New_York  2026-03-08 07:00:00Z",
        "Mon 2026-03-09 02:30:00 -0400 America/New_York  2026-03-09 06:30:00Z",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("next", "0 0 31 2 *"), "error: schedule: '0 0 31 2 *': bad day-of-month"),
        (("next", "0 2 * * *", "--timezone", "Asia/Damaskus"), "did you mean 'Asia/Damascus'?"),
        (("add", "n", "0 2 * * *", "nosuch"), "has declared a job 'nosuch' yet; run pgqueue sync APP, or give --force"),
        (("add", "n", "0 2 * * *", "nosuch", "--force", "--payload", "{"), "error: payload of 'nosuch': is not JSON"),
        (("add", " ", "0 2 * * *", "nosuch", "--force"), "error: name: is blank"),
        (("add", "n", "0 2 * * *", "nosuch", "--force", "--cap", "0"), "error: cap: 0 is not a whole number"),
        (("remove", "nosuch"), "error: name: there is no schedule 'nosuch'"),
        (("pause", "nosuch"), "error: name: there is no schedule 'nosuch'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(arguments: tuple[str, ...], says: str, dsn: str) -> None:
    shown = pgqueue(dsn, "schedule", *arguments, status=1)
    assert says in shown
    assert len(shown.splitlines()) == 1


def test_the_payload_of_a_new_schedule_is_checked_against_its_handler(dsn: str, conn: Connection) -> None:
    add = ("schedule", "add", "n", "0 2 * * *", "work", "--force", "--payload")
    app = ("--app", "tests.process.apps.every:app")
    assert "payload of 'work': does not fit its handler" in pgqueue(dsn, *add, '"str"', *app, status=1)
    assert state(conn, "n") == "gone"
    assert pgqueue(dsn, *add, '{"n": 3}', *app).startswith("added n; next ")
    assert "warning: the payload is not checked" in pgqueue(dsn, *add, '"str"')


def test_what_the_code_defines_is_not_changed_from_the_command_line(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute("SELECT pgqueue.schedule_add('beat', '* * * * *', 'beat', source => 'code')")
    shown = pgqueue(dsn, "schedule", "add", "beat", "0 2 * * *", "beat", "--force", status=1)
    assert shown.endswith("error: schedule 'beat': it is defined in code; change it there, or pause it\n")
