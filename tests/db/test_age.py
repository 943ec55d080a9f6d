"""Aging: how long a job of low priority waits is bounded, however much urgent work comes in."""

from __future__ import annotations

from datetime import timedelta

import pytest
from click.testing import CliRunner

from pgqueue import BadOption
from pgqueue.age import age, age_queue
from pgqueue.cli import main
from pgqueue.connection import execute
from pgqueue.finish import Failed, ack, retry
from tests.factories import MINUTE, QUEUE, Connection, Holder, enqueue, ids, retried, scope, token, wipe

ALL = scope(priorities=range(10))
ALWAYS = timedelta(0)


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


def pass_time(conn: Connection, seconds: float) -> None:
    """Let all jobs wait so much longer."""
    conn.execute(
        "UPDATE pgqueue.job j SET enqueued_at = j.enqueued_at - %(s)s * interval '1 s',"
        " ready_at = j.ready_at - %(s)s * interval '1 s', aged_at = j.aged_at - %(s)s * interval '1 s'",
        {"s": seconds},
    )
    conn.commit()


def aged(conn: Connection) -> int:
    n = execute(conn, age(ALWAYS))
    conn.commit()
    return n


def priorities(conn: Connection) -> list[int]:
    rows = conn.execute("SELECT j.priority FROM pgqueue.job j ORDER BY j.id").fetchall()
    conn.commit()
    return [int(str(row[0])) for row in rows]


def test_a_job_goes_up_one_level_each_time_it_has_waited_for_the_age(conn: Connection) -> None:
    execute(conn, age_queue(QUEUE, MINUTE))
    enqueue(conn, priority=9)
    seen = []
    for _ in range(11):
        pass_time(conn, 61)
        aged(conn)
        assert aged(conn) == 0  # it waits anew
        seen += priorities(conn)
    assert seen == [8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0]


def test_under_a_flood_of_urgent_jobs_the_lowest_one_runs_after_nine_ages_and_the_queue_before_it(
    conn: Connection, a: Holder
) -> None:
    """awa benchmark follow-up 6: aging never fired, in sixty minutes; so the bound is measured."""
    execute(conn, age_queue(QUEUE, MINUTE))
    (bulk,) = enqueue(conn, priority=9)
    enqueue(conn, 20, priority=0)
    conn.commit()
    steps = 0
    while steps < 200:  # one comes, one goes, every ten seconds
        steps += 1
        enqueue(conn, priority=0)
        pass_time(conn, 10)
        aged(conn)
        (job,) = a.claim(1, of=ALL)
        a.run(ack([job]))
        if job.id == bulk:
            break
    assert 54 <= steps <= 9 * 7 + 21


def test_without_an_age_it_waits_for_ever(conn: Connection, a: Holder) -> None:
    enqueue(conn, priority=9)
    enqueue(conn, queue="other", priority=9)
    execute(conn, age_queue("other", MINUTE))
    pass_time(conn, 86_400)
    assert aged(conn) == 1
    assert priorities(conn) == [9, 8]
    execute(conn, age_queue("other", timedelta(0)))
    pass_time(conn, 86_400)
    assert aged(conn) == 0


def test_jobs_that_rise_together_keep_their_order_behind_those_of_the_level(
    conn: Connection, a: Holder
) -> None:
    execute(conn, age_queue(QUEUE, MINUTE))
    old = enqueue(conn, 3, priority=6)
    pass_time(conn, 61)
    there = enqueue(conn, 2, priority=5)
    conn.commit()
    assert aged(conn) == 3
    assert ids(a.claim(of=ALL)) == [*there, *old]


def test_what_runs_waits_for_its_time_or_is_locked_does_not_rise(conn: Connection, a: Holder) -> None:
    execute(conn, age_queue(QUEUE, MINUTE))
    running, failed, locked, _ = enqueue(conn, 4)
    enqueue(conn, delay=timedelta(hours=1))
    conn.commit()
    jobs = a.claim(2)
    assert ids(jobs) == [running, failed]
    a.run(retry([Failed(claim=token(jobs[1]), outcome=retried(60.0))], "host:1"))
    pass_time(conn, 61)
    a.begin()
    a.connection.execute("SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE", [locked])
    conn.execute("SET lock_timeout = '1s'")
    assert aged(conn) == 1
    a.commit()
    assert priorities(conn) == [5, 5, 5, 4, 5]


def test_a_page_bounds_the_work_of_one_call(conn: Connection) -> None:
    execute(conn, age_queue(QUEUE, MINUTE))
    enqueue(conn, 30, priority=9)
    enqueue(conn, 30, priority=4)
    pass_time(conn, 61)
    counts = [conn.execute("SELECT pgqueue.age(20)").fetchone() for _ in range(3)]
    assert counts == [(40,), (20,), (0,)]


def test_the_head_of_a_key_rises_with_its_lane(conn: Connection, a: Holder) -> None:
    execute(conn, age_queue(QUEUE, MINUTE))
    head, behind = enqueue(conn, 2, key="k", priority=9)
    enqueue(conn, key="l", priority=8)
    conn.commit()
    a.route()
    for _ in range(2):
        pass_time(conn, 61)
        aged(conn)
        conn.execute("UPDATE pgqueue.job SET priority = 8, aged_at = now() WHERE key = 'l'")
        conn.execute("UPDATE pgqueue.lane SET priority = 8 WHERE key = 'l'")
        conn.commit()
    assert priorities(conn) == [7, 9, 8]
    (job,) = a.lanes(1, of=ALL)
    assert job.id == head
    assert behind


def test_it_is_done_by_turn(conn: Connection) -> None:
    execute(conn, age_queue(QUEUE, MINUTE))
    enqueue(conn, priority=9)
    pass_time(conn, 61)
    assert execute(conn, age(MINUTE)) == 1
    conn.commit()
    pass_time(conn, 61)
    assert execute(conn, age(MINUTE)) == 0
    conn.rollback()
    conn.execute("SELECT setval('pgqueue.turn_age', 0)")


@pytest.mark.parametrize("after", [0.5, -1, 1e9])
def test_an_age_that_makes_no_sense_is_refused(after: float) -> None:
    with pytest.raises(BadOption, match="age_after"):
        age_queue(QUEUE, timedelta(seconds=after))


def test_the_age_is_set_from_the_command_line(dsn: str, conn: Connection) -> None:
    def stored() -> list[tuple[object, ...]]:
        found = conn.execute("SELECT name, age_after_s, max_depth FROM pgqueue.queue").fetchall()
        conn.commit()
        return found

    def run(*words: str) -> str:
        result = CliRunner().invoke(main, ["queue", "set", "--dsn", dsn, *words])
        assert result.exit_code == 0, result.output
        return result.output

    assert run("bulk", "--age-after", "10m") == "queue bulk: max depth none, max age none, age after 600 s\n"
    run("bulk", "--max-depth", "7")
    assert stored() == [("bulk", 600.0, 7)]
    assert run("bulk", "--age-after", "0s") == "queue bulk: max depth 7, max age none, age after none\n"
    assert stored() == [("bulk", None, 7)]
