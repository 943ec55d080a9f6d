"""Two rounds on their way at once: each is answered, and whatever becomes of the first, nothing of either is lost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pgqueue.events import Bus
from pgqueue.flights import Flights
from pgqueue.hand import Hand
from pgqueue.job import Claimed
from pgqueue.loop import Wake
from pgqueue.plan import Outcomes, Plan, Wish
from pgqueue.quota import Quota
from pgqueue.retries import Retries
from pgqueue.round import Leases, Rounds
from pgqueue.statement import Query, Statement, scalar
from pgqueue.worker import connect
from pgqueue.writeoff import WriteOff
from tests.factories import Connection, Holder, enqueue, ids, scope, wipe

LEVELS = [("", 0), *(("default", priority) for priority in range(10))]
ONE = Statement(Query("one", "SELECT 1", ()), {}, scalar)


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


class Pilot:
    """The engine's part: what the slots report, and rounds that depart and land."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.hand = Hand(Wake())
        nobody: Any = None
        self.write_off = WriteOff(self.hand, nobody, Retries(LEVELS, on=False), LEVELS, Bus())
        self.quota = Quota(settings(), self.hand, LEVELS)
        self.flights = Flights(self.write_off, self.quota)
        self.leases = Leases(7)
        self.rounds = self.open()

    def open(self) -> Rounds:
        self.rounds = Rounds(connect(self.dsn, "pilot"), self.leases, timedelta(minutes=1), "w")
        return self.rounds

    def report(self, jobs: list[Claimed]) -> None:
        self.hand.held.update((job.id, job) for job in jobs)
        self.hand.done.extend(jobs)

    def depart(self, n: int) -> Plan:
        whole = scope(priorities=range(10))
        wish = Wish(levels=list(range(10)), scope=whole, starts=[0] * 10, n=n, backlog=True)
        plan = Plan(results=self.write_off.collect(), wishes=[wish] if n else ())
        self.flights.depart(self.rounds, plan)
        return plan

    def land(self) -> Outcomes:
        landed = self.flights.land(self.rounds)
        assert landed is not None
        return landed[1]


def settings() -> Any:
    from pgqueue.config import WorkerSettings

    return WorkerSettings()


@pytest.fixture
def pilot(dsn: str) -> Iterator[Pilot]:
    pilot = Pilot(dsn)
    yield pilot
    pilot.rounds.connection.close()


@pytest.fixture
def jobs(dsn: str, conn: Connection, pilot: Pilot) -> list[Claimed]:
    """Three jobs that this worker has run, in front of six that wait."""
    enqueue(conn, 9)
    conn.commit()
    with Holder(dsn, 7) as holder:
        return holder.claim(3)


def left(conn: Connection) -> int:
    row = conn.execute("SELECT count(*) FROM pgqueue.job").fetchone()
    conn.rollback()
    assert row
    return int(row[0])


def test_the_second_round_claims_behind_the_first_and_each_writes_its_own_results(
    conn: Connection, pilot: Pilot, jobs: list[Claimed]
) -> None:
    pilot.report(jobs[:2])
    pilot.depart(2)
    assert pilot.quota.coming == 2
    pilot.report(jobs[2:])
    second = pilot.depart(3)
    assert ids(second.results.done) == ids(jobs[2:])
    assert (pilot.quota.coming, pilot.flights.full) == (5, True)
    assert ids(list(pilot.flights.claims())) == ids(jobs)
    outs = [pilot.land(), pilot.land()]
    assert [out.finished for out in outs] == [set(ids(jobs[:2])), set(ids(jobs[2:]))]
    claimed = [job for out in outs for answer in out.answers for job in answer.jobs]
    assert [len(out.answers[0].jobs) for out in outs] == [2, 3]
    assert len({job.id for job in claimed}) == 5
    assert len({job.lease for job in claimed}) == 2
    assert (left(conn), pilot.quota.coming, pilot.hand.held) == (6, 0, {})
    assert not pilot.write_off.collect()


def test_the_front_is_the_claims_of_the_round_that_departed_last(pilot: Pilot, jobs: list[Claimed]) -> None:
    assert pilot.flights.front == ()
    pilot.depart(2)
    second = pilot.depart(3)
    assert pilot.flights.front == second.wishes
    pilot.land()
    assert pilot.flights.front == second.wishes
    pilot.land()
    assert pilot.flights.front == ()


def test_as_many_results_as_a_round_writes_that_came_after_it_departed_are_not_lost(
    dsn: str, conn: Connection, pilot: Pilot, jobs: list[Claimed]
) -> None:
    """Jobs whose result is lost are held, and their leases renewed, for as long as the worker lives."""
    with Holder(dsn, 7) as holder:
        later = holder.claim(3)
    pilot.report(jobs)
    pilot.depart(0)
    pilot.report(later)
    assert ids(pilot.write_off.collect().done) == ids(later)  # a turn that had no room to claim
    assert pilot.land().finished == set(ids(jobs))
    pilot.depart(0)
    assert pilot.land().finished == set(ids(later))
    assert (left(conn), pilot.hand.held) == (3, {})


def test_a_statement_between_them_has_its_own_answer(
    conn: Connection, pilot: Pilot, jobs: list[Claimed]
) -> None:
    from pgqueue.pipeline import Pipeline

    pilot.report(jobs)
    pilot.depart(2)
    pilot.depart(2)
    with Pipeline(pilot.rounds.connection) as p:
        one = p.send(ONE)
    assert one.result() == 1
    assert [len(pilot.land().answers[0].jobs) for _ in range(2)] == [2, 2]
    assert left(conn) == 6


def test_a_lock_in_front_of_the_first_undoes_both_and_nothing_is_lost(
    conn: Connection, pilot: Pilot, jobs: list[Claimed]
) -> None:
    """The server refuses what stands behind a broken transaction: the second round neither acknowledges nor claims."""
    conn.execute("UPDATE pgqueue.job SET headers = '{}' WHERE id = %s", [jobs[0].id])
    pilot.report(jobs[:2])
    pilot.depart(2)
    pilot.report(jobs[2:])
    pilot.depart(3)
    first = pilot.land()
    assert (first.finished, first.locked, first.answers) == ({jobs[1].id}, {jobs[0].id}, [])
    assert pilot.flights.land(pilot.rounds) is None
    conn.rollback()
    again = pilot.depart(0)
    assert set(ids(again.results.done)) == {jobs[0].id, jobs[2].id}
    assert pilot.land().finished == {jobs[0].id, jobs[2].id}
    leased = conn.execute("SELECT count(*) FROM pgqueue.job WHERE lease <> 0").fetchone()
    assert (leased, left(conn), pilot.hand.held) == ((0,), 6, {})


def test_a_connection_lost_with_two_under_way_loses_no_result_and_reports_no_lost_lease(
    dsn: str, conn: Connection, pilot: Pilot, jobs: list[Claimed]
) -> None:
    """The first was committed, its answer never came: its rows are missing, and that is no lost lease."""
    pilot.report(jobs[:2])
    pilot.depart(0)
    conn.execute("BEGIN")
    conn.execute("SELECT FROM pgqueue.job WHERE id = %s FOR UPDATE", [jobs[2].id])  # the second waits here
    pilot.report(jobs[2:])
    pilot.depart(3)
    with psycopg.connect(dsn, autocommit=True) as other:
        from tests.waiting import eventually

        eventually(lambda: _count(other) == 7)
        other.execute("SELECT pg_terminate_backend(%s, 40000)", [pilot.rounds.connection.info.backend_pid])
    conn.rollback()
    broken = pilot.rounds
    broken.connection.close()
    pilot.flights.lose(broken)
    assert (len(pilot.flights), pilot.quota.coming, broken.unsure) == (0, 0, set(ids(jobs)))
    unsure = broken.unsure
    pilot.open().unsure = unsure
    again = pilot.depart(0)
    assert set(ids(again.results.done)) == set(ids(jobs))
    out = pilot.land()
    assert (out.finished, out.lost) == (set(ids(jobs)), set())
    assert (left(conn), pilot.hand.held) == (6, {})


def _count(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("SELECT count(*) FROM pgqueue.job").fetchone()
    assert row
    return int(row[0])


def test_what_was_done_is_durable_before_anybody_is_told_and_a_claim_need_not_be(
    monkeypatch: pytest.MonkeyPatch, conn: Connection, pilot: Pilot, jobs: list[Claimed]
) -> None:
    """A claim that a crash of the server undoes costs a second run; a result that it undoes was reported as written."""
    from pgqueue.pipeline import Pending, Pipeline

    said: list[str] = []
    run, send = Pipeline.run, Pipeline.send

    def noted(self: Pipeline, command: str) -> None:
        said.append(command)
        run(self, command)

    def noted_too(self: Pipeline, statement: Statement[Any]) -> Pending[Any]:
        said.append(statement.query.text)
        return send(self, statement)

    monkeypatch.setattr(Pipeline, "run", noted)
    monkeypatch.setattr(Pipeline, "send", noted_too)
    pilot.depart(2)
    pilot.land()
    assert [command for command in said if "synchronous_commit" in command]
    said.clear()
    pilot.report(jobs)
    pilot.depart(2)
    pilot.land()
    assert not [command for command in said if "synchronous_commit" in command]


def test_a_round_that_only_claims_waits_for_no_lock_for_long_and_leaves_no_setting_behind(
    conn: Connection, dsn: str
) -> None:
    """It is the transaction of its pipeline, at READ COMMITTED whatever the role has."""
    enqueue(conn, 2)
    conn.execute(
        f"ALTER DATABASE {conn.info.dbname} SET default_transaction_isolation = 'serializable'".encode()
    )
    conn.commit()
    pilot = Pilot(dsn)
    try:
        conn.execute("LOCK TABLE pgqueue.job IN ACCESS EXCLUSIVE MODE")
        pilot.depart(2)
        assert not pilot.land().answers
        conn.rollback()
        for name, value in (
            ("lock_timeout", "0"),
            ("synchronous_commit", "on"),
            ("transaction_isolation", "read committed"),
        ):
            assert pilot.rounds.connection.execute(f"SHOW {name}".encode()).fetchone() == (value,)
        pilot.depart(2)
        assert len(pilot.land().answers[0].jobs) == 2
        with Holder(dsn, 9) as another:
            assert not another.claim(2)
    finally:
        pilot.rounds.connection.close()
        conn.execute(f"ALTER DATABASE {conn.info.dbname} RESET default_transaction_isolation".encode())
        conn.commit()
