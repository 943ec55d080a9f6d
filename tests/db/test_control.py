"""Pausing takes effect on what is not running yet, and the looks at jobs and queues agree with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from pgqueue import control
from pgqueue.claim import paused
from pgqueue.connection import execute
from pgqueue.dead import Attempt
from pgqueue.depth import depth, sample
from pgqueue.finish import Failed, retry
from pgqueue.heartbeat import register
from pgqueue.jobs import jobs, show, workers
from pgqueue.statement import Statement
from pgqueue.states import State
from tests.factories import MINUTE, Holder, enqueue, fall_due, ids, lose, retried, token, wipe
from tests.server import Connection


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


@pytest.fixture
def holder(dsn: str) -> Iterator[Holder]:
    with Holder(dsn) as opened:
        yield opened


NONE: frozenset[str] = frozenset()


def declared(conn: Connection, name: str, queue: str | None = None) -> None:
    conn.execute("INSERT INTO pgqueue.job_type (name, queue) VALUES (%s, %s)", [name, queue])


def test_a_paused_queue_is_listed_for_the_workers_and_its_jobs_are_blocked(conn: Connection) -> None:
    enqueue(conn, 2)
    execute(conn, control.pause_queue("default"))
    conn.commit()
    assert execute(conn, paused()) == (frozenset({"default"}), NONE, NONE)
    (seen,) = execute(conn, depth())
    assert (seen.ready, seen.blocked, seen.oldest_ready_s) == (0, 2, 0.0)
    execute(conn, control.resume_queue("default"))
    assert execute(conn, paused()) == (NONE, NONE, NONE)
    assert execute(conn, depth())[0].ready == 2


def test_a_paused_job_type_is_paused_in_every_queue_and_stays_so_when_it_is_declared_again(
    conn: Connection,
) -> None:
    declared(conn, "work")
    enqueue(conn)
    enqueue(conn, queue="other")
    enqueue(conn, name="else")
    assert execute(conn, control.pause_name("work"))
    assert execute(conn, paused()) == (NONE, frozenset({"work"}), NONE)
    assert Counter(j.state for j in execute(conn, jobs())) == {State.BLOCKED: 2, State.READY: 1}
    assert execute(conn, control.resume_name("work"))
    assert execute(conn, paused()) == (NONE, NONE, NONE)


def test_pausing_twice_is_pausing_once(conn: Connection) -> None:
    for _ in range(2):
        execute(conn, control.pause_queue("mail"))
    (mail,) = execute(conn, control.queues())
    assert (mail.name, mail.paused, mail.ready, mail.workers) == ("mail", True, None, 0)


def test_what_nobody_has_heard_of_is_said(conn: Connection) -> None:
    declared(conn, "send", "mail")
    assert execute(conn, control.pause_queue("mail"))
    assert not execute(conn, control.pause_queue("mial"))
    assert not execute(conn, control.pause_name("sned"))
    assert execute(conn, control.names()) == ["send"]


def test_queues_are_listed_with_depth_workers_and_paused_names(conn: Connection) -> None:
    declared(conn, "send", "mail")
    declared(conn, "work")
    enqueue(conn, 3)
    conn.commit()
    execute(conn, sample(["default"]))
    execute(conn, _worker(7, ["default", "mail"], ["work"]))
    execute(conn, control.pause_name("send"))
    first, second = execute(conn, control.queues())
    assert (first.name, first.ready, first.workers, first.paused_names) == ("default", 3, 1, ())
    assert (second.name, second.ready, second.workers, second.paused_names) == ("mail", None, 1, ("send",))


def test_a_queue_without_a_fresh_sample_is_found_without_counting(conn: Connection) -> None:
    enqueue(conn, 2, queue="plain")
    enqueue(conn, queue="keyed", key="k")
    enqueue(conn, queue="later", delay=MINUTE)
    enqueue(conn, queue="seen")
    conn.commit()
    execute(conn, sample(["seen"]))
    assert execute(conn, control.unsampled()) == ["keyed", "later", "plain"]
    conn.execute("UPDATE pgqueue.depth_sample SET at = at - interval '1 min'")
    assert execute(conn, control.unsampled()) == ["keyed", "later", "plain", "seen"]


def test_the_state_of_each_job_adds_up_to_the_depth_of_its_queue(conn: Connection, holder: Holder) -> None:
    """Two ways to the same states: one job at a time, and all at once."""
    declared(conn, "stopped")
    enqueue(conn, 3)  # two of them are claimed below, one of which is lost
    enqueue(conn, 2, delay=MINUTE)
    fall_due(conn, enqueue(conn, 1, delay=MINUTE))
    enqueue(conn, 3, key="a")  # the head runs
    enqueue(conn, 2, key="b")  # the head failed, and its lane waits
    enqueue(conn, 2, key="c")  # nobody has looked at it yet
    enqueue(conn, 1, name="stopped")
    enqueue(conn, 2, queue="off")
    execute(conn, control.pause_name("stopped"))
    execute(conn, control.pause_queue("off"))
    conn.commit()
    lost, _ = holder.claim(2)
    lanes = {job.key: job for job in holder.lanes()}
    holder.run(retry([Failed(claim=token(lanes["b"]), outcome=retried())], "host:1"))
    holder.give_back(("default", "b"), lanes["b"].lease, 60.0)
    holder.give_back(("default", "c"), lanes["c"].lease)
    lose(conn, [lost.id])
    conn.execute("UPDATE pgqueue.job SET lease = 0, deadline = '-infinity' WHERE id = %s", [lanes["c"].id])
    conn.commit()
    for seen in execute(conn, depth()):
        one_by_one = Counter(j.state.value for j in execute(conn, jobs(queue=seen.queue)))
        all_at_once = {
            "ready": seen.ready, "delayed": seen.delayed, "in_flight": seen.in_flight, "blocked": seen.blocked,
        }  # fmt: skip
        assert one_by_one == Counter(all_at_once), seen.queue
    assert {j.state for j in execute(conn, jobs())} == {
        *(State.READY, State.DELAYED, State.BLOCKED, State.IN_FLIGHT)
    }


def test_jobs_are_listed_by_what_they_are_the_newest_first(conn: Connection) -> None:
    one, two = enqueue(conn, 2)
    (three,) = enqueue(conn, name="pdf", queue="bulk", key="k")
    (four,) = enqueue(conn, delay=MINUTE)

    def found(**which: object) -> list[int]:
        return [j.id for j in execute(conn, jobs(**which))]  # type: ignore[arg-type]

    assert found() == [four, three, two, one]
    assert found(n=2) == [four, three]
    assert found(before=three) == [two, one]
    assert found(name="pdf") == found(queue="bulk") == found(key="k") == [three]
    assert found(state=State.DELAYED) == [four]
    assert found(state=State.READY, n=2) == [three, two]


def test_a_job_is_shown_with_its_holder_and_what_went_wrong_before(conn: Connection, holder: Holder) -> None:
    execute(conn, _worker(1, ["default"], ["work"]))
    (job_id,) = enqueue(conn, payload={"a": 1}, headers={"h": 1}, max_attempts=9, expires_at="infinity")
    conn.commit()
    (job,) = holder.claim()
    holder.run(retry([Failed(claim=token(job), outcome=retried(0.0))], "host:1"))
    conn.execute("UPDATE pgqueue.job SET run_at = NULL, pos = 1")
    conn.commit()
    assert ids(holder.claim()) == [job_id]
    shown = execute(conn, show(job_id))
    assert shown is not None
    assert (shown.payload, shown.headers, shown.expires_at) == ('{"a": 1}', {"h": 1}, None)
    assert (shown.job.state, shown.job.attempt, shown.job.max_attempts) == (State.IN_FLIGHT, 2, 9)
    assert (shown.job.worker, shown.job.cancelling) == ("here:41", False)
    (before,) = shown.history
    assert isinstance(before, Attempt)
    assert (before.attempt, before.outcome, before.error) == (1, "retry", "broken")
    assert execute(conn, show(2**60)) is None


def test_every_view_is_documented(conn: Connection) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    views = conn.execute("SELECT viewname FROM pg_views WHERE schemaname = 'pgqueue'").fetchall()
    assert [name for (name,) in views if f"| `pgqueue.{name}` |" not in page] == []


def test_a_worker_that_is_silent_is_not_alive(conn: Connection) -> None:
    execute(conn, _worker(1, ["default"], ["work"]))
    execute(conn, _worker(2, ["mail"], ["send"]))
    conn.execute("UPDATE pgqueue.worker SET beat_at = now() - interval '31 s' WHERE nonce = 2")
    seen = {w.queues: w for w in execute(conn, workers())}
    assert (seen["default",].alive, seen["mail",].alive) == (True, False)
    assert timedelta(seconds=seen["mail",].beat_s_ago) >= timedelta(seconds=31)


def _worker(nonce: int, queues: list[str], names: list[str]) -> Statement[int | None]:
    return register(
        nonce=nonce, host="here", pid=40 + nonce, version="1", queues=queues, names=names, concurrency=8
    )
