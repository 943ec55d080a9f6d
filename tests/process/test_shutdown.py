"""A worker that is told to stop gives back what it holds, finishes what it can, and leaves at once when told twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psycopg.sql
import pytest

from tests.process.apps import every
from tests.process.apps.every import Work
from tests.process.apps.fleet import Fleet
from tests.server import Connection, Server
from tests.waiting import eventually


def running(pid: int) -> bool:
    """Say whether a process is there and no zombie."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:4]
    except OSError:
        return False


def children(pid: int) -> set[int]:
    """Return the worker processes under a parent."""
    return {int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def leased(conn: Connection) -> list[tuple[object, ...]]:
    rows = conn.execute(
        "SELECT id FROM pgqueue.job WHERE lease <> 0 OR deadline <> '-infinity' UNION ALL"
        " SELECT 0 FROM pgqueue.lane WHERE lease <> 0 AND deadline > now()"
    ).fetchall()
    conn.rollback()
    return rows


def attempts(conn: Connection) -> list[object]:
    rows = conn.execute("SELECT attempt FROM pgqueue.job ORDER BY id").fetchall()
    conn.rollback()
    return [row[0] for row in rows]


def in_flight(conn: Connection) -> int:
    row = conn.execute("SELECT count(*) FROM pgqueue.job WHERE lease <> 0").fetchone()
    conn.rollback()
    return int(str(row[0])) if row else 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_and_prefetched_jobs_are_claimable_after_exit_with_their_attempts(
    fleet: Fleet, conn: Connection, number: signal.Signals
) -> None:
    every.work.enqueue_many(conn, [Work(n=n, seconds=60) for n in range(5)])
    every.work.enqueue_many(conn, [Work(n=n) for n in range(5, 15)])
    conn.commit()
    worker = fleet.start("--concurrency=5", "--prefetch=10", "--grace=1s")
    fleet.effects.wait("start", 5)
    eventually(lambda: in_flight(conn) == 15)
    worker.signal(number)
    worker.says("draining 5")
    worker.says("released 10")
    assert worker.wait() == 0
    assert leased(conn) == []
    assert attempts(conn) == [0] * 15
    assert "drained released=15" in worker.log
    assert "Traceback" not in worker.log
    assert fleet.effects.all("end") == []
    assert conn.execute("SELECT count(*) FROM pgqueue.attempt_log").fetchone() == (0,)
    assert conn.execute("SELECT count(*) FROM pgqueue.worker").fetchone() == (0,)
    conn.execute("UPDATE pgqueue.job SET payload = '{}'")
    conn.commit()
    fleet.start()  # nothing waits for a lease to run out
    fleet.effects.wait("end", 15)


def test_running_jobs_that_end_within_the_grace_are_acked(fleet: Fleet, conn: Connection) -> None:
    gate = fleet.gate("open")
    for kind in (every.work, every.awaits, every.computes):
        kind.enqueue(conn, Work(n=1, gate=str(gate)))
    every.work.using(key="k").enqueue_many(conn, [Work(n=n, gate=str(gate)) for n in (2, 3)])
    conn.commit()
    worker = fleet.start("--grace=30s")
    fleet.effects.wait("start", 4)
    worker.signal(signal.SIGTERM)
    worker.says("draining 4")
    gate.touch()
    assert worker.wait() == 0
    assert sorted(fleet.effects.ns("end")) == [1, 1, 1, 2]
    assert leased(conn) == []
    assert attempts(conn) == [0]  # the second job of the key


def test_at_the_end_of_grace_async_handlers_are_cancelled_and_children_killed(
    fleet: Fleet, conn: Connection
) -> None:
    every.awaits.using(max_attempts=1).enqueue(conn, Work(n=1, seconds=60))
    every.computes.using(max_attempts=1).enqueue(conn, Work(n=2, seconds=60))
    every.work.using(key="k", max_attempts=1).enqueue(conn, Work(n=3, seconds=60))
    conn.commit()
    worker = fleet.start("--grace=0.3s")
    began = fleet.effects.wait("start", 3)
    assert worker.stop() == 0
    assert fleet.effects.ns("cancelled") == [1]
    assert leased(conn) == []
    assert attempts(conn) == [0, 0, 0]
    (child,) = (e.pid for e in began if e.pid != worker.pid)
    eventually(lambda: not running(child))
    assert "Traceback" not in worker.log


def test_a_second_signal_ends_the_worker_at_once(fleet: Fleet, conn: Connection) -> None:
    every.work.enqueue(conn, Work(n=1, seconds=60))
    conn.commit()
    worker = fleet.start("--grace=60s")
    fleet.effects.wait("start")
    worker.signal(signal.SIGTERM)
    worker.says("draining 1")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_still_loads_its_app_ends_in_order(
    fleet: Fleet, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "loads_for_long.py").write_text(
        "import sys, time\nprint('loading', file=sys.stderr, flush=True)\ntime.sleep(60)\n"
    )
    worker = fleet.launch(app="loads_for_long:app", env={"PYTHONPATH": str(tmp_path)})
    worker.says("loading")
    worker.signal(number)
    assert worker.wait() == 0
    assert "Traceback" not in worker.log


def test_a_worker_without_work_stops_at_once_and_says_so(fleet: Fleet) -> None:
    worker = fleet.start()
    assert worker.stop() == 0
    assert "started queues=default concurrency=8 jobs=" in worker.log
    assert "connections=2" in worker.log
    assert "draining 0" in worker.log
    assert "drained released=0" in worker.log


def test_a_worker_whose_database_is_gone_stops_within_its_grace(
    fleet: Fleet, conn: Connection, server: Server
) -> None:
    every.work.enqueue(conn, Work(n=1, seconds=60))
    conn.commit()
    worker = fleet.start("--grace=0.5s")
    fleet.effects.wait("start")
    with server.admin() as admin:
        name = psycopg.sql.Identifier(conn.info.dbname)
        admin.execute(psycopg.sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> %s",
            [conn.info.dbname, conn.info.backend_pid],
        )
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert "Traceback" not in worker.log


def test_several_processes_are_kept_running_and_stop_together(fleet: Fleet, conn: Connection) -> None:
    gate = fleet.gate("open")
    parent = fleet.launch("--processes=3", "--concurrency=1", "--prefetch=0", "--grace=20s")
    every.work.enqueue_many(conn, [Work(n=n, gate=str(gate)) for n in range(3)])
    conn.commit()
    began = fleet.effects.wait("start", 3)
    pids = {e.pid for e in began}
    assert len(pids) == 3
    assert pids == children(parent.pid)
    victim = began[0]
    os.kill(victim.pid, signal.SIGKILL)
    parent.says(rf"worker process {victim.pid} ended with -9; starting again")
    fleet.lose(victim.pid)
    again = fleet.effects.wait("start", 4)[3]
    assert (again.n, again.attempt) == (victim.n, 2)
    parent.says("recovered 1 jobs")
    parent.signal(signal.SIGTERM)
    eventually(lambda: parent.log.count("draining 1") == 3)
    gate.touch()
    assert parent.wait() == 0
    assert sorted(fleet.effects.ns("end")) == [0, 1, 2]
    assert attempts(conn) == []
    assert not any(running(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_is_no_second_signal(
    fleet: Fleet, conn: Connection, number: signal.Signals
) -> None:
    gate = fleet.gate("open")
    every.work.enqueue(conn, Work(n=1, gate=str(gate)))
    every.computes.enqueue(conn, Work(n=2, gate=str(gate)))
    conn.commit()
    parent = fleet.launch("--processes=2", "--grace=20s")
    fleet.effects.wait("start", 2)
    eventually(lambda: parent.log.count("started queues=") == 2)  # one may run both
    os.killpg(parent.pid, number)  # as Ctrl-C and service managers do
    eventually(lambda: parent.log.count("draining") == 2)
    gate.touch()
    assert parent.wait() == 0
    assert sorted(fleet.effects.ns("end")) == [1, 2]
    assert attempts(conn) == []


def test_processes_end_with_a_parent_that_is_killed(fleet: Fleet, conn: Connection) -> None:
    every.work.enqueue(conn, Work(n=1, seconds=60))
    every.computes.enqueue(conn, Work(n=2, seconds=60))
    conn.commit()
    parent = fleet.launch("--processes=2", "--grace=0.5s")
    began = fleet.effects.wait("start", 2)
    below = {e.pid for e in began} | children(parent.pid)
    parent.kill()
    eventually(lambda: not any(running(pid) for pid in below))
    assert leased(conn) == []


def test_a_second_signal_to_the_parent_ends_all_processes_at_once(fleet: Fleet, conn: Connection) -> None:
    every.work.enqueue(conn, Work(n=1, seconds=60))
    conn.commit()
    parent = fleet.launch("--processes=2", "--grace=60s")
    fleet.effects.wait("start")
    below = children(parent.pid)
    parent.signal(signal.SIGTERM)
    parent.says("draining 1")
    parent.signal(signal.SIGTERM)
    assert parent.wait() == 128 + signal.SIGTERM
    eventually(lambda: not any(running(pid) for pid in below))


def test_a_killed_worker_takes_its_child_processes_along(fleet: Fleet, conn: Connection) -> None:
    every.computes.enqueue(conn, Work(n=1, seconds=60))
    conn.commit()
    worker = fleet.start()
    (began,) = fleet.effects.wait("start")
    worker.kill()
    eventually(lambda: not running(began.pid))


def test_a_line_tells_of_each_failure_and_on_demand_of_each_job(fleet: Fleet, conn: Connection) -> None:
    every.work.using(max_attempts=2).enqueue(conn, Work(n=1, fails=2))
    every.work.enqueue(conn, Work(n=2))
    conn.commit()
    worker = fleet.start("--log-jobs")
    worker.says(
        r"WARNING pgqueue: retry work 1 attempt=1 in=\d+ms after=0\.\ds: RuntimeError: attempt 1 was to fail"
    )
    worker.says(r"ERROR pgqueue: dead work 1 attempt=2 in=\d+ms: RuntimeError: attempt 2 was to fail")
    worker.says(r"INFO pgqueue: ok work 2 attempt=1 in=\d+ms")
