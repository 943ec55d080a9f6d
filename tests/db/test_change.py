"""Jobs that wait get another priority, queue or payload; jobs that run are neither touched nor waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from pgqueue import BadOption, dead
from pgqueue.cancel import cancel
from pgqueue.change import Change, edit, move, reprioritise
from pgqueue.connection import execute
from pgqueue.dead import Filter
from pgqueue.finish import Failed, ack, bury, retry
from pgqueue.promote import promote
from pgqueue.pulse import LONG_AGO
from pgqueue.statement import Statement
from tests.factories import (
    MINUTE,
    QUEUE,
    Connection,
    Holder,
    buried,
    enqueue,
    fall_due,
    ids,
    lose,
    retried,
    row,
    scope,
    token,
    wipe,
)

ALL = scope(priorities=range(10))
BOTH = scope(queues=(QUEUE, "bulk"))


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


def test_a_job_runs_by_its_new_priority_behind_those_that_have_it(conn: Connection, a: Holder) -> None:
    one, two, three = enqueue(conn, 3, priority=5)
    (urgent,) = enqueue(conn, priority=1)
    assert execute(conn, reprioritise([three, one], 1)) == [Change(three, "changed"), Change(one, "changed")]
    conn.commit()
    assert ids(a.claim(of=ALL)) == [urgent, one, three, two]


def test_the_same_priority_again_leaves_a_job_its_place(conn: Connection, a: Holder) -> None:
    one, two = enqueue(conn, 2)
    before = row(conn, one)
    assert execute(conn, reprioritise([one], 5))[0].state == "changed"
    assert row(conn, one) == before
    conn.commit()
    assert ids(a.claim()) == [one, two]


def test_a_delayed_job_waits_on_and_has_its_priority_when_it_is_due(conn: Connection, a: Holder) -> None:
    (later,) = enqueue(conn, delay=MINUTE)
    (now,) = enqueue(conn, priority=4)
    execute(conn, reprioritise([later], 0))
    assert (row(conn, later) or {})["pos"] is None
    fall_due(conn, [later])
    conn.commit()
    a.run(promote(LONG_AGO, MINUTE * 0))
    assert ids(a.claim(of=ALL)) == [later, now]


def test_a_job_is_found_by_a_worker_whose_floors_have_passed_it(conn: Connection, a: Holder) -> None:
    """A job that kept its old position would stand below every floor."""
    (job_id,) = enqueue(conn, priority=9)
    conn.commit()
    enqueue(conn, 3)
    conn.commit()
    a.run(ack(a.claim()))
    floor = conn.execute("SELECT last_value FROM pgqueue.pos_seq").fetchone()
    execute(conn, reprioritise([job_id], 5))
    conn.commit()
    assert floor is not None
    assert ids(a.answer(floors=[int(str(floor[0]))]).jobs) == [job_id]


def test_a_job_that_runs_is_held_and_nobody_waits(conn: Connection, a: Holder) -> None:
    running, locked, waiting = enqueue(conn, 3)
    conn.commit()
    a.claim(1)
    a.begin()
    a.connection.execute("SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE", [locked])
    conn.execute("SET lock_timeout = '1s'")
    everybody = [running, locked, waiting, 2**40]
    expected = ["held", "held", "changed", "gone"]
    assert [c.state for c in execute(conn, reprioritise(everybody, 0))] == expected
    assert [c.state for c in execute(conn, move(everybody, "bulk"))] == expected
    assert [execute(conn, edit(job_id, "7")) for job_id in everybody] == expected
    before = row(conn, running)
    assert before is not None
    assert (before["priority"], before["queue"]) == (5, QUEUE)
    a.commit()


def test_a_worker_acknowledges_while_a_transaction_holds_what_it_changed(conn: Connection, a: Holder) -> None:
    """One reprioritise in an open transaction must not stop the acknowledgement of a batch."""
    made = enqueue(conn, 3)
    conn.commit()
    jobs = a.claim(2)
    execute(conn, reprioritise(made, 0))
    a.begin()
    a.connection.execute("SET LOCAL lock_timeout = '250ms'")
    assert a.run(ack(jobs)) is None
    a.commit()
    conn.commit()
    assert ids(a.claim(of=ALL)) == made[2:]


def test_a_job_whose_worker_was_lost_is_left_to_the_sweep(conn: Connection, a: Holder) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    a.claim()
    lose(conn, [job_id])
    assert execute(conn, reprioritise([job_id], 0))[0].state == "held"


def test_a_retried_job_keeps_its_backoff_and_its_attempts(conn: Connection, a: Holder) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    (job,) = a.claim()
    a.run(retry([Failed(claim=token(job), outcome=retried(60.0))], "host:1"))
    before: Any = row(conn, job_id)
    for change in (reprioritise([job_id], 2), move([job_id], "bulk")):
        assert execute(conn, change)[0].state == "changed"
    after: Any = row(conn, job_id)
    assert {k for k in before if before[k] != after[k]} == {"priority", "queue"}


def test_a_moved_job_is_claimed_from_its_new_queue_alone(conn: Connection, a: Holder) -> None:
    one, two = enqueue(conn, 2)
    (there,) = enqueue(conn, queue="bulk")
    assert execute(conn, move([one], "bulk")) == [Change(one, "changed")]
    conn.commit()
    assert ids(a.claim(of=scope(queues=("bulk",)))) == [there, one]
    assert ids(a.claim()) == [two]


def test_the_head_of_a_key_brings_its_lane_along(conn: Connection, a: Holder) -> None:
    slow, behind = enqueue(conn, 2, key="k", priority=9)
    (other,) = enqueue(conn, key="l")
    conn.commit()
    a.route()
    execute(conn, reprioritise([behind], 0))
    conn.commit()
    assert ids(a.lanes(1, of=ALL)) == [other]  # the head decides
    execute(conn, reprioritise([slow], 1))
    conn.commit()
    (job,) = a.lanes(1, of=ALL)
    assert (job.id, job.level) == (slow, 2)
    a.run(ack([job]))
    a.give_back((QUEUE, "k"), job.lease)
    assert a.lanes(1, of=ALL)[0].level == 1


def test_a_keyed_job_takes_its_place_by_id_in_the_other_queue(conn: Connection, a: Holder) -> None:
    older, younger = enqueue(conn, 2, key="k")
    (there,) = enqueue(conn, key="k", queue="bulk")
    (last,) = enqueue(conn, key="k")
    conn.commit()
    a.route(QUEUE, "bulk")
    assert execute(conn, move([younger], "bulk"))[0].state == "changed"
    conn.commit()
    assert ids(a.lanes(depth=9, of=BOTH)) == [older, younger, there, last]


@pytest.mark.parametrize("verb", [cancel, lambda made: move(made, "bulk")])
def test_a_lane_whose_head_went_away_has_the_name_of_the_next(
    conn: Connection, a: Holder, verb: Callable[[list[int]], Statement[object]]
) -> None:
    """With the name of a job that is gone no worker would take the lane."""
    (foreign,) = enqueue(conn, key="k", name="else")
    (mine,) = enqueue(conn, key="k")
    conn.commit()
    a.route()
    assert a.lanes() == []
    execute(conn, verb([foreign]))
    conn.commit()
    assert ids(a.lanes()) == [mine]


def test_a_waiting_job_runs_with_its_edited_payload(conn: Connection, a: Holder) -> None:
    (job_id,) = enqueue(conn, payload={"n": 1})
    assert execute(conn, edit(job_id, '{"n": 2}')) == "changed"
    conn.commit()
    assert [job.payload for job in a.claim()] == ['{"n": 2}']


def test_a_dead_letter_is_edited_where_it_lies_and_replayed_as_it_is_then(
    conn: Connection, a: Holder
) -> None:
    (job_id,) = enqueue(conn, payload={"n": "many"})
    conn.commit()
    (job,) = a.claim()
    a.run(bury([Failed(claim=token(job), outcome=buried())], "host:1"))
    assert execute(conn, reprioritise([job_id], 0))[0].state == "dead"
    assert execute(conn, edit(job_id, '{"n": 2}')) == "changed"
    execute(conn, dead.replay(Filter(ids=[job_id])))
    conn.commit()
    assert [job.payload for job in a.claim()] == ['{"n": 2}']


def test_a_rollback_undoes_a_change(conn: Connection, a: Holder) -> None:
    one, two = enqueue(conn, 2)
    conn.commit()
    execute(conn, reprioritise([two], 0))
    execute(conn, move([two], "bulk"))
    execute(conn, edit(two, "7"))
    assert ids(a.claim()) == [one]
    conn.rollback()
    assert [(job.id, job.payload) for job in a.claim()] == [(two, "null")]


@pytest.mark.parametrize("priority", [-1, 10, True, "high"])
def test_a_priority_that_is_none_is_refused(priority: Any) -> None:
    with pytest.raises(BadOption, match="0 to 9"):
        reprioritise([1], priority)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("pgqueue.reprioritise('{1}', 10)", "0 to 9"),
        ("pgqueue.reprioritise('{1}', NULL)", "0 to 9"),
        ("pgqueue.move('{1}', ' ')", "blank"),
        ("pgqueue.edit(1, NULL)", "no payload"),
        (r"""pgqueue.edit(1, '"\u0000"')""", "Unicode"),
    ],
)
def test_sql_refuses_what_makes_no_sense(conn: Connection, call: str, problem: str) -> None:
    with pytest.raises(psycopg.errors.DataError, match=f"(?i){problem}"):
        conn.execute(f"SELECT {call}".encode())
