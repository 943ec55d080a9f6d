"""Several workers on one database: keys keep their order through a crash, and waiting costs next to nothing."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

from tests.process.apps import every
from tests.process.apps.every import Work
from tests.process.apps.fleet import Fleet
from tests.server import Connection
from tests.waiting import eventually

KEYS = 6


def left(conn: Connection) -> int:
    row = conn.execute("SELECT count(*) FROM pgqueue.job").fetchone()
    conn.rollback()
    return int(str(row[0])) if row else 0


def test_three_workers_keep_the_order_of_each_key_though_one_is_killed(
    fleet: Fleet, conn: Connection
) -> None:
    for n in range(240):
        kind = every.awaits if n % 4 == 0 else every.work
        kind.using(key=f"customer-{n % KEYS}").enqueue(conn, Work(n=n, seconds=0.004))
    conn.commit()
    workers = [fleet.start("--concurrency=4") for _ in range(3)]
    fleet.effects.wait("end", 60)
    busiest = Counter(e.pid for e in fleet.effects.all("start")).most_common(1)[0][0]
    next(w for w in workers if w.pid == busiest).kill()
    fleet.lose(busiest)
    eventually(lambda: left(conn) == 0, 30)
    started = fleet.effects.all("start")
    assert set(fleet.effects.ns("end")) == set(range(240))
    for key in range(KEYS):
        mine = [e.n for e in started if e.n % KEYS == key]
        firsts = list(dict.fromkeys(mine))
        assert firsts == sorted(firsts)
        assert all(b >= a for a, b in pairwise(mine)), "a job ran again after its successor"
    twice = [n for n, times in Counter(e.n for e in started).items() if times > 1]
    assert len(twice) <= 4 * KEYS  # what the killed worker had in hand or had not acknowledged
    assert conn.execute("SELECT count(*) FROM pgqueue.dead_job").fetchone() == (0,)
    assert conn.execute("SELECT count(*) FROM pgqueue.lane").fetchone() == (0,)


def test_an_idle_worker_uses_next_to_no_processor(fleet: Fleet, conn: Connection) -> None:
    worker = fleet.start()
    every.work.enqueue(conn, Work(n=1))
    conn.commit()
    (first,) = fleet.effects.wait("end")
    before = processor_seconds(worker.pid)
    every.work.using(run_after=timedelta(seconds=3)).enqueue(conn, Work(n=2))
    conn.commit()
    second = fleet.effects.wait("end", 2)[1]
    used = processor_seconds(worker.pid) - before
    assert used / (second.at - first.at) < 0.10  # about 0.01 on a quiet machine


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
