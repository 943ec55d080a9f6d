"""`pgqueue jobs`: what is listed is what there is, and what is cancelled never runs again."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from pgqueue.cli import main
from pgqueue.connection import execute
from pgqueue.declare import Policy, declare
from pgqueue.finish import complete
from pgqueue.history import days
from pgqueue.job import Completed
from pgqueue.prepared import Prepared
from pgqueue.progress import Note, progress
from tests.factories import MINUTE, Holder, enqueue, token
from tests.process.apps import every, heeds
from tests.process.apps.every import Work
from tests.process.apps.fleet import Fleet
from tests.server import Connection
from tests.waiting import eventually

Run = Callable[..., Result]
HEEDS = "tests.process.apps.heeds:app"
HOSTILE = ["a'b", 'a"b', "a$$b", "a.b", "a\\b", "a%sb", "a;b--", "😀"]


@pytest.fixture
def run(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Give a way to run `pgqueue` in this process."""
    monkeypatch.setenv("PGQUEUE_DSN", dsn)

    def invoke(*argv: object, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [str(word) for word in argv])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return invoke


def left(conn: Connection) -> tuple[int, int, int]:
    """Count live jobs, dead letters, and cancel requests that stand."""
    row = conn.execute(
        "SELECT (SELECT count(*) FROM pgqueue.job), (SELECT count(*) FROM pgqueue.dead_job),"
        " (SELECT count(*) FROM pgqueue.job_signal)"
    ).fetchone()
    conn.commit()
    assert row
    return int(str(row[0])), int(str(row[1])), int(str(row[2]))


def outcomes(conn: Connection) -> set[str]:
    """Return the outcomes counted so far, folded or not."""
    rows = conn.execute(
        "SELECT outcome FROM pgqueue.tally UNION SELECT outcome FROM pgqueue.tally_minute"
    ).fetchall()
    conn.commit()
    return {str(row[0]) for row in rows}


def start_one(conn: Connection, fleet: Fleet, job: Prepared[Work], work: Work) -> int:
    """Enqueue a job and wait until its handler runs."""
    before = len(fleet.effects.all("start"))
    ref = job.enqueue(conn, work)
    conn.commit()
    fleet.effects.wait("start", before + 1)
    return ref.id


def test_live_jobs_are_listed_and_shown(run: Run, conn: Connection) -> None:
    assert run("jobs", "list").stdout == "no live jobs\n"
    one, two = enqueue(conn, 2, payload={"a": 1})
    (three,) = enqueue(conn, name="pdf", key="k", delay=MINUTE)
    conn.commit()
    lines = run("jobs", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["ID", str(three), str(two), str(one)]
    assert "delayed" in lines[1]
    first = run("jobs", "list", "--limit", 1)
    assert f"pgqueue jobs list --before {three}" in first.stderr
    rows = json.loads(run("jobs", "list", "--state", "delayed", "--json").stdout)
    assert [(r["id"], r["state"], r["key"]) for r in rows] == [(three, "delayed", "k")]
    assert '"a": 1' in run("jobs", "show", one).stdout
    assert json.loads(run("jobs", "show", one, "--json").stdout)["payload"] == {"a": 1}
    assert "there is no trace of job 99999" in run("jobs", "show", 99999, code=1).stderr
    for wrong in ("x", "0", "1.5", 2**63, "9" * 5000):
        assert f"{str(wrong)[:40]!r} is no job id" in run("jobs", "show", wrong, code=2).stderr


def test_progress_and_what_the_history_keeps_are_shown(run: Run, dsn: str, conn: Connection) -> None:
    execute(conn, declare([Policy(name="work", keep=86_400.0)]))
    execute(conn, days())
    (job_id,) = enqueue(conn)
    conn.commit()
    with Holder(dsn) as holder:
        (job,) = holder.claim()
        holder.run(progress([Note(token(job), 0.4, "page 12")]))
        assert "40% page 12" in run("jobs", "show", job_id).stdout
        assert json.loads(run("jobs", "show", job_id, "--json").stdout)["note"] == "page 12"
        holder.run(complete([(token(job), Completed(result='{"sum": 6}'))]))
    shown = run("jobs", "show", job_id).stdout
    assert "done" in shown
    assert '{"sum": 6}' in shown
    assert json.loads(run("jobs", "show", job_id, "--json").stdout)["result"] == {"sum": 6}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_only_ever_a_value(run: Run, conn: Connection, name: str) -> None:
    """pg-boss 859, pgmq 295: names reached SQL."""
    (job_id,) = enqueue(conn, name=name, queue=name, key=name)
    enqueue(conn)
    conn.commit()
    found = json.loads(run("jobs", "list", "--name", name, "--queue", name, "--key", name, "--json").stdout)
    assert [one["id"] for one in found] == [job_id]
    assert run("jobs", "cancel", "--name", name, "--queue", name, "--yes").stdout == "cancelled 1 jobs\n"
    run("queue", "pause", name)
    assert [q["name"] for q in json.loads(run("queue", "list", "--json").stdout) if q["paused"]] == [name]
    assert left(conn)[0] == 1


def test_waiting_jobs_of_a_name_are_counted_first_and_cancelled_with_yes(
    run: Run, dsn: str, conn: Connection
) -> None:
    enqueue(conn, 1_200, name="odd")
    enqueue(conn, 2)
    conn.commit()
    assert run("jobs", "cancel", "--name", "odd").stdout == (
        "would cancel 1200 waiting jobs; nothing was done: add --yes\n"
    )
    assert run("jobs", "cancel", "--name", "odd", "--yes").stdout == "cancelled 1200 jobs\n"
    assert left(conn) == (2, 0, 0)
    assert "not both" in run("jobs", "cancel", code=1).stderr
    assert "not both" in run("jobs", "cancel", 1, "--name", "odd", code=1).stderr


def test_each_id_is_answered(run: Run, dsn: str, conn: Connection) -> None:
    one, two = enqueue(conn, 2)
    conn.commit()
    with Holder(dsn) as holder:
        holder.claim(1)
    lines = run("jobs", "cancel", one, two, 99999).stdout.splitlines()
    assert lines == [
        f"{one}\tasked to stop: it runs, and will not run again",
        f"{two}\tcancelled",
        "99999\tunchanged: it is done, or never was",
    ]
    run("jobs", "cancel", 99999, code=1)


@pytest.mark.parametrize("job", [every.awaits, every.computes], ids=["async", "process"])
def test_a_running_job_is_stopped_and_counted_as_cancelled(
    run: Run, conn: Connection, fleet: Fleet, job: Prepared[Work]
) -> None:
    """pgqueuer 110: a cancelled job was booked as a success."""
    worker = fleet.start()
    job_id = start_one(conn, fleet, job, Work(n=1, seconds=60))
    assert "asked to stop" in run("jobs", "cancel", job_id).stdout
    eventually(lambda: left(conn) == (0, 0, 0), 15)
    assert outcomes(conn) == {"cancelled"}
    worker.says(rf"cancelled {job.name} {job_id} ")
    assert fleet.effects.all("end") == []


def test_a_thread_is_told_and_its_failure_is_no_retry(run: Run, conn: Connection, fleet: Fleet) -> None:
    fleet.start(app=HEEDS)
    job_id = start_one(conn, fleet, heeds.heeds, Work(n=1))
    run("jobs", "cancel", job_id)
    fleet.effects.wait("told")
    eventually(lambda: left(conn) == (0, 0, 0), 15)
    assert outcomes(conn) == {"cancelled"}
    assert len(fleet.effects.all("start")) == 1


def test_a_job_cancelled_before_its_worker_was_killed_never_runs_again(
    run: Run, conn: Connection, fleet: Fleet
) -> None:
    """river discussion 1603: a rescue that overlooked the cancel ran the job again, ten times of ten."""
    first = fleet.start()
    job_id = start_one(conn, fleet, every.work, Work(n=1, seconds=60))
    run("jobs", "cancel", job_id)
    first.kill()
    fleet.lose(first.pid)
    fleet.start()
    eventually(lambda: left(conn) == (0, 0, 0), 20)
    assert len(fleet.effects.all("start")) == 1
    assert "cancelled" in outcomes(conn)


def test_a_job_cancelled_after_its_worker_was_killed_never_runs_again(
    run: Run, conn: Connection, fleet: Fleet
) -> None:
    """river discussion 1603: it ran again."""
    first = fleet.start()
    job_id = start_one(conn, fleet, every.work.using(key="k"), Work(n=1, seconds=60))
    every.work.using(key="k").enqueue(conn, Work(n=2))
    conn.commit()
    first.kill()
    run("jobs", "cancel", job_id)
    fleet.lose(first.pid)
    fleet.start()
    assert [e.n for e in fleet.effects.wait("end")] == [2]
    eventually(lambda: left(conn) == (0, 0, 0), 20)
    assert fleet.effects.ns("start") == [1, 2]


def test_a_claimed_job_that_has_not_started_is_dropped_unrun(
    run: Run, conn: Connection, fleet: Fleet
) -> None:
    fleet.start("--concurrency=1", "--prefetch=5", app=HEEDS)
    job_id = start_one(conn, fleet, heeds.heeds, Work(n=1))
    behind = heeds.heeds.enqueue(conn, Work(n=2))
    conn.commit()
    eventually(lambda: _claimed(conn, behind.id), 10)
    assert run("jobs", "cancel", behind.id, job_id).stdout.count("asked to stop") == 2
    fleet.effects.wait("told")
    eventually(lambda: left(conn) == (0, 0, 0), 15)
    assert fleet.effects.ns("start") == [1]


def _claimed(conn: Connection, job_id: int) -> bool:
    row = conn.execute("SELECT lease <> 0 FROM pgqueue.job WHERE id = %s", [job_id]).fetchone()
    conn.commit()
    return row == (True,)


def test_waiting_jobs_are_reprioritised_moved_and_edited_by_id(run: Run, conn: Connection) -> None:
    one, two = enqueue(conn, 2, payload={"n": 1})
    conn.commit()
    assert run("jobs", "reprioritise", one, two, 0).stdout == f"{one}\tchanged\n{two}\tchanged\n"
    assert run("jobs", "move", one, "--to", "bulk").stdout == f"{one}\tchanged\n"
    edited = run("jobs", "edit", one, '{"n": 2}')
    assert "not checked" in edited.stderr
    found = conn.execute("SELECT id, queue, priority, payload FROM pgqueue.job ORDER BY id").fetchall()
    assert found == [(one, "bulk", 0, {"n": 2}), (two, "default", 0, {"n": 1})]
    run("jobs", "reprioritise", 2**40, 0, code=1)
    run("jobs", "reprioritise", one, 10, code=2)
    assert "there is no job" in run("jobs", "edit", 2**40, "{}", code=1).stderr


def test_jobs_are_moved_by_name_and_queue_after_a_dry_run(run: Run, conn: Connection, dsn: str) -> None:
    enqueue(conn, 3, name="old-name")
    enqueue(conn, 1)
    conn.commit()
    with Holder(dsn) as holder:
        holder.claim(1)  # of the other name
        assert "would move 3" in run("jobs", "move", "--name", "old-name", "--to", "attic").stdout
        assert "moved 3" in run("jobs", "move", "--name", "old-name", "--to", "attic", "--yes").stdout
    counts = conn.execute("SELECT queue, count(*) FROM pgqueue.job GROUP BY 1 ORDER BY 1").fetchall()
    assert counts == [("attic", 3), ("default", 1)]
    run("jobs", "move", "--to", "attic", code=1)
    run("jobs", "move", 1, "--name", "x", "--to", "attic", code=1)


def test_an_edited_payload_is_checked_against_its_handler(run: Run, conn: Connection) -> None:
    (job_id,) = enqueue(conn, payload={"n": 1})
    conn.commit()
    every_app = "tests.process.apps.every:app"
    assert "payload of 'work'" in run("jobs", "edit", job_id, '{"n": "x"}', "--app", every_app, code=1).stderr
    run("jobs", "edit", job_id, '{"n": 3}', "--app", every_app)
    assert conn.execute("SELECT payload FROM pgqueue.job").fetchone() == ({"n": 3},)
