"""One job per tick, whoever looks, however often, and whatever the clock does.

Schedules are defined some time ago, so that their ticks are there to be found. `look` sees them as a database does
whose clock shows a given time of that past.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from pgqueue import App, ConfigError
from pgqueue.connection import execute
from pgqueue.cron import Cron
from pgqueue.errors import BadOption, BadPayload
from pgqueue.schedule import (
    Due,
    Missed,
    Plan,
    Schedule,
    add,
    define,
    due,
    fire,
    pause,
    plan,
    remove,
    resume,
    settle,
    status,
)
from pgqueue.tick import tick
from tests.factories import wipe
from tests.server import Server

NOW = timedelta(0)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)

Connection = psycopg.Connection[Any]


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[str]:
    """Give a database for the tests of this file."""
    name = server.migrated()
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def worker(shared: str) -> Iterator[Connection]:
    """Give a connection as a worker's pulse has one, to an empty database."""
    wipe(shared)
    with psycopg.connect(shared, autocommit=True) as connection:
        connection.execute("SET search_path = ''")
        yield connection


@pytest.fixture
def other(shared: str) -> Iterator[Connection]:
    """Give a second one."""
    with psycopg.connect(shared, autocommit=True) as connection:
        connection.execute("SET search_path = ''")
        yield connection


def schedule(
    expr: str = "", *, name: str = "nightly", missed: Missed = "once", cap: int = 10, **extra: Any
) -> Schedule:
    """Make a schedule; without an expression an hourly one whose last tick was five minutes ago."""
    expr = expr or f"{datetime.now(UTC) - 5 * MINUTE:%M} * * * *"
    return Schedule(name=name, job="report", cron=Cron(expr), missed=missed, cap=cap, **extra)


def defined(connection: Connection, made: Schedule, *, ago: timedelta = NOW) -> None:
    """Define a schedule some time ago, and let a worker work out its first tick."""
    execute(connection, add(made))
    connection.execute("UPDATE pgqueue.schedule SET since = since - %s WHERE name = %s", [ago, made.name])
    tick(connection, NOW)


def jobs(connection: Connection) -> list[str]:
    """Return the ticks of the jobs, in the order of their ids."""
    rows = connection.execute("SELECT headers::jsonb->>'tick' FROM pgqueue.job ORDER BY id").fetchall()
    return [str(row[0]) for row in rows]


def row(connection: Connection, name: str = "nightly") -> dict[str, Any]:
    found = connection.execute(
        "SELECT to_jsonb(s) FROM pgqueue.schedule s WHERE s.name = %s", [name]
    ).fetchone()
    assert found
    return dict(found[0])


def later(connection: Connection, by: timedelta) -> None:
    """Let time pass for every schedule."""
    connection.execute(
        "UPDATE pgqueue.schedule SET since = since - %(by)s, next_at = next_at - %(by)s, last_at = last_at - %(by)s",
        {"by": by},
    )


def look(connection: Connection, at: datetime) -> Plan | None:
    """Look for due ticks by a clock that shows `at`."""
    found = one(connection)
    if found.next_at is None or found.next_at > at:
        return None
    return plan(replace(found, now=at))


def one(connection: Connection) -> Due:
    (found,) = execute(connection, due(NOW))
    return found


def test_a_due_tick_becomes_one_job_with_its_payload_and_the_time_it_stands_for(worker: Connection) -> None:
    made = schedule(payload=json.dumps({"day": "today"}))
    defined(worker, made, ago=10 * MINUTE)
    assert tick(worker, NOW) == 1
    assert tick(worker, NOW) == 0
    found = worker.execute(
        "SELECT name, queue, payload::text, headers->>'schedule', idempotency_key, headers->>'tick' FROM pgqueue.job"
    ).fetchone()
    assert found
    assert found[:4] == ("report", "default", '{"day": "today"}', "nightly")
    assert found[4] == f"schedule:nightly:{found[5]}"
    at = datetime.fromisoformat(str(found[5]))
    assert at.second == 0
    assert worker.execute("SELECT tick FROM pgqueue.tick").fetchone() == (at,)
    (shown,) = execute(worker, status())
    assert (shown.state, shown.last_at, shown.next_at) == ("active", at, at + HOUR)


def test_a_new_schedule_waits_for_its_first_tick(worker: Connection) -> None:
    defined(worker, schedule("0 0 1 1 *"))
    assert tick(worker, NOW) == 0
    assert str(row(worker)["next_at"]).endswith("-01-01T00:00:00+00:00")


def test_the_job_follows_the_policy_of_its_type(worker: Connection) -> None:
    worker.execute("INSERT INTO pgqueue.job_type (name, queue, priority) VALUES ('report', 'bulk', 7)")
    defined(worker, schedule(), ago=10 * MINUTE)
    tick(worker, NOW)
    assert worker.execute("SELECT queue, priority FROM pgqueue.job").fetchall() == [("bulk", 7)]


def test_a_full_queue_takes_a_tick(worker: Connection) -> None:
    worker.execute("INSERT INTO pgqueue.queue (name, max_depth) VALUES ('default', 1)")
    worker.execute(
        "INSERT INTO pgqueue.depth_sample VALUES ('default', clock_timestamp(), 9, 0, 0, 0, 0, false)"
    )
    defined(worker, schedule(), ago=10 * MINUTE)
    assert tick(worker, NOW) == 1


def test_jitter_delays_the_job_and_not_the_schedule(worker: Connection) -> None:
    defined(worker, schedule(jitter=3600.0), ago=10 * MINUTE)
    tick(worker, NOW)
    found = worker.execute(
        "SELECT run_at > enqueued_at, run_at < now() + interval '1 h' FROM pgqueue.job"
    ).fetchone()
    assert found == (True, True)
    assert str(row(worker)["next_at"]) > str(row(worker)["last_at"])


# Losing a race, sleeping, dying.


def test_of_two_processes_with_one_picture_the_second_writes_nothing(
    worker: Connection, other: Connection
) -> None:
    """oban-bg/oban-py 32, oban 1488: two schedulers, two rows per tick."""
    defined(worker, schedule(), ago=10 * MINUTE)
    here, there = plan(one(worker)), plan(one(other))
    assert len(execute(worker, fire(here))) == 1
    assert execute(other, fire(there)) == []
    assert len(jobs(worker)) == 1


def test_a_process_that_slept_through_later_ticks_writes_nothing(
    worker: Connection, other: Connection
) -> None:
    """oban 1488: whoever came back after a pause went on with an old picture."""
    defined(worker, schedule("* * * * *"), ago=HOUR)
    start = datetime.now(UTC) - HOUR + MINUTE
    asleep = look(worker, start)
    assert asleep
    for minute in range(3):
        seen = look(other, start + minute * MINUTE)
        assert seen
        assert len(execute(other, fire(seen))) == 1
    assert execute(worker, fire(asleep)) == []
    assert len(jobs(worker)) == 3


def test_whoever_meets_a_tick_that_is_being_written_goes_on_at_once(
    worker: Connection, other: Connection
) -> None:
    """good_job 731, 1446: no waiting for one lock, no unique violation in the log."""
    defined(worker, schedule(), ago=10 * MINUTE)
    here, there = plan(one(worker)), plan(one(other))
    other.execute("SET statement_timeout = '60s'")
    with worker.transaction():
        assert len(execute(worker, fire(here))) == 1
        assert execute(other, fire(there)) == []
    assert execute(other, fire(there)) == []
    assert len(jobs(worker)) == 1


def test_a_rollback_leaves_the_tick_to_the_next(worker: Connection, other: Connection) -> None:
    """solid_queue 290: the tick is noted and its job written together, or neither is."""
    defined(worker, schedule(), ago=10 * MINUTE)
    found = plan(one(worker))
    with worker.transaction(force_rollback=True):
        execute(worker, fire(found))
    assert jobs(worker) == []
    assert tick(other, NOW) == 1


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE pgqueue.schedule SET paused = true",
        "UPDATE pgqueue.schedule SET expr = '0 0 1 1 *'",
        "UPDATE pgqueue.schedule SET zone = 'Asia/Tokyo'",
        "UPDATE pgqueue.schedule SET next_at = NULL",
        "UPDATE pgqueue.schedule SET next_at = next_at + interval '1 s'",
        "DELETE FROM pgqueue.schedule",
    ],
)
def test_a_schedule_that_changed_meanwhile_is_looked_at_again(change: str, worker: Connection) -> None:
    defined(worker, schedule(), ago=10 * MINUTE)
    found = plan(one(worker))
    worker.execute(change.encode())
    assert execute(worker, fire(found)) == []
    assert jobs(worker) == []


def test_the_first_tick_is_not_written_for_a_schedule_that_changed_meanwhile(worker: Connection) -> None:
    execute(worker, add(schedule()))
    found = plan(one(worker))
    execute(worker, add(schedule("0 0 1 1 *")))
    execute(worker, settle(found))
    assert row(worker)["next_at"] is None


def test_a_tick_that_is_there_makes_no_second_job_even_if_the_schedule_is_set_back(
    worker: Connection,
) -> None:
    """oban-py 32: three schedulers, three rows for one tick."""
    defined(worker, schedule(missed="all"), ago=10 * MINUTE)
    assert tick(worker, NOW) == 1
    worker.execute("UPDATE pgqueue.schedule SET next_at = last_at, last_at = last_at - interval '1 min'")
    assert tick(worker, NOW) == 0
    assert len(jobs(worker)) == 1


# The clock. oban-py 17: ticks skipped, and doubled by a step back.


@pytest.mark.parametrize("step", [90, -90])
@pytest.mark.parametrize("place", [-1, 0, 1, 30])
def test_a_step_of_the_clock_round_a_tick_loses_none_and_doubles_none(
    step: int, place: int, worker: Connection
) -> None:
    """oban-py 17: ticks skipped, and doubled by a step back."""
    defined(worker, schedule("* * * * *", missed="all"), ago=10 * MINUTE)
    start = (datetime.now(UTC) - 7 * MINUTE).replace(second=0, microsecond=0)
    worker.execute("UPDATE pgqueue.schedule SET since = %(at)s, next_at = %(at)s", {"at": start - MINUTE})
    seconds = [*range(-59, place), *range(place + step, 300)]  # the clock shows these, in this order
    for second in seconds:
        seen = look(worker, start + timedelta(seconds=second))
        if seen:
            execute(worker, fire(seen))
    assert [datetime.fromisoformat(text) for text in jobs(worker)] == [start + m * MINUTE for m in range(5)]


def test_a_clock_that_went_back_between_look_and_write_writes_nothing(worker: Connection) -> None:
    """oban-py 17, db-scheduler 364: a clock that is not the one the tick was worked out by."""
    defined(worker, schedule(), ago=10 * MINUTE)
    found = plan(one(worker))
    ahead = Plan(
        due=found.due, ticks=found.ticks, through=found.due.now + HOUR, following=found.following + HOUR
    )
    assert execute(worker, fire(ahead)) == []
    assert tick(worker, NOW) == 1


# Missed ticks.


@pytest.mark.parametrize(
    ("missed", "cap", "runs"), [("once", 10, 1), ("skip", 10, 0), ("all", 3, 3), ("all", 1000, 5)]
)
def test_of_missed_ticks_the_policy_says_which_run(
    missed: Missed, cap: int, runs: int, worker: Connection
) -> None:
    """river 658, 791: what fell due while nobody looked was lost, or came all at once."""
    made = schedule(missed=missed, cap=cap)
    defined(worker, made, ago=5 * HOUR)
    assert tick(worker, NOW) == runs
    assert tick(worker, NOW) == 0
    last = made.cron.latest(datetime.now(UTC) - HOUR, datetime.now(UTC), 1)[0]
    assert [datetime.fromisoformat(text) for text in jobs(worker)] == [
        last - n * HOUR for n in reversed(range(runs))
    ]
    assert datetime.fromisoformat(row(worker)["next_at"]) - last == HOUR


def test_skip_runs_a_tick_that_is_found_in_time(worker: Connection) -> None:
    defined(worker, schedule("* * * * * *", missed="skip"), ago=10 * SECOND)
    assert tick(worker, NOW) == 1


def test_a_weekly_tick_survives_any_number_of_restarts(worker: Connection) -> None:
    """river 791: a weekly job never ran where the process restarted more often."""
    weekly = f"{datetime.now(UTC) - MINUTE:%M %H * * %w}"
    execute(worker, define([schedule(weekly)]))
    worker.execute("UPDATE pgqueue.schedule SET since = since - interval '6 days 23 h'")
    tick(worker, NOW)
    for _ in range(24):
        execute(worker, define([schedule(weekly)]))  # a worker starts
        tick(worker, NOW)
    assert len(jobs(worker)) == 1


def test_changed_rules_of_a_zone_cost_no_tick(worker: Connection) -> None:
    """The stored next_at came from older rules: the ticks are counted anew from the last one that was decided."""
    defined(worker, schedule("0 * * * *"), ago=2 * HOUR)
    worker.execute("UPDATE pgqueue.schedule SET next_at = next_at + interval '17 min'")
    worker.execute(
        "UPDATE pgqueue.schedule SET since = since - interval '1 h', next_at = next_at - interval '1 h'"
    )
    assert tick(worker, NOW) == 1
    assert jobs(worker)[0].endswith(":00:00Z")


# Definitions.


def test_an_unchanged_definition_writes_nothing(worker: Connection) -> None:
    made = schedule()
    defined(worker, made, ago=10 * MINUTE)
    before = worker.execute("SELECT xmin, ctid FROM pgqueue.schedule").fetchone()
    execute(worker, add(made))
    assert worker.execute("SELECT xmin, ctid FROM pgqueue.schedule").fetchone() == before


def test_another_expression_starts_the_schedule_anew_and_another_payload_does_not(worker: Connection) -> None:
    defined(worker, schedule("0 0 1 1 *"))
    first = row(worker)
    execute(worker, add(schedule("0 0 1 1 *", payload='"new"')))
    assert (row(worker)["next_at"], row(worker)["payload"]) == (first["next_at"], "new")
    execute(worker, add(schedule("0 0 1 2 *")))
    assert row(worker)["next_at"] is None
    tick(worker, NOW)
    assert "-02-01T" in row(worker)["next_at"]


def test_what_fell_due_while_it_was_paused_does_not_run(worker: Connection) -> None:
    defined(worker, schedule(missed="all"), ago=HOUR)
    assert execute(worker, pause("nightly"))
    assert tick(worker, NOW) == 0
    execute(worker, add(schedule(missed="all")))
    assert [s.state for s in execute(worker, status())] == ["paused"]
    assert execute(worker, resume("nightly"))
    assert tick(worker, NOW) == 0
    assert datetime.fromisoformat(row(worker)["next_at"]) > datetime.now(UTC)
    assert not execute(worker, pause("nosuch"))


def test_resuming_what_is_not_paused_changes_nothing(worker: Connection) -> None:
    defined(worker, schedule(), ago=10 * MINUTE)
    before = row(worker)
    assert execute(worker, resume("nightly"))
    assert row(worker) == before


def test_a_removed_schedule_is_gone_and_its_jobs_stay(worker: Connection) -> None:
    defined(worker, schedule(), ago=10 * MINUTE)
    tick(worker, NOW)
    assert execute(worker, remove("nightly"))
    assert not execute(worker, remove("nightly"))
    assert len(jobs(worker)) == 1
    assert worker.execute("SELECT count(*) FROM pgqueue.tick").fetchone() == (0,)


def test_a_schedule_of_the_code_is_not_changed_at_run_time(worker: Connection) -> None:
    execute(worker, define([schedule()]))
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="defined in code"):
        execute(worker, add(schedule("0 0 1 1 *")))


def register(connection: Connection, nonce: int, names: list[str], schedules: list[str]) -> None:
    connection.execute(
        "INSERT INTO pgqueue.worker (nonce, host, pid, version, queues, names, schedules, concurrency)"
        " VALUES (%s, 'here', 1, '1', '{default}', %s, %s, 1)",
        [nonce, names, schedules],
    )


def test_a_schedule_that_left_the_code_rests_and_is_shown_as_orphan(worker: Connection) -> None:
    execute(worker, define([schedule()]))
    tick(worker, NOW)
    later(worker, HOUR)
    register(worker, 1, ["report"], [])
    assert [s.state for s in execute(worker, status())] == ["orphan"]
    assert tick(worker, NOW) == 0
    register(worker, 2, ["report"], ["nightly"])  # a worker with the old code, or the line is back
    assert [s.state for s in execute(worker, status())] == ["active"]
    assert tick(worker, NOW) == 1


def test_workers_of_another_app_make_no_orphan(worker: Connection) -> None:
    execute(worker, define([schedule()]))
    register(worker, 1, ["mail"], [])
    assert [s.state for s in execute(worker, status())] == ["active"]


def test_a_broken_schedule_stops_no_other_and_says_why(worker: Connection) -> None:
    """pg-boss 522: one bad row failed the whole sweep, for ever."""
    worker.execute(
        "SELECT pgqueue.schedule_add(n, '* * * * *', 'report') FROM unnest('{bad,good}'::text[]) n"
    )
    worker.execute("UPDATE pgqueue.schedule SET expr = '0 0 31 2 *' WHERE name = 'bad'")
    tick(worker, NOW)
    later(worker, MINUTE)
    assert tick(worker, NOW) == 1
    states = {s.name: (s.state, s.problem) for s in execute(worker, status())}
    assert states["good"] == ("active", None)
    assert states["bad"][0] == "broken"
    assert "in none of its months" in str(states["bad"][1])
    worker.execute("SELECT pgqueue.schedule_add('bad', '* * * * *', 'report')")
    tick(worker, NOW)
    assert {s.state for s in execute(worker, status())} == {"active"}


def test_a_tick_that_cannot_be_written_marks_its_schedule_and_is_tried_again(worker: Connection) -> None:
    defined(worker, schedule(), ago=10 * MINUTE)
    worker.execute("ALTER TABLE pgqueue.job ADD CONSTRAINT no_report CHECK (name <> 'report')")
    assert tick(worker, NOW) == 0
    (shown,) = execute(worker, status())
    assert (shown.state, "no_report" in str(shown.problem)) == ("broken", True)
    worker.execute("ALTER TABLE pgqueue.job DROP CONSTRAINT no_report")
    assert tick(worker, NOW) == 0
    worker.execute("UPDATE pgqueue.schedule SET problem_at = problem_at - interval '2 min'")
    assert tick(worker, NOW) == 1
    assert [s.state for s in execute(worker, status())] == ["active"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("'', '* * * * *', 'report'", "the name is blank"),
        ("'s', '* * * * *', ' '", "the job name is blank"),
        ("'s', '* * * *', 'report'", "is not minute hour day month weekday"),
        ("'s', '* * * * ;', 'report'", "is not minute hour day month weekday"),
        (
            "'s', '0 0 31 2 *', 'report'",
            "schedule 's': '0 0 31 2 \\*': bad day-of-month .*in none of its months",
        ),
        ("'s', '60 * * * *', 'report'", "bad minute"),
        ("'s', NULL, 'report'", "is not minute hour day month weekday"),
        ("'s', '* * * * *', 'report', zone => 'Mars/Olympus'", "'Mars/Olympus' is no time zone"),
        ("'s', '* * * * *', 'report', missed => 'never'", "missed is 'never'"),
        ("'s', '* * * * *', 'report', cap => 0", "cap is 0"),
        ("'s', '* * * * *', 'report', jitter => '-1 s'", "jitter is -00:00:01"),
        ("'s', '* * * * *', 'report', jitter => '2 days'", "jitter is 2 days"),
    ],
)
def test_sql_refuses_what_cannot_be(arguments: str, says: str, worker: Connection) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=says):
        worker.execute(f"SELECT pgqueue.schedule_add({arguments})".encode())


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("name", " ", "is blank"),
        ("job", "", "is blank"),
        ("jitter", -1, "is not between 0 s and a day"),
        ("jitter", timedelta(days=2), "is not between"),
        ("jitter", "5", "is not between"),
        ("missed", "never", "'never' is not one of skip, once, all"),
        ("cap", 0, "0 is not a whole number from 1 to 1000"),
        ("cap", 1.5, "1.5 is not"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_where_it_is_written(
    option: str, value: object, says: str
) -> None:
    values: dict[str, Any] = {"name": "n", "job": "report", "cron": Cron("* * * * *"), option: value}
    with pytest.raises(BadOption, match=says):
        Schedule(**values)


# In code.


def test_a_schedule_stands_above_its_handler() -> None:
    app = App()

    @app.schedule(
        "0 3 * * *", name="report/rest", payload="rest", timezone="Asia/Damascus", missed="all", cap=3
    )
    @app.schedule("0 2 * * *", payload="main", jitter=timedelta(seconds=30))
    @app.job("report")
    def report(part: str) -> None: ...

    assert report.name == "report"
    assert {s.name: (s.job, s.payload, s.cron.zone, s.missed, s.cap) for s in app.schedules.values()} == {
        "report": ("report", '"main"', "UTC", "once", 10),
        "report/rest": ("report", '"rest"', "Asia/Damascus", "all", 3),
    }


def test_a_bad_schedule_stops_the_import() -> None:
    app = App()

    @app.job("report")
    def report(part: str) -> None: ...

    with pytest.raises(BadOption, match="in none of its months"):
        app.schedule("0 0 31 2 *")
    with pytest.raises(BadOption, match="is no zone"):
        app.schedule("0 2 * * *", timezone="Mars/Olympus")
    with pytest.raises(BadPayload, match="does not fit str"):
        app.schedule("0 2 * * *", payload=5)(report)
    with pytest.raises(ConfigError, match=r"stands above the @app\.job"):
        app.schedule("0 2 * * *")(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="of the same app"):
        App().schedule("0 2 * * *", payload="x")(report)
    app.schedule("0 2 * * *", payload="x")(report)
    with pytest.raises(ConfigError, match="'report' is defined twice"):
        app.schedule("0 3 * * *", payload="x")(report)


def test_payloads_reach_the_row_as_they_were_written(worker: Connection) -> None:
    text = '{"sum": 0.10, "big": 12345678901234567890, "name": "naïve"}'
    execute(worker, define([schedule(payload=text)]))
    assert worker.execute("SELECT payload::text FROM pgqueue.schedule").fetchone() == (text,)
