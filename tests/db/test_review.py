"""A worker under conditions that come together rarely: nothing is stuck, starved, or spun for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from pgqueue import App, Backoff, Permanent
from pgqueue.config import WorkerSettings
from pgqueue.engine import Engine
from pgqueue.promote import Promoted, promote
from pgqueue.pulse import Pulse
from pgqueue.statement import Statement
from pgqueue.worker import Worker
from tests.server import Connection
from tests.waiting import eventually

Start = Callable[..., Worker]


@pytest.fixture
def start(dsn: str) -> Iterator[Start]:
    """Give a way to start workers in this process."""
    with ExitStack() as stack:

        def begin(app: App, **settings: Any) -> Worker:
            worker = Worker(app, dsn, WorkerSettings(**{"grace": 2.0, **settings}))
            worker.start()
            stack.callback(worker.stop)
            return worker

        yield begin


def left(conn: Connection) -> int:
    row = conn.execute("SELECT count(*) FROM pgqueue.job").fetchone()
    conn.rollback()
    return int(str(row[0])) if row else 0


def beat_now(worker: Worker) -> None:
    """Let the next heartbeat fall due, a third of a lease early."""
    worker._pulse._due["heartbeat"] = 0.0


def renewed(conn: Connection, worker: Worker, job_id: int, *, timeout: float = 20.0) -> None:
    """Wait until a lease that has less than half of its time left is renewed, and not taken over."""
    half = worker.settings.visibility / 2
    given = conn.execute(
        "UPDATE pgqueue.job SET deadline = clock_timestamp() + make_interval(secs => %s) WHERE id = %s RETURNING lease",
        [half - 1, job_id],
    ).fetchone()
    conn.commit()
    beat_now(worker)

    def longer() -> bool:
        row = conn.execute(
            "SELECT lease, deadline > clock_timestamp() + make_interval(secs => %s) FROM pgqueue.job WHERE id = %s",
            [half, job_id],
        ).fetchone()
        conn.rollback()
        assert given
        assert row
        assert row[0] == given[0]
        return bool(row[1])

    eventually(longer, timeout)


def test_an_idle_reserved_slot_keeps_nobody_busy_while_jobs_of_other_queues_wait_on_the_shelf(
    conn: Connection, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, gate, turns = App(), threading.Event(), [0]
    begun = threading.Event()

    @app.job("work")
    def work(n: int) -> None:
        begun.set()
        gate.wait(100)

    turn = Engine._turn

    def counted(self: Engine) -> bool:
        turns[0] += 1
        return turn(self)

    monkeypatch.setattr(Engine, "_turn", counted)
    work.enqueue_many(conn, list(range(10)))
    conn.commit()
    start(app, queues=("critical", "default"), reserved={"critical": 1}, concurrency=2, prefetch=5)
    assert begun.wait(60)
    before, began = turns[0], time.monotonic()
    eventually(lambda: time.monotonic() - began > 1.0)
    assert (turns[0] - before) / (time.monotonic() - began) < 150
    gate.set()
    eventually(lambda: left(conn) == 0)


def test_a_keyed_job_whose_transaction_was_long_is_found_when_it_commits(
    conn: Connection, start: Start, dsn: str
) -> None:
    app, ran = App(), []

    @app.job("work")
    def work(n: int) -> None:
        ran.append(n)

    worker = start(app)
    horizon = worker._engine._intake.floors.horizon
    work.using(key="early").enqueue(conn, 0)
    conn.commit()
    eventually(lambda: ran == [0])
    with psycopg.connect(dsn) as slow:
        work.using(key="slow").enqueue(slow, 1)
        n = 2

        def other() -> bool:
            nonlocal n
            work.using(key=f"k{n}").enqueue(conn, n)
            conn.commit()
            n += 1
            return horizon.guarded

        eventually(other, look=0.05)
        eventually(lambda: len(ran) == n - 1)
        slow.commit()
    eventually(lambda: 1 in ran)


def test_a_finished_job_that_somebody_has_locked_keeps_nobody_from_claiming(
    conn: Connection, start: Start, dsn: str
) -> None:
    app, gate, ran = App(), threading.Event(), []

    @app.job("slow")
    def slow() -> None:
        gate.wait(100)

    @app.job("work")
    def work(n: int) -> None:
        ran.append(n)

    locked = slow.enqueue(conn).id
    conn.commit()
    worker = start(app, concurrency=4)
    eventually(lambda: bool(worker._hand.running))
    with psycopg.connect(dsn) as shop:
        shop.execute("SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE", [locked])
        gate.set()
        eventually(lambda: not worker._hand.running)
        work.using(key="k").enqueue(conn, 0)
        work.enqueue_many(conn, list(range(1, 20)))
        conn.commit()
        eventually(lambda: sorted(ran) == list(range(20)))
        eventually(lambda: left(conn) == 1)
    eventually(lambda: left(conn) == 0)


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("same_place", [True, False])
def test_a_job_that_comes_back_while_its_lost_attempt_still_runs_here_ends_as_any_other(
    conn: Connection, start: Start, key: str | None, same_place: bool
) -> None:
    app, first, second, runs = App(), threading.Event(), threading.Event(), []

    @app.job("work")
    def work() -> None:
        runs.append(1)
        (first if len(runs) == 1 else second).wait(100)

    job_id = work.using(key=key).enqueue(conn).id if key else work.enqueue(conn).id
    conn.commit()
    worker = start(app, concurrency=3)
    eventually(lambda: len(runs) == 1)
    # Somebody took it over and gave it back (or, in the same place, this process takes over what it had itself).
    stale = conn.execute("SELECT lease FROM pgqueue.job WHERE id = %s", [job_id]).fetchone()
    if same_place:
        conn.execute("UPDATE pgqueue.job SET lease = lease + 1, deadline = clock_timestamp()")
        conn.execute("UPDATE pgqueue.lane SET lease = lease + 1, deadline = clock_timestamp()")
    else:
        conn.execute("UPDATE pgqueue.job SET lease = 0, deadline = '-infinity'")
        conn.execute(
            "UPDATE pgqueue.lane SET lease = 0, deadline = '-infinity', pos = nextval('pgqueue.pos_seq')"
        )
    conn.commit()
    beat_now(worker)
    eventually(lambda: len(runs) == 2)
    first.set()
    eventually(lambda: len(worker._hand.running) == 1)
    fresh = conn.execute("SELECT lease FROM pgqueue.job WHERE id = %s", [job_id]).fetchone()
    conn.rollback()
    assert fresh != stale
    eventually(lambda: [c.lease for c in list(worker._hand.held.values())] == [fresh and fresh[0]])
    renewed(conn, worker, job_id)
    assert conn.execute("SELECT lease FROM pgqueue.job WHERE id = %s", [job_id]).fetchone() == fresh
    conn.rollback()
    second.set()
    eventually(lambda: left(conn) == 0)
    assert len(runs) == 2
    eventually(lambda: not worker._hand.held and not worker._hand.lanes)


def test_jobs_whose_lease_is_known_to_be_gone_are_not_started(conn: Connection, start: Start) -> None:
    app, gate, ran = App(), threading.Event(), []

    @app.job("work")
    def work(n: int) -> None:
        ran.append(n)
        gate.wait(100)

    work.enqueue_many(conn, list(range(4)))
    conn.commit()
    worker = start(app, concurrency=1, prefetch=3)
    eventually(lambda: len(worker._hand.held) == 4)
    conn.execute(
        "UPDATE pgqueue.job SET lease = 77, deadline = clock_timestamp() + interval '1 h' WHERE payload::text <> '0'"
    )
    conn.commit()
    beat_now(worker)
    eventually(lambda: len(worker._hand.lost) == 3)
    gate.set()
    eventually(lambda: not worker._hand.held)
    assert ran == [0]
    assert left(conn) == 3


@pytest.fixture
def at_work(conn: Connection, start: Start) -> Iterator[tuple[Worker, int]]:
    """Give a worker and the id of a job that it runs."""
    app, gate = App(), threading.Event()

    @app.job("work")
    def work() -> None:
        gate.wait(100)

    job_id = work.enqueue(conn).id
    conn.commit()
    worker = start(app, visibility=60.0)
    eventually(lambda: bool(worker._hand.running))
    yield worker, job_id
    gate.set()


def test_a_flood_of_due_jobs_holds_up_no_heartbeat(
    conn: Connection, at_work: tuple[Worker, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that falls due while a page is promoted comes before the next page."""
    worker, _ = at_work
    told: list[str] = []
    beat = Pulse._heartbeat

    def noted_page(floor: datetime, period: timedelta) -> Statement[Promoted]:
        told.append("page")
        beat_now(worker)
        return promote(floor, period)

    def noted_beat(self: Pulse, connection: psycopg.Connection[Any]) -> None:
        told.append("beat")
        beat(self, connection)

    monkeypatch.setattr("pgqueue.pulse.promote", noted_page)
    monkeypatch.setattr(Pulse, "_heartbeat", noted_beat)
    conn.execute(
        "INSERT INTO pgqueue.job (name, queue, priority, pos, run_at) "
        "SELECT 'else', 'else', 5, NULL, now() - interval '1 s' FROM generate_series(1, 80000)"
    )
    conn.commit()

    def promoted() -> bool:
        found = conn.execute("SELECT EXISTS (SELECT FROM pgqueue.job WHERE run_at IS NOT NULL)").fetchone()
        conn.rollback()
        return found == (False,)

    eventually(promoted, timeout=50, look=0.05)
    seen = told.copy()
    assert seen.count("page") > 80
    assert ("page", "page") not in pairwise(seen)


def test_a_chore_that_waits_for_a_lock_holds_up_no_heartbeat(
    conn: Connection, at_work: tuple[Worker, int], dsn: str
) -> None:
    worker, job_id = at_work

    def waits() -> bool:
        found = conn.execute(
            "SELECT FROM pg_locks WHERE relation = 'pgqueue.depth_sample'::regclass AND NOT granted"
        )
        conn.rollback()
        return found.rowcount == 1

    with psycopg.connect(dsn) as admin:
        admin.execute("LOCK TABLE pgqueue.depth_sample IN ACCESS EXCLUSIVE MODE")
        worker._pulse._due["sample"] = 0.0
        eventually(waits)
        renewed(conn, worker, job_id, timeout=5)  # with PATIENCE still less than half of a lease


def test_pruning_goes_on_as_long_as_its_pages_are_full(conn: Connection, at_work: tuple[Worker, int]) -> None:
    conn.execute(
        "INSERT INTO pgqueue.dedup (queue, key, job_id, until) "
        "SELECT 'q', n::text, n, now() - interval '1 h' FROM generate_series(1, 8000) n"
    )
    conn.execute(
        "INSERT INTO pgqueue.effect "
        "SELECT 'n', n::text, n, 1, now() - interval '9 d' FROM generate_series(1, 8000) n"
    )
    conn.execute(
        "INSERT INTO pgqueue.tally (queue, name, outcome, n) "
        "SELECT 'q', 'n', 'ok', 1 FROM generate_series(1, 50000)"
    )
    conn.execute("SELECT setval('pgqueue.turn_prune', 0)")
    conn.commit()

    def pruned() -> bool:
        found = conn.execute(
            "SELECT (SELECT count(*) FROM pgqueue.dedup) + (SELECT count(*) FROM pgqueue.effect)"
            " + (SELECT count(*) FROM pgqueue.tally)"
        ).fetchone()
        conn.rollback()
        return found == (0,)

    eventually(pruned, timeout=25, look=0.2)
    assert conn.execute("SELECT sum(n) FROM pgqueue.tally_minute WHERE name = 'n'").fetchone() == (50000,)


@pytest.mark.parametrize("key", [None, "k"])
def test_headers_that_cannot_be_read_bury_their_job_and_no_other(
    conn: Connection, start: Start, key: str | None
) -> None:
    app, ran = App(), []

    @app.job("work")
    def work(n: int) -> None:
        ran.append(n)

    deep = '{"a":' * 2500 + "1" + "}" * 2500
    conn.execute(
        "SELECT pgqueue.enqueue('work', '0', headers => %s::json, key => %s, max_attempts => 3)", [deep, key]
    )
    work.enqueue_many(conn, [1, 2, 3])
    conn.commit()
    start(app)
    eventually(lambda: sorted(ran) == [1, 2, 3])
    eventually(lambda: left(conn) == 0)
    assert conn.execute("SELECT reason FROM pgqueue.dead_job").fetchall() == [("undecodable",)]


def test_a_batch_that_cannot_be_counted_costs_no_claim(
    conn: Connection, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, ran = App(), []

    @app.job("work")
    def work(n: int) -> None:
        ran.append(n)

    app.batch(conn, [work.with_payload(n) for n in range(4)])
    work.enqueue_many(conn, list(range(4, 40)))
    conn.execute(
        "CREATE FUNCTION pgqueue.broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'broken'; END $$"
    )
    conn.execute(
        "CREATE TRIGGER broken BEFORE DELETE ON pgqueue.batch_tally FOR EACH ROW EXECUTE FUNCTION pgqueue.broken()"
    )
    conn.commit()
    start(app, concurrency=2, prefetch=0, visibility=30.0)
    eventually(lambda: left(conn) == 0)
    assert sorted(ran) == list(range(40))


def test_a_worker_does_not_wait_to_run_a_suspect_that_another_one_has_run(
    conn: Connection, start: Start
) -> None:
    app, gate, ran = App(), threading.Event(), threading.Event()

    @app.job("slow")
    def slow() -> None:
        gate.wait(100)

    @app.job("work")
    def work() -> None:
        ran.set()

    slow.enqueue(conn)
    conn.commit()
    worker = start(app, concurrency=3)
    eventually(lambda: bool(worker._hand.running))
    suspect = work.enqueue(conn).id
    conn.execute("UPDATE pgqueue.job SET lost = 2 WHERE id = %s", [suspect])
    conn.commit()
    eventually(lambda: worker._engine._sweeper.alone)
    assert not ran.is_set()
    conn.execute("DELETE FROM pgqueue.job WHERE id = %s", [suspect])
    work.enqueue(conn)
    conn.commit()
    assert ran.wait(60)
    gate.set()


def test_a_vanished_server_is_noticed_well_before_a_lease_is_over(conn: Connection, start: Start) -> None:
    app = App()

    @app.job("work")
    def work() -> None: ...

    worker = start(app, visibility=6.0)
    connection = eventually(lambda: worker._pulse._connection)
    assert connection.info.get_parameters()["tcp_user_timeout"] == "2000"


def test_a_thread_that_the_system_refuses_costs_no_claim(
    conn: Connection, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, ran = App(), []
    refused: list[str] = []
    begin = threading.Thread.start

    def reluctant(self: threading.Thread) -> None:
        if self.name.startswith("pgqueue-slot") and len(refused) < 3:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        begin(self)

    @app.job("work")
    def work(n: int) -> None:
        ran.append(n)

    monkeypatch.setattr(threading.Thread, "start", reluctant)
    work.enqueue_many(conn, list(range(20)))
    conn.commit()
    start(app, concurrency=2)
    eventually(lambda: left(conn) == 0)
    assert len(refused) == 3
    assert sorted(ran) == list(range(20))


REFUSES = """
CREATE SEQUENCE public.tries;
CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.error = 'never' THEN
    RAISE EXCEPTION 'this text cannot be stored' USING ERRCODE = '22021';
  ELSIF NEW.error = 'once' AND nextval('public.tries') = 1 THEN
    RAISE EXCEPTION 'canceling statement due to statement timeout' USING ERRCODE = '57014';
  END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER refuse BEFORE INSERT ON pgqueue.attempt_log FOR EACH ROW EXECUTE FUNCTION public.refuse();
"""


def test_a_result_that_cannot_be_written_harms_no_other_and_a_passing_trouble_drops_none(
    conn: Connection, start: Start
) -> None:
    """kestra-io/kestra PR#10653: the write of a failure fails itself, and its job is stuck."""
    app, together = App(), threading.Barrier(3)

    @app.job("fails", backoff=Backoff(base=600, cap=600, jitter="none"))
    def fails(why: str) -> None:
        together.wait(60)
        if why:
            raise RuntimeError(why)

    conn.execute(REFUSES)
    never, once, works = (fails.enqueue(conn, why).id for why in ("never", "once", ""))
    conn.commit()
    start(app, concurrency=3, flush=0.3)
    eventually(lambda: left(conn) == 1)
    assert conn.execute("SELECT id, reason FROM pgqueue.dead_job").fetchall() == [(never, "permanent")]
    eventually(
        lambda: (
            conn.execute("SELECT job_id, outcome, attempt FROM pgqueue.attempt_log").fetchall()
            == [(once, "retry", 1)]
        )
    )
    assert works not in (never, once)


def test_a_key_goes_on_at_once_when_the_last_of_its_jobs_in_hand_did_not_just_end_well(
    conn: Connection, start: Start
) -> None:
    """Without a look of its own a key waited for the next flush after each job that died, 20 ms."""
    app, ran = App(), []

    @app.job("dies", max_attempts=1)
    def dies(n: int) -> None:
        ran.append(n)
        raise Permanent("no")

    dies.using(key="k").enqueue_many(conn, list(range(8)))
    conn.commit()
    start(app, concurrency=2, flush=30.0)
    eventually(lambda: ran == list(range(8)))


def test_a_key_of_the_ledger_that_somebody_sits_on_holds_up_no_other_job(
    conn: Connection, start: Start, dsn: str
) -> None:
    """timgit/pg-boss#323: the loop waited for one row, and with it every job of the process."""
    app, ran = App(), []

    @app.job("work")
    def work(n: int) -> None:
        ran.append(n)

    conn.execute("INSERT INTO pgqueue.effect (name, key, job_id, lease) VALUES ('work', 'k', 0, 0)")
    work.using(idempotency_key="k").enqueue(conn, 0)
    conn.commit()
    with psycopg.connect(dsn) as shop:
        shop.execute("SELECT FROM pgqueue.effect FOR UPDATE")
        start(app)
        work.enqueue_many(conn, list(range(1, 20)))
        conn.commit()
        eventually(lambda: sorted(ran) == list(range(1, 20)))
    eventually(lambda: sorted(ran) == list(range(20)))
