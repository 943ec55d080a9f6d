"""What follows a job is enqueued in the transaction of its acknowledgement: exactly once, or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy.orm import Session

from pgqueue import App, Backoff, Job, Permanent
from pgqueue.cancel import cancel
from pgqueue.config import WorkerSettings
from pgqueue.connection import execute
from pgqueue.dead import Filter, discard, replay
from pgqueue.finish import complete
from pgqueue.job import Completed
from pgqueue.step import steps_json
from pgqueue.worker import Worker
from tests.factories import Holder, enqueue, lose, token
from tests.server import Connection
from tests.waiting import eventually

Start = Callable[..., Worker]
SOON = Backoff(base=0.01, cap=0.05)


@pytest.fixture
def start(dsn: str) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(app: App, **settings: Any) -> Worker:
            worker = Worker(app, dsn, WorkerSettings(**{"visibility": 60.0, "grace": 5.0, **settings}))
            worker.start()
            stack.callback(worker.stop)
            return worker

        yield begin


class Chain:
    """An app of jobs that note that they ran; `bad` fails for good until it is mended."""

    def __init__(self) -> None:
        self.app = App()
        self.ran: list[tuple[str, Any]] = []
        self.mended = False
        for name in ("first", "second", "third", "bad", "grower"):
            setattr(self, name, self.app.job(name, backoff=SOON)(getattr(self, f"_{name}")))

    first: Any
    second: Any
    third: Any
    bad: Any
    grower: Any

    def _first(self, what: str) -> None:
        self.ran.append(("first", what))

    def _second(self, what: str, job: Job) -> None:
        self.ran.append(("second", what))
        self.context = job

    def _third(self, what: str) -> None:
        self.ran.append(("third", what))

    def _bad(self, what: str) -> None:
        if not self.mended:
            raise Permanent("broken")
        self.ran.append(("bad", what))

    def _grower(self, what: str, job: Job) -> None:
        job.then(self.second.with_payload(what), self.third.with_payload(what))
        if job.attempt == 1:
            raise RuntimeError("once")
        self.ran.append(("grower", what))


@pytest.fixture
def chain() -> Chain:
    return Chain()


def seen(conn: Connection, query: str) -> list[tuple[Any, ...]]:
    rows = conn.execute(query.encode()).fetchall()
    conn.rollback()
    return rows


def drained(conn: Connection) -> bool:
    return seen(conn, "SELECT count(*) FROM pgqueue.job") == [(0,)]


def test_steps_run_one_after_the_other_with_their_options(
    conn: Connection, chain: Chain, start: Start
) -> None:
    last = chain.third.with_payload("c")
    middle = chain.second.using(headers={"trace": "t"}, priority=1, key="k", then=[last]).with_payload("b")
    ref = chain.first.using(then=[middle]).enqueue(conn, "a")
    conn.commit()
    start(chain.app)
    eventually(lambda: drained(conn) and len(chain.ran) == 3)
    assert chain.ran == [("first", "a"), ("second", "b"), ("third", "c")]
    job = chain.context
    assert (job.headers, job.priority, job.key, job.parent) == ({"trace": "t"}, 1, "k", ref.id)


def test_many_jobs_of_one_call_are_each_followed(conn: Connection, chain: Chain, start: Start) -> None:
    chain.first.using(then=[chain.third.with_payload("x")]).enqueue_many(conn, ["a", "b", "c"])
    conn.commit()
    start(chain.app)
    eventually(lambda: drained(conn) and len(chain.ran) == 6)
    assert sorted(chain.ran) == [("first", "a"), ("first", "b"), ("first", "c"), *[("third", "x")] * 3]


def test_a_step_is_there_if_and_only_if_its_parent_is_acknowledged(conn: Connection, dsn: str) -> None:
    """oban-py 8: "transactional" on a connection of its own."""
    step = Chain().third.with_payload("c")
    enqueue(conn, name="work", headers={"pgqueue": {"then": [json.loads(step.text())]}})
    conn.commit()
    with Holder(dsn) as holder:
        (job,) = holder.claim()
        holder.begin()
        assert holder.run(complete([(token(job), Completed())])) == [job.id]
        assert seen(conn, "SELECT id, name FROM pgqueue.job") == [(job.id, "work")]
        holder.rollback()
        assert seen(conn, "SELECT name FROM pgqueue.job") == [("work",)]
        assert holder.run(complete([(token(job), Completed())])) == [job.id]
        assert holder.run(complete([(token(job), Completed())])) == []
    assert seen(conn, "SELECT name, headers::text FROM pgqueue.job") == [
        ("third", '{ "pgqueue" : { "parent" : 1 } }')
    ]


def test_a_stale_end_enqueues_nothing(conn: Connection, dsn: str) -> None:
    """river 1302, hatchet 3864: a second end of one job wrote what follows it twice."""
    step = Chain().third.with_payload("c")
    (job_id,) = enqueue(conn)
    conn.commit()
    with Holder(dsn, 1) as old, Holder(dsn, 2) as new:
        (mine,) = old.claim()
        lose(conn, [job_id])
        conn.commit()
        (theirs,) = new.suspects()
        assert old.run(complete([(token(mine), Completed(steps=steps_json([step])))])) == []
        assert seen(conn, "SELECT name FROM pgqueue.job") == [("work",)]
        assert new.run(complete([(token(theirs), Completed(steps=steps_json([step])))])) == [job_id]
    assert seen(conn, "SELECT name FROM pgqueue.job") == [("third",)]


def test_a_locked_job_is_passed_by_a_round_and_waited_for_by_a_transactional_handler(
    conn: Connection, dsn: str
) -> None:
    enqueue(conn, 2)
    conn.commit()
    with Holder(dsn) as holder, psycopg.connect(dsn) as other:
        jobs = holder.claim()
        other.execute("SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE", [jobs[0].id])
        assert holder.run(complete([(token(job), Completed()) for job in jobs])) == [jobs[1].id]
        done: list[list[int]] = []
        waiting = threading.Thread(
            target=lambda: done.append(holder.run(complete([(token(jobs[0]), Completed())], wait=True)))
        )
        waiting.start()
        pid = holder.connection.info.backend_pid
        waits = f"SELECT FROM pg_stat_activity WHERE pid = {pid} AND wait_event_type = 'Lock'"
        eventually(lambda: seen(conn, waits))
        other.rollback()
        waiting.join(60)
        assert done == [[jobs[0].id]]


def test_a_failed_attempt_leaves_no_step_and_the_last_one_each_of_its_own_once(
    conn: Connection, chain: Chain, start: Start
) -> None:
    """hatchet 3864: what follows a job was written once for each of its attempts."""
    chain.grower.enqueue(conn, "a")
    conn.commit()
    start(chain.app)
    eventually(lambda: drained(conn) and len(chain.ran) == 3)
    assert sorted(chain.ran) == [("grower", "a"), ("second", "a"), ("third", "a")]


def test_the_rest_of_a_chain_waits_with_a_job_that_died_and_goes_on_after_its_replay(
    conn: Connection, chain: Chain, start: Start
) -> None:
    ref = chain.bad.using(then=[chain.third.with_payload("c")]).enqueue(conn, "b")
    conn.commit()
    start(chain.app)
    eventually(lambda: seen(conn, "SELECT 1 FROM pgqueue.dead_job"))
    assert chain.ran == []
    assert drained(conn)
    chain.mended = True
    execute(conn, replay(Filter(ids=(ref.id,))))
    conn.commit()
    eventually(lambda: drained(conn) and len(chain.ran) == 2)
    assert chain.ran == [("bad", "b"), ("third", "c")]


@pytest.mark.parametrize("end", ["cancel", "discard"])
def test_the_rest_of_a_chain_goes_with_a_job_that_is_cancelled_or_discarded(
    conn: Connection, chain: Chain, start: Start, end: str
) -> None:
    then = [chain.third.with_payload("c")]
    if end == "cancel":
        ref = chain.first.using(then=then, run_after=3600).enqueue(conn, "a")
        conn.commit()
        execute(conn, cancel([ref.id]))
    else:
        ref = chain.bad.using(then=then).enqueue(conn, "a")
        conn.commit()
        start(chain.app)
        eventually(lambda: seen(conn, "SELECT 1 FROM pgqueue.dead_job"))
        execute(conn, discard(Filter(ids=(ref.id,))))
    conn.commit()
    assert drained(conn)
    assert seen(conn, "SELECT count(*) FROM pgqueue.dead_job") == [(0,)]
    assert chain.ran == []


def test_a_transactional_handler_s_effects_ack_and_steps_are_one_commit(
    conn: Connection, chain: Chain, start: Start
) -> None:
    conn.execute("CREATE TABLE public.effect (what text)")
    conn.commit()

    @chain.app.job("book", transactional=True, backoff=SOON)
    def book(what: str, own: psycopg.Connection, job: Job) -> None:
        own.execute("INSERT INTO public.effect VALUES (%s)", (what,))
        job.then(chain.third.with_payload("dynamic"))
        if job.attempt == 1:
            raise RuntimeError("once")

    @chain.app.job("abook", transactional=True, result=True)
    async def abook(what: str, session: psycopg.AsyncConnection) -> str:
        await session.execute("INSERT INTO public.effect VALUES (%s)", (what,))
        return what

    book.using(then=[abook.with_payload("b")]).enqueue(conn, "a")
    conn.commit()
    start(chain.app)
    eventually(
        lambda: drained(conn) and seen(conn, "SELECT what FROM public.effect ORDER BY 1") == [("a",), ("b",)]
    )
    assert chain.ran == [("third", "dynamic")]
    assert seen(conn, "SELECT name, result::text FROM pgqueue.job_history") == [("abook", '"b"')]


@pytest.mark.parametrize("transactional", [False, True])
def test_a_job_whose_effect_was_applied_before_has_ended_and_nothing_follows_it(
    conn: Connection, chain: Chain, start: Start, *, transactional: bool
) -> None:
    """A second order of one key is charged once, so it is shipped once."""

    def noted(what: str) -> str:
        chain.ran.append(("charge", what))
        return what

    def inside(what: str, own: psycopg.Connection[Any]) -> str:
        return noted(what)

    charge = chain.app.job("charge", transactional=transactional, keep="1h", result=True)(
        inside if transactional else noted
    )
    one = charge.using(idempotency_key="k", then=[chain.third.with_payload("c")])
    first, second = (one.enqueue(conn, "a") for _ in range(2))
    batch = chain.app.batch(conn, [one.with_payload("a")], then=chain.second.with_payload("b"))
    conn.commit()
    start(chain.app)
    eventually(lambda: drained(conn) and ("second", "b") in chain.ran)
    assert sorted(chain.ran) == [("charge", "a"), ("second", "b"), ("third", "c")]
    kept = "SELECT id, outcome, result::text, problem FROM pgqueue.job_history WHERE name = 'charge' ORDER BY 4, 1"
    did = seen(conn, "SELECT job_id FROM pgqueue.effect WHERE applied_at IS NOT NULL")[0][0]
    skipped = sorted({first.id, second.id, *batch.jobs} - {did})
    assert seen(conn, kept) == [
        *((i, "done", None, f"already applied by job {did}") for i in skipped), (did, "done", '"a"', None),
    ]  # fmt: skip
    status = chain.app.status(conn, skipped[0])
    assert status is not None
    assert (status.state, status.problem) == ("done", f"already applied by job {did}")


def test_an_idempotency_key_and_a_step_are_written_together(
    conn: Connection, chain: Chain, start: Start
) -> None:
    for _ in range(2):
        chain.first.using(idempotency_key="k", then=[chain.third.with_payload("c")]).enqueue(conn, "a")
    conn.commit()
    start(chain.app)
    eventually(lambda: drained(conn) and ("third", "c") in chain.ran)
    assert sorted(chain.ran) == [("first", "a"), ("third", "c")]


def test_what_follows_a_keyed_job_keeps_the_lane_going(conn: Connection, chain: Chain, start: Start) -> None:
    keyed = chain.first.using(key="customer", then=[chain.third.with_payload("x")])
    keyed.enqueue_many(conn, [str(n) for n in range(20)])
    conn.commit()
    start(chain.app)
    eventually(lambda: drained(conn) and len(chain.ran) == 40)
    assert [what for name, what in chain.ran if name == "first"] == [str(n) for n in range(20)]
    eventually(lambda: seen(conn, "SELECT count(*) FROM pgqueue.lane") == [(0,)])


def test_a_delay_of_a_step_counts_from_the_end_of_its_parent(conn: Connection, dsn: str) -> None:
    step = Chain().third.using(run_after=timedelta(hours=1)).with_payload("c")
    enqueue(conn)
    conn.commit()
    with Holder(dsn) as holder:
        (job,) = holder.claim()
        holder.run(complete([(token(job), Completed(steps=steps_json([step])))]))
    assert seen(
        conn, "SELECT run_at - now() BETWEEN interval '59 min' AND interval '60 min' FROM pgqueue.job"
    ) == [(True,)]


def test_a_step_that_cannot_be_enqueued_buries_its_parent_where_a_person_sees_it(
    conn: Connection, chain: Chain, start: Start
) -> None:
    """The others of its round are not held up, and a replay after the mending goes on."""
    conn.execute("INSERT INTO pgqueue.job_type (name, slots) VALUES ('limited', 1)")
    limited = json.dumps({"name": "limited", "payloads": [1], "keys": ["k"]})
    conn.execute(
        "SELECT pgqueue.enqueue('first', '\"a\"', headers => %s::json)",
        [f'{{"pgqueue":{{"then":[{limited}]}}}}'],
    )
    for n in range(5):
        chain.first.using(then=[chain.third.with_payload("c")]).enqueue(conn, str(n))
    conn.commit()
    start(chain.app)
    eventually(lambda: drained(conn) and chain.ran.count(("third", "c")) == 5)
    ((name, reason, error),) = seen(conn, "SELECT name, reason, error FROM pgqueue.dead_job")
    assert (name, reason) == ("first", "permanent")
    assert "limit of 1" in error
    conn.execute("UPDATE pgqueue.job_type SET slots = NULL WHERE name = 'limited'")
    execute(conn, replay(Filter(ids=(1,))))
    conn.commit()
    eventually(lambda: seen(conn, "SELECT name FROM pgqueue.job") == [("limited",)])


@pytest.mark.parametrize(
    "headers",
    [
        '{"pgqueue": 5}',
        '{"pgqueue": {"then": 1, "batch": "x"}}',
        '{"pgqueue": {"batch": 99}}',
        '{"pgqueue": []}',
    ],
)
def test_headers_written_by_hand_that_make_no_sense_cost_no_job(
    conn: Connection, chain: Chain, start: Start, headers: str
) -> None:
    conn.execute("SELECT pgqueue.enqueue('second', '\"a\"', headers => %s::json)", [headers])
    conn.commit()
    start(chain.app)
    eventually(lambda: drained(conn) and chain.ran == [("second", "a")])
    assert seen(conn, "SELECT count(*) FROM pgqueue.dead_job") == [(0,)]


def test_a_full_queue_takes_a_step(conn: Connection, dsn: str) -> None:
    conn.execute("INSERT INTO pgqueue.queue (name, max_depth) VALUES ('default', 1)")
    conn.execute(
        "INSERT INTO pgqueue.depth_sample VALUES ('default', clock_timestamp(), 9, 0, 0, 0, 0, false)"
    )
    conn.execute("INSERT INTO pgqueue.job (name, payload) VALUES ('work', '1')")
    conn.commit()
    with Holder(dsn) as holder:
        (job,) = holder.claim()
        step = Chain().third.with_payload("c")
        assert holder.run(complete([(token(job), Completed(steps=steps_json([step])))])) == [job.id]
    assert seen(conn, "SELECT name FROM pgqueue.job") == [("third",)]


def test_a_session_enqueues_a_chain_too(session: Session, chain: Chain) -> None:
    ref = chain.first.using(then=[chain.second.with_payload("b")], headers={"a": 1}).enqueue(session, "a")
    session.commit()
    assert ref.created


def test_a_plain_job_is_written_by_the_plain_ack(conn: Connection, start: Start) -> None:
    """What follows, batches and history cost a job that has none of them no statement and no row."""
    chain = Chain()
    chain.first.enqueue_many(conn, [str(n) for n in range(50)])
    chain.first.using(headers={"trace": "t"}).enqueue(conn, "headed")
    conn.commit()
    start(chain.app)
    eventually(lambda: drained(conn) and len(chain.ran) == 51)
    for table in ("progress", "batch", "batch_tally", "job_history", "history_day"):
        assert seen(conn, f"SELECT count(*) FROM pgqueue.{table}") == [(0,)]
