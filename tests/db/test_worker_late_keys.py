"""No delivery rests on a floor: a keyed job that appears below the floor of routing is found within a minute.

riverqueue/river 1258, good_job 1446: rows that a reader has passed waited until somebody restarted it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from unittest.mock import ANY

import pytest

from pgqueue import sweep
from pgqueue.config import WorkerSettings
from pgqueue.floors import WINDOW
from pgqueue.lanes import route
from pgqueue.stray import strays
from pgqueue.worker import Worker
from tests.factories import Holder, explain, nodes
from tests.process.apps import every
from tests.process.apps.effects import Effects
from tests.process.apps.every import Work
from tests.server import Connection
from tests.waiting import eventually

LATE = """
INSERT INTO pgqueue.job (name, queue, priority, key, payload, pos)
VALUES ('work', 'default', 5, 'late', '{"n": 7}', %s)
"""


@pytest.fixture
def start(dsn: str, effects: Effects) -> Iterator[Callable[[], Worker]]:
    with ExitStack() as stack:

        def begin() -> Worker:
            worker = Worker(every.app, dsn, WorkerSettings())
            worker.start()
            stack.callback(worker.stop)
            return worker

        yield begin


def routed(worker: Worker) -> int:
    """Return the position up to which the worker has proved that every keyed job has its lane."""
    return worker._engine._intake.floors.route["default"]


def drawn(conn: Connection) -> int:
    """Draw a position and leave it unused."""
    row = conn.execute("SELECT nextval('pgqueue.pos_seq')").fetchone()
    conn.commit()
    return int(str(row[0])) if row else 0


@pytest.mark.parametrize("ahead", [0, WINDOW + 1])
def test_a_keyed_job_below_the_floor_of_routing_is_found_whatever_stands_before_it(
    conn: Connection,
    start: Callable[[], Worker],
    effects: Effects,
    monkeypatch: pytest.MonkeyPatch,
    ahead: int,
) -> None:
    """A restored row, or a lane that somebody deleted: neither may wait for a restart."""
    conn.execute(
        "SELECT count(*) FROM pgqueue.enqueue_many('elsewhere', (SELECT json_agg(g) FROM generate_series(1, %s) g),"
        " keys => ARRAY(SELECT 'k' || g FROM generate_series(1, %s) g))",
        [max(ahead, 1), max(ahead, 1)],
    )
    place = drawn(conn)
    every.work.using(key="k").enqueue(conn, Work(n=1))
    conn.commit()
    worker = start()
    effects.wait("end")
    eventually(lambda: routed(worker) > place)
    conn.execute(LATE, [place])
    conn.commit()
    monkeypatch.setattr(sweep, "WHOLE", 0.1)
    worker._engine._sweeper._route_at.clear()  # the minute is over
    eventually(lambda: 7 in effects.ns("end"))


def test_the_look_at_all_keyed_jobs_takes_one_window_a_sweep_and_ends(
    conn: Connection, start: Callable[[], Worker], effects: Effects
) -> None:
    """que 240, graphile 240: a look from the start at every turn would cost more the more jobs wait."""
    conn.execute(
        "SELECT count(*) FROM pgqueue.enqueue_many('elsewhere', (SELECT json_agg(g) FROM generate_series(1, 12000) g),"
        " keys => ARRAY(SELECT 'k' || g % 10 FROM generate_series(1, 12000) g))"
    )
    conn.commit()
    worker = start()
    sweeper = worker._engine._sweeper
    eventually(lambda: "default" in sweeper._route_at and not sweeper._route_from)
    before = dict(sweeper._route_at)
    every.work.using(key="k").enqueue(conn, Work(n=1))
    conn.commit()
    effects.wait("end")
    assert sweeper._route_at == before  # and not again before the minute is over


def test_a_look_at_keyed_jobs_that_have_their_lanes_writes_nothing(conn: Connection, dsn: str) -> None:
    """graphile 240: a lock on each lane would be a write for each key that waits, once a minute."""
    conn.execute(
        "SELECT count(*) FROM pgqueue.enqueue_many('elsewhere', (SELECT json_agg(g) FROM generate_series(1, 600) g),"
        " keys => ARRAY(SELECT 'k' || g FROM generate_series(1, 600) g))"
    )
    conn.commit()
    with Holder(dsn) as holder:
        assert holder.run(strays({"default": 0})) == [("default", 600, ANY, True)]
        holder.run(route({"default": 0}))
        assert holder.run(strays({"default": 0})) == [("default", 600, ANY, False)]
        assert holder.run(strays({"default": 2**62, "other": 0})) == [
            ("default", 0, 0, False),
            ("other", 0, 0, False),
        ]
        plan = explain(holder.connection, strays({"default": 0}))
        assert plan["WAL Records"] == 0
        assert not [n for n in nodes(plan) if n["Node Type"] == "Seq Scan"]
        conn.execute("DELETE FROM pgqueue.lane WHERE key = 'k77'")
        conn.commit()
        assert holder.run(strays({"default": 0})) == [("default", 600, ANY, True)]
