"""What only a sweep finds runs beside a backlog of slow jobs, and a suspect that runs alone stops no fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pgqueue import sweep
from pgqueue.config import WorkerSettings
from pgqueue.worker import Worker
from tests.process.apps import every
from tests.process.apps.effects import Effects
from tests.process.apps.every import Work
from tests.server import Connection
from tests.waiting import eventually

Start = Callable[..., Worker]


@pytest.fixture
def start(dsn: str, effects: Effects) -> Iterator[Start]:
    """Give a way to start workers in this process."""
    with ExitStack() as stack:

        def begin(**settings: Any) -> Worker:
            worker = Worker(every.app, dsn, WorkerSettings(**{"visibility": 60.0, "grace": 0.0, **settings}))
            worker.start()
            stack.callback(worker.stop)
            return worker

        yield begin


def lost(conn: Connection, times: int, work: Work) -> int:
    """Enqueue a job whose worker was lost so many times, and again just now."""
    job = every.work.enqueue(conn, work)
    conn.execute(
        "UPDATE pgqueue.job SET lease = 7, deadline = now() - interval '1 s', attempt = %s, lost = %s,"
        " claimed_at = now() WHERE id = %s",
        [times, times - 1, job.id],
    )
    return job.id


@pytest.mark.parametrize("slots", [1, 2])
def test_lost_late_and_keyed_jobs_run_while_slots_are_never_free_for_long(
    conn: Connection, start: Start, effects: Effects, slots: int
) -> None:
    """A sweep that found no free slot used to find none the next time either, and took its turn from the others."""
    lost(conn, 1, Work(n=-1))
    late = every.work.enqueue(conn, Work(n=-2))
    every.work.enqueue_many(conn, [Work(n=n, seconds=1.0) for n in range(400)])
    conn.execute(
        "UPDATE pgqueue.job SET pos = NULL, run_at = now() + interval '1 day' WHERE id = %s", [late.id]
    )
    conn.commit()
    start(concurrency=slots)
    effects.wait("start", 3)
    every.work.using(key="k").enqueue(conn, Work(n=-3))
    conn.execute("UPDATE pgqueue.job SET pos = 1, run_at = NULL WHERE id = %s", [late.id])  # below the floor
    conn.commit()
    eventually(lambda: {-1, -2, -3} <= set(effects.ns("start")))
    begun = effects.ns("start")
    assert max(begun.index(-1), begun.index(-2)) < 4 + 5 * slots


def test_one_process_of_a_fleet_empties_its_hand_for_a_suspect_and_the_others_go_on(
    conn: Connection, start: Start, effects: Effects, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    for _ in range(3):
        start(concurrency=2, prefetch=0)
    every.work.enqueue_many(conn, [Work(n=n, gate=str(gate)) for n in range(3)])
    conn.commit()
    effects.wait("start", 3)
    suspect = lost(conn, 2, Work(n=100, gate=str(gate)))
    conn.commit()
    eventually(lambda: stands(conn))
    every.work.enqueue_many(conn, [Work(n=n) for n in range(10, 40)])
    conn.commit()
    eventually(lambda: {*range(10, 40)} <= set(effects.ns("end")))
    gate.touch()
    eventually(lambda: 100 in effects.ns("end"))
    assert effects.ns("start").count(100) == 1
    eventually(lambda: not stands(conn))
    log = conn.execute("SELECT outcome FROM pgqueue.attempt_log WHERE job_id = %s", [suspect]).fetchall()
    assert log in ([], [("lost",)])  # it went with the job that ended well


def test_a_process_that_cannot_empty_its_hand_goes_on_claiming(
    conn: Connection, start: Start, effects: Effects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a handler of hours in hand, a suspect kept the queue of a single worker from everything else."""
    monkeypatch.setattr(sweep, "EMPTYING", 0.5)
    gate = tmp_path / "gate"
    start(concurrency=2, prefetch=0)
    every.work.enqueue(conn, Work(n=1, gate=str(gate)))
    conn.commit()
    effects.wait("start")
    lost(conn, 2, Work(n=100))
    conn.commit()
    eventually(lambda: stands(conn))
    every.work.enqueue(conn, Work(n=2))
    conn.commit()
    eventually(lambda: 2 in effects.ns("end"))
    assert 100 not in effects.ns("start")
    gate.touch()
    eventually(lambda: 100 in effects.ns("end"))


def stands(conn: Connection) -> bool:
    """Tell whether a process was elected to run a suspect."""
    row = conn.execute(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1885827445 AND granted"
        " AND objid = hashtext('alone default')::bigint & x'ffffffff'::bigint"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    ).fetchone()
    conn.rollback()
    return row == (1,)
