"""An ordering key whose head died: it goes on, or waits until a person has decided about the dead letter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import psycopg
import pytest

from pgqueue import App, BadOption, Job, JobType, Permanent, dead
from pgqueue.config import WorkerSettings
from pgqueue.connection import execute
from pgqueue.dead import Filter
from pgqueue.declare import declare
from pgqueue.depth import depth
from pgqueue.doctor import checkup
from pgqueue.finish import Failed, ack, bury, release, snooze
from pgqueue.job import Claimed
from pgqueue.jobs import jobs
from pgqueue.promote import promote
from pgqueue.pulse import LONG_AGO
from pgqueue.worker import Worker
from tests.factories import (
    QUEUE,
    Connection,
    Holder,
    buried,
    enqueue,
    fall_due,
    ids,
    lose,
    scope,
    token,
    wipe,
)
from tests.waiting import eventually

#: Every test of lanes runs with both forms of their claim (see conftest).
BOTH_CLAIMS = True


@pytest.fixture
def dsn(database: str) -> str:
    wipe(database)
    with psycopg.connect(database) as conn:
        conn.execute("INSERT INTO pgqueue.job_type (name, on_dead) VALUES ('work', 'block')")
    return database


def die(holder: Holder, job: Claimed, *, give_back: bool = True) -> None:
    holder.run(bury([Failed(claim=token(job), outcome=buried())], "host:1"))
    if give_back:
        holder.give_back((QUEUE, str(job.key)), job.lease)


def states(conn: Connection) -> list[str]:
    found = [job.state.value for job in execute(conn, jobs())][::-1]
    conn.commit()
    return found


def move(conn: Connection, verb: Callable[..., object], job_id: int) -> None:
    execute(conn, verb(Filter(ids=[job_id])))  # type: ignore[arg-type]


def test_a_dead_head_blocks_its_key_and_no_other(conn: Connection, a: Holder) -> None:
    """timgit/pg-boss PR#849, MarcosRabadan/Agendia#260: one poisoned head held up every other key."""
    made = enqueue(conn, 3, key="k")
    (other,) = enqueue(conn, key="l")
    conn.commit()
    head, second = sorted(a.lanes(), key=lambda job: str(job.key))
    die(a, head)
    a.run(ack([second]))
    a.give_back((QUEUE, "l"), second.lease)
    assert second.id == other
    assert a.lanes(depth=5) == []
    assert states(conn) == ["blocked", "blocked"]
    (seen,) = execute(conn, depth())
    assert (seen.ready, seen.blocked, seen.oldest_ready_s) == (0, 2, 0.0)
    shown = execute(conn, dead.show(made[0]))
    assert shown is not None
    assert shown.blocks


@pytest.mark.parametrize("late", [True, False])
def test_a_replay_takes_its_place_before_all_that_waited(conn: Connection, a: Holder, late: bool) -> None:
    made = enqueue(conn, 3, key="k")
    conn.commit()
    die(a, a.lanes()[0])
    assert a.lanes() == []
    if late:
        made += enqueue(conn, key="k")
    move(conn, dead.replay, made[0])
    conn.commit()
    assert ids(a.lanes(depth=9)) == made
    assert states(conn)[0] == "in_flight"


def test_a_discard_lets_the_next_one_run(conn: Connection, a: Holder) -> None:
    made = enqueue(conn, 3, key="k")
    conn.commit()
    die(a, a.lanes()[0])
    assert a.lanes() == []
    move(conn, dead.discard, made[0])
    assert a.lanes() == []  # not before the commit
    conn.commit()
    assert ids(a.lanes(depth=9)) == made[1:]


def test_a_key_goes_on_when_the_last_of_its_blocking_letters_is_gone(conn: Connection, a: Holder) -> None:
    made = enqueue(conn, 4, key="k")
    conn.commit()
    first, second = a.lanes(depth=2)
    die(a, first, give_back=False)
    die(a, second)
    move(conn, dead.replay, made[1])
    conn.commit()
    assert a.lanes(depth=9) == []
    move(conn, dead.replay, made[0])
    conn.commit()
    assert ids(a.lanes(depth=9)) == made


def test_the_doctor_names_keys_that_wait_for_a_person(conn: Connection, a: Holder) -> None:
    made = enqueue(conn, 2, key="k")
    conn.commit()
    die(a, a.lanes()[0])
    (found,) = [f for f in checkup(conn) if f.check == "keys" and f.text]
    assert "1 ordering keys of queue 'default'" in found.text
    assert f"pgqueue dead show {made[0]}" in found.remedy
    move(conn, dead.discard, made[0])
    conn.commit()
    assert not [f for f in checkup(conn) if f.check == "keys" and "ordering keys" in f.text]


def test_a_type_that_continues_blocks_nothing(conn: Connection, a: Holder) -> None:
    conn.execute("UPDATE pgqueue.job_type SET on_dead = 'continue'")
    made = enqueue(conn, 2, key="k")
    conn.commit()
    die(a, a.lanes()[0])
    assert ids(a.lanes()) == made[1:]
    move(conn, dead.replay, made[0])
    conn.commit()
    assert states(conn) == ["ready", "in_flight"]  # the older one has its place back, the younger one runs


def test_a_job_without_a_key_blocks_nothing(conn: Connection, a: Holder) -> None:
    made = enqueue(conn, 2)
    conn.commit()
    die(a, a.claim(1)[0], give_back=False)
    assert ids(a.claim()) == made[1:]
    shown = execute(conn, dead.show(made[0]))
    assert shown is not None
    assert not shown.blocks


def test_a_worker_that_dies_right_after_its_job_died_leaves_the_key_blocked(
    conn: Connection, a: Holder, b: Holder
) -> None:
    """The lane's lease runs out, and whoever takes it over must learn of the death."""
    made = enqueue(conn, 4, key="k")
    conn.commit()
    first, second = a.lanes(depth=2)
    die(a, first, give_back=False)
    lose(conn, [second.id])
    conn.execute(
        "UPDATE pgqueue.lane SET wake_at = wake_at - interval '1 h', deadline = clock_timestamp() - interval '1 s'"
    )
    conn.commit()
    assert b.lanes() == []
    assert states(conn) == ["blocked"] * 3
    move(conn, dead.discard, made[0])
    conn.commit()
    assert ids(b.lanes()) == [second.id]


def test_jobs_handed_out_behind_a_dead_one_go_back_and_wait(conn: Connection, a: Holder) -> None:
    made = enqueue(conn, 4, key="k")
    conn.commit()
    first, *rest = a.lanes(depth=3)
    a.run(release(rest))
    die(a, first)
    assert a.lanes() == []
    move(conn, dead.replay, made[0])
    conn.commit()
    assert [(job.id, job.attempt) for job in a.lanes(depth=9)] == [(job_id, 1) for job_id in made]


def test_a_key_that_was_empty_when_its_job_died_is_blocked_for_what_comes(
    conn: Connection, a: Holder
) -> None:
    (head,) = enqueue(conn, key="k")
    conn.commit()
    die(a, a.lanes()[0])
    made = enqueue(conn, 2, key="k")
    conn.commit()
    assert a.lanes() == []
    assert states(conn) == ["blocked", "blocked"]
    move(conn, dead.discard, head)
    conn.commit()
    assert ids(a.lanes(depth=2)) == made


@pytest.mark.parametrize("verb", [dead.replay, dead.discard])
@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_a_claim_that_meets_a_move_blocks_no_key_for_ever(
    conn: Connection, a: Holder, b: Holder, verb: Callable[..., object], outcome: str
) -> None:
    """Whoever marks the key while its last letter is just going would leave a wait that nobody ends."""
    (head,) = enqueue(conn, key="k")
    conn.commit()
    die(a, a.lanes()[0])
    (after,) = enqueue(conn, key="k")
    conn.commit()
    move(conn, verb, head)
    assert b.lanes() == []  # routes the key, and finds a letter that is on its way
    getattr(conn, outcome)()
    conn.execute(
        "UPDATE pgqueue.lane SET wake_at = wake_at - interval '1 h', deadline = clock_timestamp() "
        "WHERE deadline < 'infinity'"
    )
    conn.commit()
    expected = {"commit": [head, after] if verb is dead.replay else [after], "rollback": []}[outcome]
    assert ids(b.lanes(depth=5)) == expected


@pytest.mark.parametrize("verb", [dead.replay, dead.discard])
def test_a_move_that_meets_a_claim_waits_for_it_and_ends_the_wait_it_has_set(
    conn: Connection, a: Holder, b: Holder, verb: Callable[..., object]
) -> None:
    made = enqueue(conn, 2, key="k")
    conn.commit()
    (job,) = a.lanes()
    die(a, job, give_back=False)
    b.begin()
    b.give_back((QUEUE, "k"), job.lease)  # not yet committed: the lane waits without end
    conn.execute("SET LOCAL lock_timeout = '100ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        move(conn, verb, made[0])
    conn.rollback()
    b.commit()
    assert b.lanes() == []
    move(conn, verb, made[0])
    conn.commit()
    assert ids(b.lanes(depth=5)) == (made if verb is dead.replay else made[1:])


def test_a_letter_that_goes_while_its_worker_still_holds_the_key_leaves_it_to_the_worker(
    conn: Connection, a: Holder, b: Holder
) -> None:
    made = enqueue(conn, 3, key="k")
    conn.commit()
    first, second = a.lanes(depth=2)
    die(a, first, give_back=False)
    move(conn, dead.discard, made[0])
    conn.commit()
    assert b.lanes() == []
    a.run(ack([second]))
    a.give_back((QUEUE, "k"), first.lease)
    assert ids(b.lanes()) == made[2:]


def test_a_snooze_and_a_delay_go_on_as_ever_beside_a_blocked_key(conn: Connection, a: Holder) -> None:
    enqueue(conn, 2, key="k")
    snoozed, behind = enqueue(conn, 2, key="l")
    (later,) = enqueue(conn, key="k", delay=timedelta(hours=1))
    conn.commit()
    dying, head = sorted(a.lanes(), key=lambda job: str(job.key))
    die(a, dying)
    a.run(snooze([head], [60.0]))
    a.give_back((QUEUE, "l"), head.lease, wait=60.0)
    fall_due(conn, [later])
    conn.commit()
    a.run(promote(LONG_AGO, timedelta(0)))
    assert a.lanes() == []
    conn.execute(
        "UPDATE pgqueue.lane SET wake_at = wake_at - interval '1 h', deadline = clock_timestamp() "
        "WHERE deadline < 'infinity'"
    )
    conn.commit()
    again = a.lanes(depth=3)
    assert [(job.id, job.attempt) for job in again] == [(snoozed, 1), (behind, 1)]
    move(conn, dead.discard, dying.id)
    conn.commit()
    assert a.lanes(depth=3)[-1].id == later


def test_a_lane_has_the_priority_of_its_head(conn: Connection, a: Holder) -> None:
    enqueue(conn, key="urgent-behind", priority=9)
    enqueue(conn, key="urgent-behind", priority=0)
    enqueue(conn, 2, key="middle", priority=5)
    conn.commit()
    of = scope(priorities=range(10))
    (job,) = a.lanes(1, of=of)
    assert job.key == "middle"  # the urgent job waits behind a head that is not
    a.run(ack([job]))
    a.give_back((QUEUE, "middle"), job.lease)
    assert a.lanes(1, of=of)[0].key == "middle"
    (slow,) = a.lanes(1, of=of)
    a.run(ack([slow]))
    a.give_back((QUEUE, "urgent-behind"), slow.lease)
    enqueue(conn, key="late", priority=4)
    conn.commit()
    assert [job.key for job in (a.lanes(1, of=of)[0], a.lanes(1, of=of)[0])] == ["urgent-behind", "late"]


app = App()
ran: list[tuple[int, int]] = []
gate = threading.Event()
trouble: set[int] = set()


@app.job("step", on_dead="block", max_attempts=1)
def step(n: int, job: Job) -> None:
    ran.append((n, job.attempt))
    if n in trouble:
        raise Permanent("it never can")


@app.job("waits")
def waits(n: int, job: Job) -> None:
    ran.append((n, job.attempt))
    gate.wait(100)


@app.job("astep", on_dead="block", max_attempts=1)
async def astep(n: int, job: Job) -> None:
    step.handler(n, job)


@pytest.mark.parametrize("kind", [step, astep])
def test_a_worker_stops_at_the_dead_one_and_goes_on_after_a_replay(
    dsn: str, conn: Connection, kind: JobType[int]
) -> None:
    ran.clear()
    trouble.add(3)
    kind.using(key="k").enqueue_many(conn, range(1, 30))
    kind.using(key="l").enqueue_many(conn, range(101, 130))
    conn.commit()
    worker = Worker(app, dsn, WorkerSettings(concurrency=4))
    worker.start()
    try:
        eventually(lambda: len(ran) == 32)
        eventually(lambda: set(states(conn)) == {"blocked"})
        assert [n for n, _ in ran if n < 100] == [1, 2, 3]
        trouble.clear()
        execute(conn, dead.replay(Filter(name=kind.name)))
        conn.commit()
        eventually(lambda: len(ran) == 59)
    finally:
        worker.stop()
    assert [n for n, _ in ran if n < 100] == [1, 2, 3, *range(3, 30)]
    assert {attempt for _, attempt in ran} == {1}


def test_a_worker_stops_at_a_job_that_expired(dsn: str, conn: Connection) -> None:
    ran.clear()
    step.using(key="k").enqueue(conn, 1)
    conn.execute("SELECT pgqueue.enqueue('step', '2', key => 'k', expires_at => clock_timestamp())")
    step.using(key="k").enqueue(conn, 3)
    conn.commit()
    worker = Worker(app, dsn, WorkerSettings())
    worker.start()
    try:
        eventually(lambda: execute(conn, dead.tell()).jobs)
        eventually(lambda: set(states(conn)) == {"blocked"})
    finally:
        worker.stop()
    assert [n for n, _ in ran] == [1]


def test_a_policy_that_makes_no_sense_is_refused_when_the_module_is_imported(dsn: str) -> None:
    with pytest.raises(BadOption, match="continue or block"):
        App().job("x", on_dead="stop")  # type: ignore[arg-type]
    for bad in ({"limit": 2}, {"rate": "1/s"}):
        with pytest.raises(BadOption, match="no ordering key"):
            App().job("x", on_dead="block", **bad)
    with psycopg.connect(dsn) as conn:
        execute(conn, declare(kind.policy for kind in app.types.values()))
        rows = conn.execute("SELECT name, on_dead FROM pgqueue.job_type ORDER BY 1").fetchall()
    assert rows == [("astep", "block"), ("step", "block"), ("waits", None), ("work", "block")]


def test_a_lane_that_was_locked_when_its_worker_gave_it_back_is_given_back_a_moment_later(
    dsn: str, conn: Connection
) -> None:
    """Its key stood still for the rest of a lease: a replay at the moment of the death is enough."""
    ran.clear()
    gate.clear()
    waits.using(key="k").enqueue_many(conn, [1, 2])
    conn.commit()
    worker = Worker(app, dsn, WorkerSettings(concurrency=2))
    worker.start()
    try:
        eventually(lambda: ran == [(1, 1)])
        conn.execute("SELECT FROM pgqueue.lane FOR NO KEY UPDATE")
        with psycopg.connect(dsn, autocommit=True) as other:
            gate.set()
            eventually(lambda: other.execute("SELECT FROM pgqueue.job").rowcount == 1)
            assert other.execute("SELECT FROM pgqueue.lane WHERE lease <> 0").rowcount == 1
        conn.rollback()
        eventually(lambda: ran == [(1, 1), (2, 1)], 5)
    finally:
        worker.stop()


def test_a_replay_at_the_moment_of_the_death_lets_the_key_go_on_at_once(dsn: str, conn: Connection) -> None:
    ran.clear()
    worker = Worker(app, dsn, WorkerSettings(concurrency=2))
    worker.start()
    try:
        for n in range(10):
            trouble.add(3)
            step.using(key=f"k{n}").enqueue_many(conn, [3, 4])
            conn.commit()
            while not execute(conn, dead.tell()).jobs:
                conn.commit()
            trouble.clear()
            execute(conn, dead.replay(Filter(name="step")))
            conn.commit()
            eventually(lambda n=n: len(ran) == 3 * (n + 1), 5)  # type: ignore[misc]
    finally:
        worker.stop()
    assert [n for n, _ in ran] == [3, 3, 4] * 10
