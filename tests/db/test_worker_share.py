"""Who gets the slots of a worker when there is more work than slots: weights, a large backlog, age, expiry."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pgqueue import Backoff, control
from pgqueue.age import age_queue
from pgqueue.cli._worker import command
from pgqueue.config import WorkerSettings, parse_queues
from pgqueue.connection import execute
from pgqueue.declare import declare
from pgqueue.worker import Worker
from tests.factories import MINUTE, fall_due
from tests.process.apps import every
from tests.process.apps.effects import Effects
from tests.process.apps.every import Work
from tests.server import Connection
from tests.waiting import chaos, eventually

Start = Callable[..., Worker]
BACKLOG = chaos(20_000, 1_000_000)


@pytest.fixture
def start(dsn: str, effects: Effects) -> Iterator[Start]:
    """Give a way to start workers in this process."""
    with ExitStack() as stack:

        def begin(**settings: Any) -> Worker:
            worker = Worker(every.app, dsn, WorkerSettings(**settings))
            worker.start()
            stack.callback(worker.stop)
            return worker

        yield begin


def left(conn: Connection) -> int:
    row = conn.execute("SELECT count(*) FROM pgqueue.job").fetchone()
    conn.rollback()
    return int(str(row[0])) if row else 0


def fill(conn: Connection, queue: str, n: int, first: int = 0, key: str | None = None) -> None:
    every.work.using(queue=queue, key=key and (lambda w: f"{key}-{w.n}")).enqueue_many(
        conn, [Work(n=first + i, seconds=0.003) for i in range(n)]
    )
    conn.commit()


@pytest.mark.parametrize("prefetch", [0, None])
@pytest.mark.parametrize("key", [None, "k"])
def test_two_queues_with_a_backlog_share_the_worker_by_weight(
    conn: Connection, start: Start, effects: Effects, prefetch: int | None, key: str | None
) -> None:
    fill(conn, "critical", 400, 1000, key)
    fill(conn, "bulk", 400, 0, key)
    start(queues=("critical", "bulk"), weights={"critical": 3, "bulk": 1}, concurrency=2, prefetch=prefetch)
    eventually(lambda: left(conn) == 0, 30)
    order = effects.ns("start")
    first = Counter("bulk" if n < 1000 else "critical" for n in order[:400])
    assert 60 <= first["bulk"] <= 160  # a quarter, give or take what was prefetched
    assert len(order) == 800


def test_by_weight_the_turns_are_exact_where_nothing_is_prefetched(
    conn: Connection, start: Start, effects: Effects
) -> None:
    fill(conn, "critical", 12, 1000)
    fill(conn, "bulk", 12)
    start(queues=("critical", "bulk"), weights={"critical": 3, "bulk": 1}, concurrency=1, prefetch=0)
    eventually(lambda: left(conn) == 0)
    order = [n >= 1000 for n in effects.ns("start")]
    assert [sum(order[i : i + 4]) for i in range(0, 16, 4)] == [3, 3, 3, 3]


def test_a_queue_has_all_slots_while_the_others_are_empty(
    conn: Connection, start: Start, effects: Effects, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    every.work.using(queue="bulk").enqueue_many(conn, [Work(n=n, gate=str(gate)) for n in range(6)])
    conn.commit()
    start(queues=("critical", "bulk"), weights={"critical": 9, "bulk": 1}, concurrency=4)
    effects.wait("start", 4)
    gate.touch()
    eventually(lambda: left(conn) == 0)


@pytest.mark.chaos
@pytest.mark.parametrize("key", [None, "customer"])
def test_a_critical_job_runs_at_once_on_its_slot_beside_a_large_backlog_of_slow_jobs(
    conn: Connection, start: Start, effects: Effects, tmp_path: Path, key: str | None
) -> None:
    """graphile/worker#240, timgit/pg-boss#756: what holds all slots delays the rest without bound."""
    gate = tmp_path / "gate"
    conn.execute(
        "INSERT INTO pgqueue.job (name, queue, priority, payload)"
        " SELECT 'work', 'bulk', 5, json_build_object('n', g, 'gate', %s::text) FROM generate_series(1, %s) g",
        [str(gate), BACKLOG],
    )
    conn.commit()
    queues, reserved = parse_queues("critical,default,bulk", 4)
    worker = start(queues=queues, reserved=reserved, concurrency=4)
    effects.wait("start", 3)
    critical = list(range(BACKLOG + 1, BACKLOG + chaos(6, 41)))
    waits = []
    for n in critical:
        every.work.using(queue="critical", key=key).enqueue(conn, Work(n=n))
        conn.commit()
        committed_at = time.monotonic()
        eventually(lambda n=n: n in effects.ns("end"), look=0.005)  # type: ignore[misc]
        waits.append(max(e.at for e in effects.all("start")) - committed_at)
    # Not one bulk job began or ended meanwhile: the slot was there, and nothing had to make room.
    assert effects.ns("start")[3:] == effects.ns("end") == critical
    waits.sort()
    print(f"beside {BACKLOG}: p50 {waits[len(waits) // 2] * 1000:.1f} ms, worst {waits[-1] * 1000:.1f} ms")
    gate.touch()
    worker.stop()


def test_a_hot_key_at_the_head_of_the_queue_holds_up_no_other_and_keeps_its_order(
    conn: Connection, start: Start, effects: Effects
) -> None:
    """timgit/pg-boss PR#849, PR#756, graphile/worker#621: a saturated key fills the batch, or runs beside itself."""
    hot, others = 800, 1200
    every.work.using(key="hot").enqueue_many(conn, [Work(n=n) for n in range(hot)])
    every.work.using(key=lambda w: f"k{w.n % 97}").enqueue_many(
        conn, [Work(n=n) for n in range(hot, hot + others // 2)]
    )
    every.work.enqueue_many(conn, [Work(n=n) for n in range(hot + others // 2, hot + others)])
    conn.commit()
    start(concurrency=4)
    eventually(lambda: left(conn) == 0, 60)
    order = effects.ns("start")
    assert [n for n in order if n < hot] == list(range(hot))
    assert sorted(order) == list(range(hot + others))
    assert effects.overlaps(lambda e: e.n < hot or e.n) == []
    # All of it stands in front of the others; they do not wait for its end, keyed or not.
    beside = order[: order.index(hot - 1)]
    assert sum(n >= hot + others // 2 for n in beside) > 50
    assert sum(hot <= n < hot + others // 2 for n in beside) > 50


def test_a_worker_lets_waiting_jobs_age(conn: Connection, start: Start) -> None:
    execute(conn, age_queue("default", MINUTE))
    conn.execute("SELECT pgqueue.enqueue('nobody-knows-it', priority => 9)")
    conn.execute("UPDATE pgqueue.job SET enqueued_at = enqueued_at - interval '2 min'")
    conn.commit()
    start()

    def priority() -> bool:
        row = conn.execute("SELECT j.priority, j.aged_at IS NOT NULL FROM pgqueue.job j").fetchone()
        conn.rollback()
        return row == (8, True)

    eventually(priority)


@pytest.mark.parametrize("delay", [None, timedelta(hours=1)])
def test_a_job_that_expired_before_it_began_is_a_dead_letter_by_the_clock_of_the_database(
    conn: Connection, start: Start, effects: Effects, delay: timedelta | None
) -> None:
    late = conn.execute(
        "SELECT pgqueue.enqueue('work', '{\"n\": 1}', expires_at => clock_timestamp() + interval '1 min', delay => %s)",
        [delay],
    ).fetchone()
    assert late is not None
    every.work.enqueue(conn, Work(n=2))
    conn.execute(
        "UPDATE pgqueue.job SET expires_at = clock_timestamp() - interval '1 ms' WHERE expires_at IS NOT NULL"
    )
    fall_due(conn, [int(str(late[0]))])
    conn.commit()
    start()
    eventually(lambda: left(conn) == 0)
    dead = conn.execute("SELECT id, reason, error_type, attempt FROM pgqueue.dead_job").fetchall()
    assert dead == [(late[0], "expired", "Expired", 1)]
    assert effects.ns("start") == [2]


def test_a_retry_that_comes_after_the_expiry_is_a_dead_letter_too(
    conn: Connection, start: Start, effects: Effects
) -> None:
    """expires_at is about every attempt: what is late is not worth starting."""
    hour = Backoff(base=3600, cap=3600, jitter="none")
    soon = datetime.now(UTC) + timedelta(hours=1)
    ref = every.work.using(backoff=hour, expires_at=soon).enqueue(conn, Work(n=1, fails=1))
    conn.commit()
    start()
    effects.wait("start")

    def waits() -> bool:
        found = conn.execute("SELECT FROM pgqueue.job WHERE run_at IS NOT NULL").rowcount == 1
        conn.rollback()
        return found

    eventually(waits)
    conn.execute("UPDATE pgqueue.job SET expires_at = clock_timestamp(), run_at = clock_timestamp()")
    conn.commit()
    eventually(lambda: left(conn) == 0)
    assert conn.execute("SELECT id, reason FROM pgqueue.dead_job").fetchall() == [(ref.id, "expired")]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--weights", "critical=8,bulk"], "NAME=WEIGHT"),
        (["--weights", "critical=8,bulk=2", "--queues", "critical=1,bulk"], "reserved"),
        (["--weights", "critical=8,bulk=2", "--queues", "critical,mail"], "critical,mail"),
        (["--weights", "critical=8,bulk=0"], "between 1 and 1000"),
    ],
)
def test_weights_that_make_no_sense_stop_the_worker_before_it_starts(
    dsn: str, options: list[str], problem: str
) -> None:
    result = CliRunner().invoke(command, ["tests.process.apps.every:app", "--dsn", dsn, *options])
    assert result.exit_code == 1
    assert problem in result.output


@pytest.mark.parametrize("what", ["queue", "name"])
def test_a_resume_finds_jobs_with_keys_that_were_passed_meanwhile(
    conn: Connection, start: Start, effects: Effects, what: str
) -> None:
    """Lanes and floors move on while a pause lasts: what was passed stands below them."""
    every.work.enqueue(conn, Work(n=0))
    execute(conn, declare(kind.policy for kind in every.app.types.values()))
    pause = control.pause_queue("default") if what == "queue" else control.pause_name("work")
    resume = control.resume_queue("default") if what == "queue" else control.resume_name("work")
    execute(conn, pause)
    conn.commit()
    start(queues=("default", "other"))
    every.work.using(key=lambda w: f"k{w.n % 2}").enqueue_many(conn, [Work(n=n) for n in range(1, 7)])
    conn.commit()
    for n in range(10, 14):  # others run, with keys too, and everything moves on
        every.payload_only.using(queue="other", key="k").enqueue(conn, Work(n=n))
        conn.commit()
        eventually(lambda n=n: n in effects.ns("end"))  # type: ignore[misc]
    assert effects.ns("start") == []
    execute(conn, resume)
    conn.commit()
    eventually(lambda: left(conn) == 0)
    assert sorted(effects.ns("start")) == list(range(7))
    for odd in (0, 1):
        mine = [n for n in effects.ns("start") if n and n % 2 == odd]
        assert mine == sorted(mine)
