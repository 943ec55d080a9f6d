"""Slots of limited types and the claim of lanes at its edges: no slot goes missing, no job is out of reach."""

from __future__ import annotations

import json

import pytest

from pgqueue.cancel import cancel
from pgqueue.finish import ack
from pgqueue.job import Claimed
from tests.factories import QUEUE, Connection, Holder, enqueue, ids, lose, scope, wipe


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


def limit(conn: Connection, slots: int, rate: float | None = None) -> None:
    conn.execute(
        "INSERT INTO pgqueue.job_type (name, slots, rate_per_s) VALUES ('work', %s, %s) "
        "ON CONFLICT (name) DO UPDATE SET slots = excluded.slots, rate_per_s = excluded.rate_per_s",
        [slots, rate],
    )
    conn.commit()


def more(conn: Connection, n: int) -> list[int]:
    made = enqueue(conn, n)
    conn.commit()
    return made


def finish(a: Holder, jobs: list[Claimed]) -> None:
    """Acknowledge jobs and give their lanes back, in one transaction as a round does."""
    a.begin()
    a.run(ack(jobs))
    for job in jobs:
        a.give_back((QUEUE, str(job.key)), job.lease)
    a.commit()


def slots(conn: Connection) -> list[int]:
    found = conn.execute("SELECT slot FROM pgqueue.lane ORDER BY slot").fetchall()
    conn.commit()
    return [int(slot) for (slot,) in found]


def rested(conn: Connection) -> None:
    conn.execute(
        "UPDATE pgqueue.lane SET deadline = least(deadline, clock_timestamp()), "
        "rest_until = least(rest_until, clock_timestamp()) "
        "WHERE lease = 0"
    )
    conn.commit()


def test_a_resting_slot_keeps_the_other_slots_of_its_type(conn: Connection, a: Holder) -> None:
    """Without them a burst after one job ran at a fraction of its rate until the queue was empty."""
    limit(conn, 3, rate=0.03)
    more(conn, 1)
    finish(a, a.lanes())
    more(conn, 5)
    assert len(a.lanes()) == 2
    assert slots(conn) == [0, 1, 2]


def test_the_slots_of_a_type_without_jobs_go_once_they_have_rested(conn: Connection, a: Holder) -> None:
    limit(conn, 3, rate=0.03)
    more(conn, 1)
    finish(a, a.lanes())
    rested(conn)
    assert a.lanes() == []
    assert slots(conn) == []


def test_a_slot_rests_for_the_jobs_it_handed_out_and_not_for_looking(conn: Connection, a: Holder) -> None:
    limit(conn, 1, rate=20.0)
    more(conn, 1)
    a.lanes(depth=2)
    found = conn.execute(
        "SELECT extract(epoch FROM rest_until - clock_timestamp()) FROM pgqueue.lane"
    ).fetchone()
    assert found
    assert found[0] <= 0.05


def test_a_lost_worker_s_slot_is_not_taken_over_before_it_has_rested(
    conn: Connection, a: Holder, b: Holder
) -> None:
    limit(conn, 1, rate=0.01)
    (job,) = more(conn, 1)
    a.lanes()
    lose(conn, [job])
    conn.commit()
    assert b.lanes() == []
    conn.execute("UPDATE pgqueue.lane SET rest_until = clock_timestamp()")
    conn.commit()
    assert ids(b.lanes()) == [job]


def test_a_job_whose_worker_was_lost_on_a_slot_above_a_lowered_limit_runs_again(
    conn: Connection, a: Holder, b: Holder
) -> None:
    limit(conn, 2)
    first, second = more(conn, 2)
    assert ids(a.lanes(lanes=1)) == [first]
    assert ids(a.lanes(lanes=1)) == [second]
    limit(conn, 1)
    lose(conn, [first, second])
    conn.commit()
    ran: list[int] = []
    for _ in range(4):
        jobs = b.lanes()
        ran += ids(jobs)
        finish(b, jobs)
    assert ran == [first, second]
    assert slots(conn) == []


def test_the_slots_above_a_lowered_limit_take_no_more_jobs(conn: Connection, a: Holder, b: Holder) -> None:
    limit(conn, 5)
    made = more(conn, 12)
    held = [job for _ in range(5) for job in a.lanes(1)]
    assert ids(held) == made[:5]
    limit(conn, 1)
    assert b.lanes() == []
    finish(a, held[1:])
    for _ in range(3):  # the free slots are those above the limit: they go, and the one below it is held
        assert b.lanes() == []
    finish(a, held[:1])
    for job in made[5:8]:
        (next_one,) = b.lanes()
        assert next_one.id == job
        assert a.lanes() == []
        finish(b, [next_one])
    assert slots(conn) == [0]


def test_a_stamp_without_a_lane_keeps_no_slot_of_a_limit(conn: Connection, a: Holder, b: Holder) -> None:
    limit(conn, 2)
    made = enqueue(conn, 3)
    conn.commit()
    (head,) = a.lanes(1)
    a.give_back((QUEUE, "@work"), head.lease)
    assert set(ids(b.lanes(2))) == set(made[1:])


def test_lanes_of_names_a_worker_does_not_run_hide_no_others(conn: Connection, a: Holder) -> None:
    conn.execute(
        "SELECT FROM pgqueue.enqueue_many('else', %s::json, keys => %s)",
        [json.dumps([None] * 6000), [f"k{n}" for n in range(6000)]],
    )
    (mine,) = enqueue(conn, key="mine")
    conn.commit()
    for floor in (0, 5000):
        a.connection.execute("SELECT pgqueue.route(ARRAY['default'], ARRAY[%s]::bigint[])", [floor])
    a.connection.execute(
        "SELECT pgqueue.route(ARRAY['default'], ARRAY[(SELECT max(pos) - 10 FROM pgqueue.job)])"
    )
    assert ids(a.lanes(of=scope(), routing=False)) == [mine]


def test_a_key_whose_foreign_head_is_cancelled_goes_on_with_the_next_name(
    conn: Connection, a: Holder
) -> None:
    (head,) = enqueue(conn, name="else", key="k")
    (mine,) = enqueue(conn, key="k")
    conn.commit()
    assert a.lanes() == []
    a.run(cancel([head]))
    assert ids(a.lanes()) == [mine]


def test_a_lane_left_with_a_foreign_name_takes_that_of_the_next_job(conn: Connection, a: Holder) -> None:
    (head,) = enqueue(conn, name="else", key="k")
    conn.commit()
    assert a.lanes() == []
    conn.execute("DELETE FROM pgqueue.job WHERE id = %s", [head])
    (mine,) = enqueue(conn, key="k")
    conn.commit()
    assert ids(a.lanes()) == [mine]
