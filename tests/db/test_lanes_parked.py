"""Lanes that wait for their time are out of the way of claims, and back when it has come."""

from __future__ import annotations

import pytest

from pgqueue.connection import execute
from pgqueue.declare import Policy, declare
from pgqueue.finish import Failed, ack, retry
from pgqueue.lanes import LaneSize, lane_claim, route
from tests.factories import (
    MINUTE,
    NAME,
    QUEUE,
    Connection,
    Holder,
    buffers,
    enqueue,
    explain,
    ids,
    retried,
    row,
    scope,
    token,
    wipe,
)

LANES = 100_000
WAITING = f"""
INSERT INTO pgqueue.job (name, queue, priority, key, payload)
SELECT 'work', 'default', 5, 'k' || i, 'null' FROM generate_series(1, {LANES}) i;
INSERT INTO pgqueue.lane (queue, key, priority, head_name, deadline, wake_at)
SELECT 'default', 'k' || i, 5, 'work', now() + interval '1 h', now() + interval '1 h'
FROM generate_series(1, {LANES}) i;
ANALYZE pgqueue.lane, pgqueue.job;
"""


#: Every test of lanes runs with both forms of their claim (see conftest).
BOTH_CLAIMS = True


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


def fail(holder: Holder, delay: float) -> int:
    """Claim the head of the key k, fail it, and give its lane back for as long; return its id."""
    (job,) = holder.lanes(1)
    holder.begin()
    holder.run(retry([Failed(claim=token(job), outcome=retried(delay))], "w"))
    holder.give_back((QUEUE, "k"), job.lease, delay)
    holder.commit()
    return job.id


def due(conn: Connection) -> None:
    """Let the time come for which lanes wait."""
    conn.execute(
        "UPDATE pgqueue.lane SET deadline = clock_timestamp(), wake_at = wake_at - interval '1 day' "
        "WHERE deadline < 'infinity'"
    )
    conn.commit()


def test_a_look_over_a_hundred_thousand_lanes_that_wait_reads_next_to_nothing(
    conn: Connection, a: Holder
) -> None:
    """pg-boss#849: blocked heads starved all other keys; the naive rule was quadratic."""
    conn.execute(WAITING.encode())
    (mine,) = enqueue(conn, 1, key="ready")
    conn.commit()
    found = row(conn, mine)
    assert found
    a.run(route({QUEUE: found["pos"] - 1}))
    look = lane_claim(scope(), [0], LaneSize(lanes=10, depth=1, total=10), a.leases.new(), MINUTE)

    def cost() -> int:
        a.begin()
        a.run(look)  # once for the plans
        a.rollback()
        a.begin()
        plan = explain(a.connection, look)
        a.rollback()
        assert plan["Actual Rows"] == 1
        return buffers(plan)

    apart = cost()
    assert apart < 150
    conn.execute("UPDATE pgqueue.lane SET wake_at = NULL")  # what each look reads if they are not put aside
    conn.commit()
    assert cost() > 10 * apart


def test_a_lane_that_waits_a_second_or_more_is_put_aside_and_comes_back_in_time(
    conn: Connection, a: Holder, b: Holder
) -> None:
    first, second = enqueue(conn, 2, key="k")
    conn.commit()
    assert fail(a, 60.0) == first
    assert conn.execute("SELECT wake_at = deadline, lease FROM pgqueue.lane").fetchone() == (True, 0)
    conn.rollback()
    assert b.lanes() == []
    due(conn)
    assert ids(b.lanes()) == [first]
    assert a.lanes() == []
    assert second


def test_a_lane_that_waits_for_less_stays_where_it_is(conn: Connection, a: Holder) -> None:
    enqueue(conn, 1, key="k")
    conn.commit()
    fail(a, 0.2)
    assert conn.execute("SELECT wake_at FROM pgqueue.lane").fetchone() == (None,)


def test_a_lane_comes_back_above_what_claims_have_looked_at(conn: Connection, a: Holder, b: Holder) -> None:
    (first,) = enqueue(conn, 1, key="k")
    conn.commit()
    fail(a, 60.0)
    enqueue(conn, 1, key="later")
    conn.commit()
    (seen,) = b.lanes()
    due(conn)
    found = b.run(
        lane_claim(scope(), [seen.pos], LaneSize(lanes=9, depth=1, total=9), b.leases.new(), MINUTE)
    )
    assert ids(found) == [first]


def test_two_claims_at_once_bring_a_lane_back_once(conn: Connection, a: Holder, b: Holder) -> None:
    (first,) = enqueue(conn, 1, key="k")
    conn.commit()
    fail(a, 60.0)
    due(conn)
    a.begin()
    assert ids(a.lanes(routing=False)) == [first]
    assert b.lanes(routing=False) == []
    a.rollback()  # as if it had died
    assert ids(b.lanes(routing=False)) == [first]


def test_a_key_that_rests_for_its_rate_is_put_aside_and_forgotten_when_nothing_waits(
    conn: Connection, a: Holder
) -> None:
    execute(conn, declare([Policy(name=NAME, key_limit=1, key_rate=0.01)]))
    enqueue(conn, 1, key="k")
    conn.commit()
    (job,) = a.lanes()
    a.begin()
    a.run(ack([job]))
    a.give_back((QUEUE, str(job.key)), job.lease)
    a.commit()
    assert conn.execute("SELECT wake_at IS NOT NULL FROM pgqueue.lane").fetchone() == (True,)
    conn.execute("UPDATE pgqueue.lane SET rest_until = clock_timestamp()")
    due(conn)
    assert a.lanes() == []
    assert conn.execute("SELECT count(*) FROM pgqueue.lane").fetchone() == (0,)
