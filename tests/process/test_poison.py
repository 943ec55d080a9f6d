"""A job that kills its worker is buried alone; the jobs that were claimed with it run."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.process.apps import every
from tests.process.apps.every import Work
from tests.process.apps.fleet import Fleet, Process
from tests.server import Connection
from tests.waiting import eventually

FOREVER = 99


class Supervisor:
    """Starts the worker again whenever it has died, as an orchestrator does."""

    def __init__(self, fleet: Fleet, conn: Connection, *options: str) -> None:
        self._fleet = fleet
        self._conn = conn
        self._options = options
        self._worker: Process | None = None
        self.starts = 0

    def until_done(self, timeout: float = 60.0) -> None:
        """Keep a worker running until no job is left."""
        eventually(self._round, timeout)

    def _round(self) -> bool:
        if self._worker is None or self._worker.process.poll() is not None:
            if self._worker:
                self._fleet.lose(self._worker.pid)
            self._worker = self._fleet.launch(*self._options)
            self.starts += 1
        row = self._conn.execute("SELECT count(*) FROM pgqueue.job").fetchone()
        self._conn.rollback()
        return row == (0,)


def dead(conn: Connection) -> list[tuple[object, ...]]:
    return conn.execute("SELECT id, reason, attempt, lost FROM pgqueue.dead_job ORDER BY id").fetchall()


@pytest.mark.parametrize("place", [1, 3, 500])
def test_poison_among_500_claimed_jobs_dies_alone(fleet: Fleet, conn: Connection, place: int) -> None:
    jobs = every.work.using(max_attempts=3).enqueue_many(
        conn, [Work(n=n, dies=FOREVER if n == place else 0) for n in range(1, 501)]
    )
    conn.commit()
    poison = jobs[place - 1].id
    Supervisor(fleet, conn, "--prefetch=500").until_done()
    ((found, reason, _, _),) = dead(conn)
    assert (found, reason) == (poison, "worker lost")
    assert set(fleet.effects.ns("end")) == set(range(1, 501)) - {place}
    starts = Counter(fleet.effects.ns("start"))
    assert starts.pop(place) == 3
    assert max(e.attempt for e in fleet.effects.all("start") if e.n != place) <= 3


@pytest.mark.parametrize(("max_attempts", "runs"), [(1, 3), (5, 5)])
def test_poison_runs_max_attempts_times_but_at_least_three(
    fleet: Fleet, conn: Connection, max_attempts: int, runs: int
) -> None:
    every.work.using(max_attempts=max_attempts).enqueue(conn, Work(n=1, dies=FOREVER))
    conn.commit()
    Supervisor(fleet, conn).until_done()
    assert [row[1] for row in dead(conn)] == ["worker lost"]
    assert len(fleet.effects.all("start")) == runs
    row = conn.execute("SELECT attempts FROM pgqueue.dead_job").fetchone()
    assert row is not None
    assert [a["outcome"] for a in row[0]] == ["lost"] * runs  # type: ignore[attr-defined]


def test_poison_at_the_head_of_a_key_lets_the_other_49_run_once_and_in_order(
    fleet: Fleet, conn: Connection
) -> None:
    every.work.using(key="customer-1", max_attempts=3).enqueue_many(
        conn, [Work(n=n, dies=FOREVER if n == 1 else 0) for n in range(1, 51)]
    )
    conn.commit()
    Supervisor(fleet, conn).until_done()
    assert [row[1] for row in dead(conn)] == ["worker lost"]
    assert fleet.effects.ns("end") == list(range(2, 51))
    assert Counter(e.n for e in fleet.effects.all("start") if e.n > 1) == dict.fromkeys(range(2, 51), 1)


def test_a_job_that_survives_its_worker_s_death_runs_to_its_end(fleet: Fleet, conn: Connection) -> None:
    every.work.using(max_attempts=1).enqueue(conn, Work(n=1, dies=2))
    conn.commit()
    Supervisor(fleet, conn).until_done()
    assert dead(conn) == []
    assert [e.attempt for e in fleet.effects.all("end")] == [3]
