"""The claim: fresh jobs in order, each to one worker, never more than asked for, in both of its forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest

from pgqueue.claim import claim, claim_backlog, paused
from pgqueue.finish import Failed, ack, release, retry
from pgqueue.round import Leases
from pgqueue.run import deferred
from pgqueue.statement import Query, Statement, scalar
from pgqueue.worker import connect
from tests.factories import (
    MINUTE,
    QUEUE,
    Connection,
    Holder,
    enqueue,
    explain,
    ids,
    lose,
    nodes,
    retried,
    row,
    scope,
    token,
    wipe,
)

ISOLATION = Statement(Query("isolation", "SHOW transaction_isolation", ()), {}, scalar)


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


@pytest.fixture(params=["claim", "claim_backlog", "claim_few"])
def form(request: pytest.FixtureRequest) -> dict[str, bool]:
    return {"backlog": request.param == "claim_backlog", "few": request.param == "claim_few"}


@pytest.fixture
def a(dsn: str, form: dict[str, bool]) -> Iterator[Holder]:
    with Holder(dsn, 1, **form) as holder:
        yield holder


@pytest.fixture
def b(dsn: str, form: dict[str, bool]) -> Iterator[Holder]:
    with Holder(dsn, 2, **form) as holder:
        yield holder


def test_jobs_come_by_priority_then_in_the_order_of_their_enqueue(conn: Connection, a: Holder) -> None:
    late = enqueue(conn, 2, priority=9)
    plain = enqueue(conn, 3)
    first = enqueue(conn, 2, priority=0)
    conn.commit()
    of = scope(priorities=range(10))
    jobs = a.claim(5, of=of)
    assert ids(jobs) == first + plain
    assert [job.level for job in jobs] == [1, 1, 6, 6, 6]
    assert ids(a.claim(of=of)) == late


def test_queues_come_strictly_in_the_order_written(conn: Connection, a: Holder) -> None:
    bulk = enqueue(conn, 2, queue="bulk", priority=0)
    critical = enqueue(conn, 2, queue="critical", priority=9)
    enqueue(conn, 2, queue="other")
    conn.commit()
    jobs = a.claim(of=scope(queues=("critical", "bulk"), priorities=range(10)))
    assert ids(jobs) == critical + bulk


def test_two_claims_at_once_get_disjoint_jobs_and_neither_waits(
    conn: Connection, a: Holder, b: Holder
) -> None:
    made = enqueue(conn, 5)
    conn.commit()
    a.begin()
    first = a.claim(3)
    b.connection.execute("SET statement_timeout = '40s'")
    second = b.claim(3)
    a.commit()
    assert ids(first) == made[:3]
    assert ids(second) == made[3:]


def test_a_claim_that_rolled_back_leaves_its_jobs_as_they_were(
    conn: Connection, a: Holder, b: Holder
) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    before = row(conn, job_id)
    a.begin()
    a.claim()
    a.rollback()
    assert row(conn, job_id) == before
    assert ids(b.claim()) == [job_id]


def test_a_job_whose_lock_is_over_is_claimed_at_once(conn: Connection, a: Holder, b: Holder) -> None:
    made = enqueue(conn, 6)
    conn.commit()
    for end in (a.commit, a.rollback):
        a.begin()
        a.connection.execute("SELECT FROM pgqueue.job FOR UPDATE")
        end()
        assert ids(b.claim(3)) == made[:3]
        del made[:3]


def test_beside_an_old_transaction_no_job_is_kept_by_a_lock_that_is_over(
    conn: Connection, a: Holder, b: Holder
) -> None:
    made = enqueue(conn, 3)
    conn.commit()
    conn.execute("SELECT pg_current_xact_id()")  # runs until the end of the test
    a.begin()
    a.connection.execute("SELECT FROM pgqueue.job FOR UPDATE")
    a.rollback()
    assert ids(b.claim()) == made


def test_the_claim_of_a_backlog_passes_by_what_another_claim_holds_without_asking_the_lock_table(
    conn: Connection, a: Holder, b: Holder
) -> None:
    """Stepping over a locked row by SKIP LOCKED costs as much as a tenth of claiming one."""
    if not a.backlog:
        pytest.skip("the windowed claim examines its window before it locks")
    enqueue(conn, 60)
    conn.commit()
    a.begin()
    a.claim(20)
    plan = explain(b.connection, claim_backlog(scope(), [0], 20, 2**40, MINUTE))
    a.commit()
    (scan,) = [node for node in nodes(plan) if node.get("Index Name") == "job_ready"]
    assert (scan["Actual Rows"], scan["Rows Removed by Filter"]) == (20, 20)


def test_a_job_of_a_transaction_that_rolled_back_is_never_claimed(conn: Connection, a: Holder) -> None:
    enqueue(conn)
    assert a.claim() == []
    conn.rollback()
    assert a.claim() == []


def test_the_attempt_is_counted_by_the_claim(conn: Connection, a: Holder) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    (job,) = a.claim(visibility=timedelta(seconds=700))
    assert job.attempt == 1
    found = row(conn, job_id)
    assert found
    assert (found["attempt"], found["lease"], found["lost"]) == (1, job.lease, 0)
    left = conn.execute(
        "SELECT extract(epoch FROM deadline - clock_timestamp()), claimed_at <= clock_timestamp() FROM pgqueue.job"
    ).fetchone()
    assert left
    assert 660 < left[0] <= 700
    assert left[1]


def test_a_job_whose_attempts_are_at_the_highest_number_keeps_no_other_from_being_claimed(
    conn: Connection, a: Holder
) -> None:
    made = enqueue(conn, 3)
    conn.execute("UPDATE pgqueue.job SET attempt = 32767 WHERE id = %s", made[:1])
    conn.commit()
    assert [job.attempt for job in a.claim(3)] == [32767, 1, 1]
    lose(conn, made)
    conn.commit()
    assert [job.attempt for job in a.suspects()] == [32767, 2, 2]


def test_no_lease_is_handed_out_twice_across_claims_and_worker_starts(
    conn: Connection, a: Holder, b: Holder
) -> None:
    """A generation that starts again at 1 lets a stale acknowledgement match the next holder."""
    (job_id,) = enqueue(conn)
    conn.commit()
    seen = [a.claim()[0].lease]
    for holder in (b, a, b, a):
        lose(conn, [job_id])
        conn.commit()
        seen.append(holder.suspects(low=0, high=100)[0].lease)
    assert len(set(seen)) == 5
    assert {lease >> 32 for lease in seen} == {1, 2}
    nonces = (1, 2**31 - 1)
    drawn = [
        lease
        for nonce in nonces
        for leases in [Leases(nonce)]
        for lease in (leases.new() for _ in range(1000))
    ]
    assert len(set(drawn)) == 2000
    assert all(0 < lease < 2**63 for lease in drawn)


def test_a_claim_takes_only_names_it_was_given(conn: Connection, a: Holder) -> None:
    foreign = enqueue(conn, 3, name="else")
    known = enqueue(conn, 2)
    conn.commit()
    before = [row(conn, job_id) for job_id in foreign]
    answer = a.answer(5 if a.backlog else 2)  # a backlog's claim counts what it passes by
    assert ids(answer.jobs) == known
    assert [row(conn, job_id) for job_id in foreign] == before
    assert a.claim(of=scope(names=())) == []


def test_delayed_keyed_leased_and_lost_jobs_are_not_fresh(conn: Connection, a: Holder) -> None:
    enqueue(conn, delay=timedelta(hours=1))
    enqueue(conn, key="k")
    (held, dropped) = enqueue(conn, 2)
    conn.commit()
    jobs = a.claim()
    assert ids(jobs) == [held, dropped]
    lose(conn, [held, dropped])
    conn.commit()
    suspect = a.suspects()
    a.run(release(suspect[1:]))  # released, but lost once: not fresh
    lose(conn, [held])
    conn.commit()
    assert a.claim() == []


def test_a_claim_reads_only_above_the_floors_it_was_given(conn: Connection, a: Holder) -> None:
    made = enqueue(conn, 4)
    conn.commit()
    place = conn.execute("SELECT pos FROM pgqueue.job WHERE id = %s", [made[1]]).fetchone()
    assert place
    assert ids(a.answer(floors=[place[0]]).jobs) == made[2:]


def test_the_answer_tells_whether_keyed_jobs_may_wait(conn: Connection, a: Holder) -> None:
    enqueue(conn, 2)
    conn.commit()
    assert not a.answer(1).keyed
    enqueue(conn, key="k")
    conn.commit()
    assert a.answer(1).keyed
    place = conn.execute("SELECT pos FROM pgqueue.job WHERE key = 'k'").fetchone()
    assert place
    assert not a.answer(1, route_floors={QUEUE: place[0]}).keyed  # routed, and its lane is gone
    a.route()
    assert a.answer(1, route_floors={QUEUE: place[0]}).keyed


def test_the_policy_of_a_row_travels_with_the_claim(conn: Connection, a: Holder) -> None:
    enqueue(conn, payload={"order": 1})
    enqueue(conn, max_attempts=7, headers={"tenant": "t"}, expires_at="2001-01-01", payload=[1])
    conn.commit()
    plain, special = a.claim()
    assert (plain.payload, plain.extra) == ('{"order": 1}', None)
    assert special.payload == "[1]"
    assert special.extra
    assert '"max_attempts" : 7' in special.extra
    assert '"expired" : true' in special.extra
    assert '"tenant"' in special.extra


@pytest.mark.parametrize("analysed", [False, True])
def test_a_claim_never_takes_more_than_it_asks_for_whatever_the_statistics_say(
    conn: Connection, a: Holder, analysed: bool
) -> None:
    """A limited subquery in a nested loop is executed once per row: 2,000 rows were updated with LIMIT 10."""
    if analysed:
        conn.execute("ANALYZE pgqueue.job")
    enqueue(conn, 3000)
    conn.commit()
    for setting in ("SET enable_hashjoin = off", "SET enable_mergejoin = off", "SET enable_material = off"):
        a.connection.execute(setting)
    assert len(a.claim(10)) == 10
    a.connection.execute("SET plan_cache_mode = force_generic_plan")
    for _ in range(3):
        assert len(a.claim(10)) == 10
    leased = conn.execute("SELECT count(*) FROM pgqueue.job WHERE lease <> 0").fetchone()
    assert leased == (40,)


def test_a_serializable_default_of_the_role_makes_no_claim_and_no_ack_fail(
    dsn: str, conn: Connection
) -> None:
    """SKIP LOCKED at SERIALIZABLE raises 40001 as soon as two workers meet."""
    enqueue(conn, 300)
    conn.commit()
    from pgqueue.pipeline import Pipeline

    connections = [connect(dsn, f"test {n}") for n in range(2)]
    done: list[int] = []
    try:
        leases = Leases(3)
        for connection in connections:
            connection.execute("SET default_transaction_isolation = 'serializable'")
        while True:
            taken = []
            for connection in connections:
                with Pipeline(connection) as p:
                    p.begin()
                    pending = p.send(claim(scope(), [0], 40, leases.new(), MINUTE, {QUEUE: 0}))
                    isolation = p.send(ISOLATION)
                    p.commit()
                assert isolation.result() == "read committed"
                taken.append((connection, pending.result().jobs))
            if not any(jobs for _, jobs in taken):
                break
            for connection, jobs in taken:
                with Pipeline(connection) as p:
                    p.begin()
                    acked = p.send(ack(jobs))
                    p.commit()
                assert acked.result() is None
                done += ids(jobs)
    finally:
        for connection in connections:
            connection.close()
    assert len(done) == len(set(done)) == 300


def test_what_is_paused_is_listed_and_nothing_else(conn: Connection, a: Holder) -> None:
    conn.execute("INSERT INTO pgqueue.queue (name, paused) VALUES ('mail', true), ('bulk', false)")
    conn.execute("INSERT INTO pgqueue.job_type (name, paused) VALUES ('send', true), ('print', false)")
    conn.commit()
    assert a.run(paused()) == (frozenset({"mail"}), frozenset({"send"}), frozenset())


@pytest.mark.parametrize("key", [None, "k"])
def test_a_claim_says_which_retries_the_budget_had_deferred(
    conn: Connection, a: Holder, key: str | None
) -> None:
    made = enqueue(conn, 2) if key is None else [*enqueue(conn, key="k"), *enqueue(conn, key="l")]
    conn.commit()
    for job in a.claim() if key is None else a.lanes():
        late = replace(retried(0.0), deferred=job.id == made[0])
        a.run(retry([Failed(claim=token(job), outcome=late)], "host:1"))
        if key is not None:
            a.give_back(("default", str(job.key)), job.lease)
    conn.execute("UPDATE pgqueue.job SET pos = id, run_at = NULL")
    conn.commit()
    again = a.claim() if key is None else a.lanes()
    assert {job.id: deferred(job) for job in again} == {made[0]: True, made[1]: False}
