"""Work of hours is cut into steps and checkpoints: whatever is killed, it goes on where it was."""

from __future__ import annotations

import pytest

from pgqueue import App
from tests.process.apps import steps
from tests.process.apps.fleet import Fleet
from tests.process.apps.steps import PAGES, Work
from tests.server import Connection
from tests.waiting import eventually

APP = "tests.process.apps.steps:app"


def left(conn: Connection) -> int:
    row = conn.execute("SELECT count(*) FROM pgqueue.job").fetchone()
    conn.rollback()
    return int(str(row[0])) if row else 0


def pages(fleet: Fleet, n: int) -> list[tuple[int, str]]:
    """Return the (attempt, page) that a job worked on, in order."""
    return [(e.attempt, e.note) for e in fleet.effects.all("page") if e.n == n]


def test_a_long_job_in_steps_resumes_at_the_step_and_page_at_which_its_worker_was_killed(
    fleet: Fleet, conn: Connection
) -> None:
    """activepieces 15130, hindsight 2675: hours of work from the beginning, again and again."""
    work = Work(n=1, dies_at=3)
    chain = steps.extract.using(
        then=[steps.transform.using(then=[steps.load.with_payload(work)]).with_payload(work)]
    )
    chain.enqueue(conn, work)
    conn.commit()
    first = fleet.start(app=APP)
    first.wait()
    fleet.lose(first.pid)
    assert fleet.effects.ns("extract") == [1]
    fleet.start(app=APP)
    fleet.effects.wait("load")
    eventually(lambda: left(conn) == 0)
    assert [e.attempt for e in fleet.effects.all("extract")] == [1]
    assert pages(fleet, 1) == [(1, str(p)) for p in range(4)] + [(2, str(p)) for p in range(3, PAGES)]
    assert len(fleet.effects.all("transform")) == len(fleet.effects.all("load")) == 1


@pytest.mark.parametrize("name", ["paged", "paged-async", "paged-process"])
def test_the_next_attempt_goes_on_from_the_checkpoint_whatever_the_kind_of_handler(
    fleet: Fleet, conn: Connection, name: str
) -> None:
    steps.app.enqueue(conn, name, Work(n=1, fails_at=4))
    conn.commit()
    fleet.start(app=APP)
    fleet.effects.wait("end")
    eventually(lambda: left(conn) == 0)
    assert pages(fleet, 1) == [(1, str(p)) for p in range(5)] + [(2, str(p)) for p in range(4, PAGES)]


def test_a_child_process_that_is_killed_loses_no_checkpoint(fleet: Fleet, conn: Connection) -> None:
    steps.paged_process.enqueue(conn, Work(n=1, dies_at=2))
    conn.commit()
    fleet.start(app=APP)
    fleet.effects.wait("end")
    eventually(lambda: left(conn) == 0)
    assert pages(fleet, 1) == [(1, str(p)) for p in range(3)] + [(2, str(p)) for p in range(2, PAGES)]


def test_a_deployment_restores_the_attempt_and_keeps_the_checkpoint(fleet: Fleet, conn: Connection) -> None:
    gate = fleet.gate("open")
    ref = steps.paged.enqueue(conn, Work(n=1, gate=str(gate)))
    conn.commit()
    first = fleet.start("--grace=1s", app=APP)

    def all_pages() -> bool:
        row = conn.execute("SELECT state::text FROM pgqueue.progress").fetchone()
        conn.rollback()
        return row == (str(PAGES),)

    eventually(all_pages)
    first.stop()
    gate.touch()
    fleet.start(app=APP)
    fleet.effects.wait("end")
    eventually(lambda: left(conn) == 0)
    assert len(pages(fleet, 1)) == PAGES
    assert fleet.effects.all("end")[0].attempt == 1
    assert App().status(conn, ref) is None


def test_what_a_child_process_returns_and_adds_is_written_with_its_ack(
    fleet: Fleet, conn: Connection
) -> None:
    ref = steps.computes.enqueue(conn, Work(n=12))
    conn.commit()
    fleet.start(app=APP)
    loaded = fleet.effects.wait("load")
    eventually(lambda: left(conn) == 0)
    assert loaded[0].note == str(ref.id)
    status = steps.app.status(conn, ref)
    assert status is not None
    assert (status.state, status.result) == ("done", 144)
