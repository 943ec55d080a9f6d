"""Dead letters: everything a person needs to understand a failure, whatever its texts hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pgqueue.finish import Failed, bury, retry
from pgqueue.job import Buried, Failure, Retried
from pgqueue.run import failure_of
from tests.factories import Connection, Holder, buried, enqueue, lose, retried, row, token, wipe


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


def one(conn: Connection, query: str, *params: object) -> Any:
    """Return one value."""
    found = conn.execute(query.encode(), params).fetchone()
    conn.commit()
    return found[0] if found else None


def test_a_dead_letter_holds_everything_that_is_needed_to_understand_and_replay(
    conn: Connection, a: Holder
) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    conn.execute(
        "SELECT pgqueue.enqueue('work', '{\"order\": 1}', priority => 5, dedup_key => 'd', idempotency_key => 'i',"
        ' max_attempts => 3, timeout_s => 9, backoff => \'{"base": 2, "cap": 3, "jitter": "none"}\','
        " expires_at => now() + interval '1 h', headers => %s)",
        [json.dumps({"traceparent": f"00-{trace}-b7ad6b7169203331-01", "tenant": "t1"})],
    )
    conn.commit()
    (job,) = a.claim()
    before = row(conn, job.id)
    a.run(retry([Failed(claim=token(job), outcome=retried())], "host:1"))
    conn.execute("UPDATE pgqueue.job SET run_at = NULL, pos = nextval('pgqueue.pos_seq')")
    conn.commit()
    (job,) = a.claim()
    last = one(conn, "SELECT claimed_at FROM pgqueue.job")
    failure = Failure(error_type="shop.Broken", message="no stock", traceback="Traceback ...")
    assert a.run(
        bury([Failed(claim=token(job), outcome=Buried(reason="exhausted", failure=failure))], "host:2")
    ) == [job.id]
    assert before
    assert row(conn, job.id) is None
    dead = one(conn, "SELECT to_jsonb(d) FROM pgqueue.dead_job d")
    copied = (
        "id", "queue", "name", "priority", "key", "dedup_key", "idempotency_key", "max_attempts", "timeout_s",
        "backoff", "headers", "enqueued_at", "expires_at",
    )  # fmt: skip
    assert {name: dead[name] for name in copied} == {name: before[name] for name in copied}
    assert dead["payload"] == {"order": 1}
    assert (dead["attempt"], dead["lost"], dead["reason"]) == (2, 0, "exhausted")
    assert (dead["error_type"], dead["error"], dead["traceback"], dead["worker"]) == (
        "shop.Broken", "no stock", "Traceback ...", "host:2",
    )  # fmt: skip
    assert dead["trace_id"] == trace
    assert (
        dead["first_attempt_at"] == before["claimed_at"] or dead["first_attempt_at"] < dead["last_attempt_at"]
    )
    assert one(conn, "SELECT last_attempt_at FROM pgqueue.dead_job") == last
    assert [
        (x["attempt"], x["outcome"], x["worker"], x["error_type"], x["error"]) for x in dead["attempts"]
    ] == [(1, "retry", "host:1", "ValueError", "broken")]
    assert one(conn, "SELECT count(*) FROM pgqueue.attempt_log") == 0
    assert one(conn, "SELECT n FROM pgqueue.tally WHERE outcome = 'dead'") == 1


@pytest.mark.parametrize(
    ("headers", "trace"),
    [
        (None, None),
        ({"trace_id": "t-1", "traceparent": "00-x-y-01"}, "t-1"),
        ({"traceparent": "nonsense"}, None),
        ({"other": 1}, None),
    ],
)
def test_the_trace_id_of_a_dead_letter_comes_from_the_headers_if_they_have_one(
    conn: Connection, a: Holder, headers: dict[str, object] | None, trace: str | None
) -> None:
    enqueue(conn, headers=headers)
    conn.commit()
    (job,) = a.claim()
    a.run(bury([Failed(claim=token(job), outcome=buried())], "w"))
    assert one(conn, "SELECT trace_id FROM pgqueue.dead_job") == trace


@pytest.mark.parametrize("headers", [r'{"x": "\u0000"}', r'{"trace_id": "\ud800"}', "[1]"])
def test_a_job_can_be_buried_whatever_a_plain_insert_wrote_into_its_headers(
    conn: Connection, a: Holder, headers: str
) -> None:
    conn.execute("INSERT INTO pgqueue.job (name, payload, headers) VALUES ('work', '1', %s)", [headers])
    (other,) = enqueue(conn, headers={"trace_id": "t-1"})
    conn.commit()
    jobs = a.claim()
    assert len(a.run(bury([Failed(claim=token(job), outcome=buried()) for job in jobs], "w"))) == 2
    assert one(conn, "SELECT headers::text FROM pgqueue.dead_job WHERE trace_id IS NULL") == headers
    assert one(conn, "SELECT id FROM pgqueue.dead_job WHERE trace_id = 't-1'") == other


@pytest.mark.parametrize(
    "reason", ["exhausted", "permanent", "worker lost", "undecodable", "timeout", "expired"]
)
def test_every_reason_of_a_burial_can_be_stored(conn: Connection, a: Holder, reason: str) -> None:
    enqueue(conn)
    conn.commit()
    (job,) = a.claim()
    a.run(bury([Failed(claim=token(job), outcome=buried(reason))], "w"))
    assert one(conn, "SELECT reason FROM pgqueue.dead_job") == reason


@pytest.mark.parametrize(
    "text", ["a\x00b", "a\ud800b", "\udfff\x00" * 3_000, "naïve ☃ 𝄞", "back\\slash\\u0000"]
)
def test_no_text_of_an_error_keeps_its_failure_from_being_recorded(
    conn: Connection, a: Holder, text: str
) -> None:
    enqueue(conn, 2)
    conn.commit()
    again, gone = a.claim()
    failure = failure_of(ValueError(text))
    outcome = Retried(delay=1.0, failure=failure)
    assert a.run(retry([Failed(claim=token(again), outcome=outcome)], "w")) == [again.id]
    assert a.run(
        bury([Failed(claim=token(gone), outcome=Buried(reason="permanent", failure=failure))], "w")
    ) == [gone.id]
    assert one(conn, "SELECT error FROM pgqueue.dead_job") == failure.message
    assert one(conn, "SELECT error FROM pgqueue.attempt_log") == failure.message


def test_the_attempts_of_a_dead_letter_tell_of_lost_workers_and_timeouts_in_order(
    conn: Connection, a: Holder
) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    a.claim()
    lose(conn, [job_id])
    conn.commit()
    (job,) = a.suspects()
    late = Retried(delay=0.0, failure=Failure(error_type="Timeout", message="too long"), outcome="timeout")
    a.run(retry([Failed(claim=token(job), outcome=late)], "w"))
    conn.execute("UPDATE pgqueue.job SET run_at = NULL, pos = nextval('pgqueue.pos_seq')")
    conn.commit()
    (job,) = a.claim()
    a.run(bury([Failed(claim=token(job), outcome=buried("exhausted"))], "w"))
    dead = one(conn, "SELECT to_jsonb(d) FROM pgqueue.dead_job d")
    assert [(x["attempt"], x["outcome"]) for x in dead["attempts"]] == [(1, "lost"), (2, "timeout")]
    assert dead["attempt"] == 3
    assert dead["first_attempt_at"] < dead["last_attempt_at"] < dead["died_at"]


def test_a_burial_is_counted_under_its_error(conn: Connection, a: Holder) -> None:
    enqueue(conn, 3)
    conn.commit()
    a.run(bury([Failed(claim=token(job), outcome=buried()) for job in a.claim()], "w"))
    seen = conn.execute(
        "SELECT error_type, reason, jobs, last_10_min, queues, names FROM pgqueue.dead_by_error"
    )
    assert seen.fetchall() == [("ValueError", "permanent", 3, 3, ["default"], ["work"])]


def test_two_burials_at_once_make_one_dead_letter(conn: Connection, a: Holder, dsn: str) -> None:
    """Two reapers failed the same job twice, and the second row broke the queue."""
    enqueue(conn)
    conn.commit()
    (job,) = a.claim()
    verdict = bury([Failed(claim=token(job), outcome=buried())], "w")
    with Holder(dsn, 2) as b:
        a.begin()
        assert a.run(verdict) == [job.id]
        assert b.run(verdict) == []
        a.commit()
        assert b.run(verdict) == []
    assert one(conn, "SELECT count(*) FROM pgqueue.dead_job") == 1
    assert one(conn, "SELECT sum(n)::int FROM pgqueue.tally WHERE outcome = 'dead'") == 1
