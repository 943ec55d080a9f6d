"""Turns: work for one process of many is done by whoever asks first once it is due."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest

from pgqueue.turn import postpone, sweep_turn, turn
from tests.factories import Connection, Holder
from tests.waiting import eventually

PERIOD = timedelta(seconds=30)


@pytest.fixture
def dsn(database: str) -> str:
    return database


@pytest.fixture
def a(dsn: str, conn: Connection) -> Iterator[Holder]:
    for task in ("prune", "promote"):
        due_in(conn, task, -1)
    with Holder(dsn, 1) as holder:
        yield holder


def due_in(conn: Connection, task: str, seconds: float) -> None:
    """Set when a task is due next."""
    conn.execute(
        "SELECT setval(('pgqueue.turn_' || %s::text)::regclass,"
        " ((extract(epoch FROM clock_timestamp()) + %s::float8) * 1000)::bigint)",
        [task, seconds],
    )
    conn.commit()


def clock(conn: Connection) -> float:
    """Return the time of the server, in seconds."""
    found = conn.execute("SELECT extract(epoch FROM clock_timestamp())").fetchone()
    assert found
    return float(found[0])


def next_turn(conn: Connection, task: str) -> float:
    """Return when a task is due next, on the same clock."""
    found = conn.execute(f"SELECT last_value / 1000.0 FROM pgqueue.turn_{task}".encode()).fetchone()
    assert found
    return float(found[0])


def bucket(conn: Connection, queue: str) -> str:
    found = conn.execute("SELECT pgqueue.bucket(%s)", [queue]).fetchone()
    conn.commit()
    assert found
    return str(found[0])


def neighbours(conn: Connection) -> tuple[str, str, str]:
    """Return two queues of one bucket and one of another."""
    seen: dict[str, str] = {}
    other = "q0"
    for n in range(1000):
        name = f"q{n}"
        mine = bucket(conn, name)
        if mine in seen:
            other = next(q for b, q in seen.items() if b != mine)
            return seen[mine], name, other
        seen[mine] = name
    raise AssertionError("no two queues share a bucket")


def test_one_of_ten_gets_the_turn_while_their_transactions_are_open(dsn: str, a: Holder) -> None:
    with ExitStack() as stack:
        crowd = [stack.enter_context(Holder(dsn, n)) for n in range(10)]
        for holder in crowd:
            holder.begin()
        assert [holder.run(turn("prune", PERIOD)) for holder in crowd] == [True] + [False] * 9
        for holder in crowd:
            holder.commit()
        assert not any(holder.run(turn("prune", PERIOD)) for holder in crowd)


def test_one_of_ten_that_ask_at_once_gets_the_turn(dsn: str, a: Holder) -> None:
    got: list[bool] = []
    gate = threading.Barrier(10)

    def ask(holder: Holder) -> None:
        gate.wait(60)
        got.append(holder.run(turn("prune", PERIOD)))

    with ExitStack() as stack:
        threads = [
            threading.Thread(target=ask, args=(stack.enter_context(Holder(dsn, n)),)) for n in range(10)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(got) == [False] * 9 + [True]


def test_the_next_turn_comes_after_the_period(conn: Connection, a: Holder) -> None:
    before = clock(conn)
    assert a.run(turn("prune", PERIOD))
    after = clock(conn)
    assert before + 30 - 0.001 <= next_turn(conn, "prune") <= after + 30 + 0.001
    assert not a.run(turn("prune", PERIOD))
    due_in(conn, "prune", -0.001)
    assert a.run(turn("prune", PERIOD))


def test_tasks_do_not_share_their_turns(a: Holder) -> None:
    assert a.run(turn("prune", PERIOD))
    assert a.run(turn("promote", PERIOD))


def test_a_process_that_died_with_its_turn_holds_nobody_up_longer_than_the_period(
    conn: Connection, a: Holder, dsn: str
) -> None:
    with Holder(dsn, 2) as b:
        b.begin()
        assert b.run(turn("prune", PERIOD))
    assert not a.run(turn("prune", PERIOD))
    due_in(conn, "prune", -0.001)
    eventually(lambda: a.run(turn("prune", PERIOD)))  # the server may see later that the process is gone


def test_a_clock_that_went_back_stops_no_task(conn: Connection, a: Holder) -> None:
    due_in(conn, "prune", 3_600)
    assert a.run(turn("prune", PERIOD))
    due_in(conn, "prune", 50)  # within what a turn may take: it is one
    assert not a.run(turn("prune", PERIOD))


def test_queues_of_one_bucket_are_swept_together_and_others_apart(
    conn: Connection, a: Holder, dsn: str
) -> None:
    one, two, other = neighbours(conn)
    for queue in (one, other):
        due_in(conn, bucket(conn, queue), -1)
    mine = a.run(sweep_turn([one, two], PERIOD))
    assert sorted(mine) == sorted([one, two])
    with Holder(dsn, 2) as b:
        assert b.run(sweep_turn([one, two, other], PERIOD)) == [other]


@pytest.mark.parametrize(("wait", "kept"), [(40.0, 40.0), (300.0, 60.0)])
def test_a_dear_sweep_is_put_off_for_a_minute_at_most(
    conn: Connection, a: Holder, wait: float, kept: float
) -> None:
    """A longer wait would read as a clock that went back: the dearest sweeps would run most often."""
    mine = bucket(conn, "default")
    due_in(conn, mine, -1)
    assert a.run(sweep_turn(["default"], timedelta(seconds=0.25))) == ["default"]
    before = clock(conn)
    a.run(postpone(["default"], wait))
    after = clock(conn)
    assert before + kept - 0.001 <= next_turn(conn, mine) <= after + kept + 0.001
    assert a.run(sweep_turn(["default"], timedelta(seconds=0.25))) == []
