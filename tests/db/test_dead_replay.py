"""A dead letter goes back to its queue once, whoever asks and whatever dies on the way; or it goes for good."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from pgqueue import dead
from pgqueue.cancel import cancel
from pgqueue.connection import execute
from pgqueue.dead import Filter
from pgqueue.finish import Failed, ack, bury, retry
from tests.factories import Holder, buried, enqueue, ids, lose, retried, row, token, wipe
from tests.server import Connection
from tests.waiting import eventually


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


@pytest.fixture
def holder(dsn: str) -> Iterator[Holder]:
    with Holder(dsn) as opened:
        yield opened


def die(conn: Connection, holder: Holder, n: int = 1, **options: Any) -> list[int]:
    """Enqueue n jobs and bury them at their first attempt."""
    made = enqueue(conn, n, **options)
    conn.commit()
    jobs = holder.lanes(depth=n) if options.get("key") else holder.claim(n)
    holder.run(bury([Failed(claim=token(job), outcome=buried()) for job in jobs], "host:1"))
    for job in jobs:
        if job.key:
            holder.give_back(("default", job.key), job.lease)
    return made


def everywhere(conn: Connection) -> tuple[list[int], list[int]]:
    """Return the ids of live jobs and of dead letters."""
    live = [int(str(i)) for (i,) in conn.execute("SELECT id FROM pgqueue.job ORDER BY id")]
    gone = [int(str(i)) for (i,) in conn.execute("SELECT id FROM pgqueue.dead_job ORDER BY id")]
    conn.commit()
    return live, gone


def test_a_replayed_job_is_the_same_job_with_its_attempts_before_it(conn: Connection, holder: Holder) -> None:
    enqueue(conn, 3)
    (job_id,) = enqueue(
        conn, payload={"a": [1, 2]}, priority=5, max_attempts=7, headers={"x": 1}, expires_at="2100-01-01"
    )
    conn.commit()
    before = row(conn, job_id)
    conn.commit()
    jobs = {job.id: job for job in holder.claim()}
    holder.run(bury([Failed(claim=token(jobs[job_id]), outcome=buried())], "host:1"))
    moved = execute(conn, dead.replay(Filter(ids=[job_id])))
    conn.commit()
    assert (moved.ids, moved.last) == ((job_id,), job_id)
    after = row(conn, job_id)
    conn.commit()
    assert before is not None
    assert after is not None
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"pos", "ready_at"}
    assert after["pos"] > before["pos"]
    assert datetime.fromisoformat(after["ready_at"]) > datetime.fromisoformat(after["enqueued_at"])
    assert (after["attempt"], after["lost"], after["lease"]) == (0, 0, 0)
    (again,) = holder.claim()
    assert (again.id, again.attempt, again.payload) == (job_id, 1, '{"a": [1, 2]}')


def test_a_job_that_failed_permanently_runs_again_after_a_replay(conn: Connection, holder: Holder) -> None:
    """The second fault of the usual design: a marker that outlives the failure makes the replay a no-op."""
    (job_id,) = die(conn, holder)
    for _ in range(3):
        execute(conn, dead.replay(Filter(ids=[job_id])))
        conn.commit()
        (job,) = holder.claim()
        assert (job.id, job.attempt) == (job_id, 1)
        holder.run(bury([Failed(claim=token(job), outcome=buried())], "host:1"))
    execute(conn, dead.replay(Filter(ids=[job_id])))
    conn.commit()
    (job,) = holder.claim()
    assert holder.run(ack([job])) is None
    assert everywhere(conn) == ([], [])


def test_the_history_of_a_job_survives_its_replay(conn: Connection, holder: Holder) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    (job,) = holder.claim()
    holder.run(retry([Failed(claim=token(job), outcome=retried(0.0))], "host:1"))
    conn.execute("UPDATE pgqueue.job SET pos = 1, run_at = NULL")
    conn.commit()
    (job,) = holder.claim()
    holder.run(bury([Failed(claim=token(job), outcome=buried("exhausted"))], "host:2"))
    execute(conn, dead.replay(Filter(ids=[job_id])))
    conn.commit()
    (job,) = holder.claim()
    holder.run(bury([Failed(claim=token(job), outcome=buried())], "host:3"))
    found = execute(conn, dead.show(job_id))
    assert found is not None
    assert [(a.attempt, a.outcome, a.worker) for a in found.history] == [
        (1, "retry", "host:1"),
        (2, "dead", "host:2"),
    ]
    assert (found.attempts, found.reason, found.worker) == (1, "permanent", "host:3")
    assert found.history[1].traceback == "Traceback: broken"
    conn.commit()


def test_a_job_that_died_of_age_gets_new_time(conn: Connection, holder: Holder) -> None:
    (job_id,) = enqueue(conn, expires_at="2001-01-01")
    conn.commit()
    (job,) = holder.claim()
    holder.run(bury([Failed(claim=token(job), outcome=buried("expired"))], "host:1"))
    execute(conn, dead.replay(Filter(ids=[job_id])))
    conn.commit()
    (job,) = holder.claim()
    assert job.extra is None


def test_a_cancel_that_came_too_late_does_not_stop_the_replay(conn: Connection, holder: Holder) -> None:
    enqueue(conn)
    conn.commit()
    (job,) = holder.claim()
    assert execute(conn, cancel([job.id]))[0].state == "requested"
    conn.commit()
    holder.run(bury([Failed(claim=token(job), outcome=buried())], "host:1"))
    execute(conn, dead.replay(Filter(ids=[job.id])))
    conn.commit()
    (again,) = holder.claim()
    assert again.extra is None


def test_a_keyed_job_goes_back_to_its_place(conn: Connection, holder: Holder) -> None:
    """procrastinate 1446: a job that came back met its twin of the same key."""
    first, third = die(conn, holder, 2, key="k")
    second, fourth = 0, 0
    # The dead ones are the first and the third of four: ids decide, and they keep theirs.
    conn.execute("UPDATE pgqueue.dead_job SET id = id + 1 WHERE id = %s", [third])
    third += 1
    conn.execute("SELECT setval('pgqueue.job_id_seq', %s)", [third])
    second = third - 1
    conn.execute(
        "INSERT INTO pgqueue.job (id, name, queue, priority, key) OVERRIDING SYSTEM VALUE "
        "VALUES (%s, 'work', 'default', 5, 'k')",
        [second],
    )
    (fourth,) = enqueue(conn, key="k")
    conn.commit()
    execute(conn, dead.replay(Filter(queue="default")))
    conn.commit()
    ran = []
    while jobs := holder.lanes():
        (job,) = jobs
        ran.append(job.id)
        holder.run(ack([job]))
        holder.give_back(("default", "k"), job.lease)
    assert ran == [first, second, third, fourth]


def test_replay_takes_the_lowest_ids_first_and_goes_on_behind_the_last(
    conn: Connection, holder: Holder
) -> None:
    made = die(conn, holder, 5)
    one = execute(conn, dead.replay(Filter(name="work"), n=2))
    two = execute(conn, dead.replay(Filter(name="work"), n=2, after=one.last or 0))
    three = execute(conn, dead.replay(Filter(name="work"), n=2, after=two.last or 0))
    over = execute(conn, dead.replay(Filter(name="work"), n=2, after=three.last or 0))
    conn.commit()
    assert [*one.ids, *two.ids, *three.ids] == made
    assert (over.ids, over.last) == ((), None)


def test_a_second_operator_passes_what_the_first_is_moving(
    dsn: str, conn: Connection, holder: Holder
) -> None:
    """PgQue 104: two who acted on one row wrote it twice."""
    made = die(conn, holder, 6)
    with psycopg.connect(dsn) as other:
        mine = execute(conn, dead.replay(Filter(name="work"), n=3))
        theirs = execute(other, dead.replay(Filter(name="work"), n=4))
        assert mine.ids == tuple(made[:3])
        assert (theirs.ids, theirs.last) == ((made[3],), made[3])
        conn.commit()
        other.commit()
        rest = execute(other, dead.replay(Filter(name="work")))
        other.commit()
    assert rest.ids == tuple(made[4:])
    assert sorted(ids(holder.claim())) == made


def test_two_operators_at_once_replay_each_job_once(dsn: str, conn: Connection, holder: Holder) -> None:
    """PgQue 104, hatchet 3864: one job, two places in the queue."""
    made = die(conn, holder, 300)
    moved: list[list[int]] = [[], []]
    ready = threading.Barrier(2)

    def operate(place: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as own:
            after = 0
            ready.wait(60)
            while True:
                batch = execute(own, dead.replay(Filter(name="work"), n=7, after=after))
                if batch.last is None:
                    return
                after = batch.last
                moved[place].extend(batch.ids)

    operators = [threading.Thread(target=operate, args=(place,)) for place in range(2)]
    for one in operators:
        one.start()
    for one in operators:
        one.join(60)
    assert not set(moved[0]) & set(moved[1])
    live, gone = everywhere(conn)
    assert sorted(live + gone) == made
    assert sorted(moved[0] + moved[1]) == live


def test_an_operator_that_dies_in_the_middle_loses_nothing(
    dsn: str, conn: Connection, holder: Holder
) -> None:
    """The sixth fault of the usual design: pop, crash, and the push never happens."""
    made = die(conn, holder, 4)
    other = psycopg.connect(dsn)
    execute(other, dead.replay(Filter(name="work"), n=3))
    pid = other.info.backend_pid
    assert everywhere(conn) == ([], made)
    conn.execute("SELECT pg_terminate_backend(%s)", [pid])
    conn.commit()
    eventually(lambda: _gone(conn, pid))
    assert everywhere(conn) == ([], made)
    with pytest.raises(psycopg.OperationalError):
        other.commit()
    other.close()
    execute(conn, dead.replay(Filter(name="work")))
    assert everywhere(conn) == (made, [])


def _gone(conn: Connection, pid: int) -> bool:
    found = conn.execute("SELECT FROM pg_stat_activity WHERE pid = %s", [pid]).fetchone()
    conn.commit()
    return found is None


def test_a_rolled_back_replay_leaves_the_dead_letter(conn: Connection, holder: Holder) -> None:
    made = die(conn, holder)
    execute(conn, dead.replay(Filter(ids=made)))
    conn.rollback()
    assert everywhere(conn) == ([], made)


def test_a_new_payload_goes_with_one_job_and_must_be_readable(conn: Connection, holder: Holder) -> None:
    one, two = die(conn, holder, 2, payload={"order": "x"})
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="goes with one job, not with 2"):
        execute(conn, dead.replay(Filter(ids=[one, two]), payload="{}"))
    conn.rollback()
    with pytest.raises(psycopg.errors.UntranslatableCharacter):
        execute(conn, dead.replay(Filter(ids=[one]), payload='{"order": "\\u0000"}'))
    conn.rollback()
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="more than 1048576 bytes"):
        execute(conn, dead.replay(Filter(ids=[one]), payload=f'"{"x" * 1_048_576}"'))
    conn.rollback()
    execute(conn, dead.replay(Filter(ids=[one]), payload='{"order": 17}'))
    conn.commit()
    (job,) = holder.claim()
    assert (job.id, job.payload) == (one, '{"order": 17}')


def test_an_id_that_is_no_dead_letter_is_left_out(conn: Connection, holder: Holder) -> None:
    (job_id,) = die(conn, holder)
    (live,) = enqueue(conn)
    conn.commit()
    moved = execute(conn, dead.replay(Filter(ids=[job_id, live, 2**60])))
    assert moved.ids == (job_id,)
    assert execute(conn, dead.replay(Filter(ids=[job_id, live]))).ids == ()
    assert execute(conn, dead.discard(Filter(ids=[live]))).ids == ()
    assert row(conn, live) is not None
    conn.commit()


def test_discard_deletes_for_good_and_counts(conn: Connection, holder: Holder) -> None:
    made = die(conn, holder, 3)
    moved = execute(conn, dead.discard(Filter(ids=made[:2])))
    conn.commit()
    assert moved.ids == tuple(made[:2])
    assert everywhere(conn) == ([], made[2:])
    assert execute(conn, dead.discard(Filter(ids=made), n=1)).ids == (made[2],)
    counted = conn.execute("SELECT sum(n) FROM pgqueue.tally WHERE outcome = 'discarded'").fetchone()
    assert counted == (3,)
    conn.commit()


def test_replay_and_discard_are_sql_functions_too(conn: Connection, holder: Holder) -> None:
    made = die(conn, holder, 4)
    conn.execute("UPDATE pgqueue.dead_job SET error_type = 'Odd' WHERE id = ANY (%s)", [made[:2]])
    back = conn.execute(
        "SELECT pgqueue.replay(ARRAY(SELECT id FROM pgqueue.dead_letters(error_type => 'Odd', queue => 'default')))"
    ).fetchall()
    assert back == [(made[0],), (made[1],)]
    assert conn.execute("SELECT pgqueue.discard(%s)", [made]).fetchall() == [(made[2],), (made[3],)]
    conn.commit()
    assert everywhere(conn) == (made[:2], [])


def test_a_stale_worker_cannot_touch_a_job_that_was_replayed(conn: Connection, holder: Holder) -> None:
    """oban 532, semaprax 192: a stale attempt matched the new holder."""
    enqueue(conn)
    conn.commit()
    (stale,) = holder.claim()
    lose(conn, [stale.id])
    conn.commit()
    (job,) = holder.suspects()
    holder.run(bury([Failed(claim=token(job), outcome=buried())], "host:1"))
    execute(conn, dead.replay(Filter(ids=[job.id])))
    conn.commit()
    assert holder.run(ack([stale])) == []
    assert holder.run(ack([job])) == []
    (again,) = holder.claim()
    assert again.lease not in (stale.lease, job.lease)


def test_a_replayed_job_counts_as_new_from_the_moment_of_the_replay(conn: Connection, holder: Holder) -> None:
    (job_id,) = die(conn, holder)
    conn.execute("UPDATE pgqueue.dead_job SET enqueued_at = now() - interval '10 days'")
    execute(conn, dead.replay(Filter(ids=[job_id])))
    conn.commit()
    found = conn.execute("SELECT ready, oldest_ready_s FROM pgqueue.queue_depth").fetchone()
    conn.commit()
    assert found is not None
    assert found[0] == 1
    assert isinstance(found[1], float)
    assert found[1] < 60
    kept = conn.execute("SELECT enqueued_at FROM pgqueue.job").fetchone()
    conn.commit()
    assert kept is not None
    assert isinstance(kept[0], datetime)
    assert (datetime.now(UTC) - kept[0]).days == 10
