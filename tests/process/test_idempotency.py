"""Jobs of one idempotency key in worker processes that run at once, are killed and stopped: one effect, never none."""

from __future__ import annotations

import pytest

from pgqueue import dead
from pgqueue.connection import execute
from tests.process.apps import every
from tests.process.apps.every import Work
from tests.process.apps.fleet import Fleet
from tests.server import Connection
from tests.waiting import eventually

KINDS = ["work", "awaits", "computes", "books"]


@pytest.fixture(autouse=True)
def _booked(conn: Connection) -> None:
    conn.execute("CREATE TABLE public.booked (n int)")
    conn.commit()


def left(conn: Connection) -> int:
    row = conn.execute("SELECT count(*) FROM pgqueue.job").fetchone()
    conn.rollback()
    return int(str(row[0])) if row else 0


def enqueue(conn: Connection, kind: str, *works: Work) -> None:
    for work in works:
        every.app.types[kind].using(idempotency_key="order-8842").enqueue(conn, work)
    conn.commit()


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_jobs_of_a_key_in_two_processes_one_runs_and_the_other_waits(
    fleet: Fleet, conn: Connection, kind: str
) -> None:
    """bensheldon/good_job#1335, wavect/semaprax#192: one effect was asked for twice and had twice."""
    gate = fleet.gate("gate")
    enqueue(conn, kind, *(Work(n=n, gate=str(gate)) for n in range(4)))
    workers = [fleet.start("--concurrency=2") for _ in range(2)]
    fleet.effects.wait("start")

    def others_wait() -> bool:
        row = conn.execute(
            "SELECT count(*) FROM pgqueue.job WHERE run_at IS NOT NULL AND attempt = 0"
        ).fetchone()
        conn.rollback()
        return row == (3,)

    eventually(others_wait)
    assert len(fleet.effects.all("start")) == 1
    gate.touch()
    eventually(lambda: left(conn) == 0)
    assert len(fleet.effects.all("end")) == len(fleet.effects.all("start")) == 1
    eventually(lambda: sum(worker.log.count("already applied") for worker in workers) == 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_killed_between_effect_and_acknowledgement_leaves_the_key_to_the_next_run(
    fleet: Fleet, conn: Connection, kind: str
) -> None:
    """vectorize-io/hindsight#2675, celery/celery#5935: a crash is not swallowed, nor its effect had twice."""
    gate = fleet.gate("gate")
    enqueue(conn, kind, Work(n=1, gate=str(gate)))
    first = fleet.start()
    fleet.effects.wait("start")
    enqueue(conn, kind, Work(n=2, gate=str(gate)))
    first.kill()
    fleet.lose(first.pid)
    assert conn.execute("SELECT count(*) FROM pgqueue.effect WHERE applied_at IS NOT NULL").fetchone() == (0,)
    conn.rollback()
    gate.touch()
    second = fleet.start()
    eventually(lambda: left(conn) == 0)
    assert len(fleet.effects.all("start")) == 2
    assert len(fleet.effects.all("end")) == 1
    second.says("already applied")
    assert second.log.count("already applied") == 1
    if kind == "books":
        assert conn.execute("SELECT count(*) FROM public.booked").fetchone() == (1,)


def test_a_worker_stopped_past_its_lease_books_nothing_beside_the_job_that_took_the_key(
    fleet: Fleet, conn: Connection
) -> None:
    """rails/solid_queue PR#761, oban-bg/oban#532: the one that came back finished, too."""
    gate = fleet.gate("gate")
    enqueue(conn, "books", Work(n=1, gate=str(gate)))
    stopped = fleet.start()
    fleet.effects.wait("start")
    stopped.freeze()
    fleet.lose(stopped.pid)
    enqueue(conn, "books", Work(n=2))
    fleet.start()
    fleet.effects.wait("start", 2)
    gate.touch()
    fleet.effects.wait("end")
    stopped.thaw()
    eventually(lambda: left(conn) == 0)
    fleet.effects.wait("end", 2)  # the one that was stopped, too, came to its end
    stopped.says("lease")
    assert conn.execute("SELECT n FROM public.booked").fetchall() in ([(1,)], [(2,)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_from_the_dead_letters_runs_again(fleet: Fleet, conn: Connection, kind: str) -> None:
    """oban-bg/oban#424: what the dead job left behind kept everything of its key away."""
    every.app.types[kind].using(idempotency_key="k", max_attempts=1).enqueue(conn, Work(n=1, fails=1))
    conn.commit()
    fleet.start()
    eventually(lambda: conn.execute("SELECT count(*) FROM pgqueue.dead_job").fetchone() == (1,))
    conn.rollback()
    execute(conn, dead.replay(dead.Filter(name=kind), payload='{"n": 2}'))
    conn.commit()
    assert [e.n for e in fleet.effects.wait("end")] == [2]
    eventually(lambda: left(conn) == 0)
    assert conn.execute("SELECT count(*) FROM pgqueue.effect WHERE applied_at IS NOT NULL").fetchone() == (1,)
