"""A live worker keeps its jobs however its handlers behave; a dead one loses them, and nothing is done twice."""

from __future__ import annotations

import os

from tests.process.apps import every
from tests.process.apps.every import Work
from tests.process.apps.fleet import Fleet
from tests.server import Connection
from tests.waiting import eventually


def left(conn: Connection) -> int:
    row = conn.execute("SELECT count(*) FROM pgqueue.job").fetchone()
    conn.rollback()
    return int(str(row[0])) if row else 0


def acked(conn: Connection) -> int:
    """Return how many jobs were acknowledged, by the counters that the ack itself writes."""
    row = conn.execute(
        "SELECT coalesce((SELECT sum(n) FROM pgqueue.tally WHERE outcome = 'ok'), 0)"
        " + coalesce((SELECT sum(n) FROM pgqueue.tally_minute WHERE outcome = 'ok'), 0)"
    ).fetchone()
    conn.rollback()
    return int(str(row[0])) if row else 0


def test_handlers_that_block_their_thread_loop_or_interpreter_keep_their_lease(
    fleet: Fleet, conn: Connection
) -> None:
    gate, pipe = fleet.gate("open"), fleet.gate("pipe")
    os.mkfifo(pipe)
    every.work.enqueue(conn, Work(n=1, gate=str(gate)))
    every.blocks_loop.enqueue(conn, Work(n=2, gate=str(gate)))
    every.holds_gil.enqueue(conn, Work(n=3, gate=str(pipe)))
    conn.commit()
    one, other = fleet.start("--visibility=9s"), fleet.start("--visibility=9s")
    fleet.effects.wait("start", 3)

    def prolonged() -> bool:
        rows = conn.execute("SELECT deadline > claimed_at + interval '11 s' FROM pgqueue.job").fetchall()
        conn.rollback()
        return rows == [(True,)] * 3

    eventually(prolonged)
    gate.touch()
    pipe.write_bytes(b"")
    fleet.effects.wait("end", 3)
    eventually(lambda: left(conn) == 0)
    assert sorted(fleet.effects.ns("start")) == [1, 2, 3]
    assert "lost" not in one.log + other.log
    assert one.stop() == 0
    assert other.stop() == 0


def test_a_job_without_timeout_outlives_the_timeout_of_its_type(fleet: Fleet, conn: Connection) -> None:
    every.short.using(timeout=float("inf")).enqueue(conn, Work(n=1, seconds=1.5))
    every.endless.enqueue(conn, Work(n=2, seconds=1.5))
    conn.commit()
    fleet.start()
    fleet.effects.wait("end", 2)
    eventually(lambda: left(conn) == 0)
    assert sorted(fleet.effects.ns("start")) == [1, 2]
    assert conn.execute("SELECT count(*) FROM pgqueue.dead_job").fetchone() == (0,)


def test_the_lease_of_an_aged_job_grows_so_that_it_is_seldom_written(fleet: Fleet, conn: Connection) -> None:
    gate = fleet.gate("open")
    job = every.endless.enqueue(conn, Work(n=1, gate=str(gate)))
    conn.commit()
    fleet.start("--visibility=3s")
    fleet.effects.wait("start")
    conn.execute("UPDATE pgqueue.job SET claimed_at = claimed_at - interval '1 hour'")
    conn.commit()

    def deadline() -> object:
        row = conn.execute(
            "SELECT deadline FROM pgqueue.job WHERE id = %s AND deadline > now() + interval '4 min'", [job.id]
        ).fetchone()
        conn.rollback()
        return row and row[0]

    once = eventually(deadline)
    every.work.enqueue(conn, Work(n=2, seconds=3.5))  # three heartbeats
    conn.commit()
    fleet.effects.wait("end")
    assert deadline() == once
    gate.touch()
    eventually(lambda: left(conn) == 0)


def test_the_result_of_a_worker_that_was_stopped_past_its_lease_is_refused(
    fleet: Fleet, conn: Connection
) -> None:
    gate = fleet.gate("open")
    every.work.enqueue(conn, Work(n=1, gate=str(gate)))
    conn.commit()
    sleeper = fleet.start()
    fleet.effects.wait("start")
    sleeper.freeze()
    fleet.lose(sleeper.pid)
    fleet.start()
    starts = fleet.effects.wait("start", 2)
    assert [e.attempt for e in starts] == [1, 2]
    sleeper.thaw()
    gate.touch()
    sleeper.says(r"lease lost on 1 jobs, their results were dropped: 1\b")
    fleet.effects.wait("end", 2)
    eventually(lambda: left(conn) == 0)
    assert acked(conn) == 1
    assert len(fleet.effects.all("start")) == 2


def test_a_late_result_does_not_finish_the_attempt_that_took_over(fleet: Fleet, conn: Connection) -> None:
    gate = fleet.gate("open")
    every.work.enqueue(conn, Work(n=1, gate=str(gate)))
    conn.commit()
    sleeper = fleet.start()
    fleet.effects.wait("start")
    sleeper.freeze()
    fleet.lose(sleeper.pid)
    successor = fleet.start()
    fleet.effects.wait("start", 2)
    successor.freeze()  # so that it cannot finish first
    gate.touch()
    sleeper.thaw()
    sleeper.says("lease lost on 1 jobs")
    assert left(conn) == 1
    sleeper.kill()
    successor.thaw()
    eventually(lambda: left(conn) == 0)
    assert acked(conn) == 1


def test_the_job_of_a_killed_worker_runs_again_within_its_lease_and_a_sweep(
    fleet: Fleet, conn: Connection
) -> None:
    every.work.enqueue(conn, Work(n=1, gate=str(fleet.gate("never"))))
    every.work.enqueue(conn, Work(n=2, gate=str(fleet.gate("never"))))
    conn.commit()
    first = fleet.start("--visibility=4s")
    fleet.effects.wait("start", 2)
    other = fleet.start()
    first.kill()
    conn.execute("DELETE FROM pgqueue.worker")  # recovery rests on the job row alone
    conn.commit()
    again = [e for e in fleet.effects.wait("start", 4) if e.attempt == 2]
    assert sorted(e.n for e in again) == [1, 2]
    other.says("recovered [12] jobs whose worker was lost")
    log = conn.execute("SELECT job_id, attempt, outcome FROM pgqueue.attempt_log ORDER BY job_id").fetchall()
    assert log == [(1, 1, "lost"), (2, 1, "lost")]
