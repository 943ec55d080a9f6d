"""Floors on real commits: whatever order transactions end in, no committed job is left below a floor."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack

import psycopg
import pytest

from pgqueue.claim import Answer, claim, horizon
from pgqueue.finish import ack, release
from pgqueue.floors import Floors
from pgqueue.job import Claimed
from pgqueue.statement import Statement
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
    scope,
    wipe,
)
from tests.server import Server
from tests.waiting import chaos

PRODUCERS = 16


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


class Reader:
    """One worker of one level, without its sweep: floors, claims and observations as in the rounds of the engine."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        self.floors = Floors([(QUEUE, 5)])
        self.clock = 0.0

    def round(self, n: int) -> list[Claimed]:
        """Claim up to n jobs, then observe the sequence if that could raise a floor."""
        floors = self.floors
        starts, settled = floors.starts(), floors.horizon.settled
        answer = self.holder.answer(n, floors=starts)
        last = (0, answer.jobs[-1].pos) if answer.jobs else None
        floors.claimed([0], starts, settled, last, answer.full, exhausted=len(answer.jobs) < n)
        floors.saw((0, job.pos) for job in answer.jobs)
        if floors.wants_proof():
            seen = self.holder.run(horizon())
            floors.observed(seen.last, seen.holders, self.clock)
        return answer.jobs

    def statement(self, n: int) -> Statement[Answer]:
        """Return the claim that the next round would make."""
        return claim(scope(), self.floors.starts(), n, self.holder.leases.new(), MINUTE, {QUEUE: 0})

    def lower(self) -> None:
        """Do what a worker does that hears of jobs given back."""
        self.floors.lower([QUEUE])


class Hasty(Reader):
    """The control: a floor at the highest claimed position."""

    def round(self, n: int) -> list[Claimed]:
        floors = self.floors
        jobs = self.holder.answer(n, floors=floors.high).jobs
        floors.saw((0, job.pos) for job in jobs)
        return jobs


class Producer:
    """A connection that enqueues step by step; `committed` collects what it has committed."""

    def __init__(self, connection: Connection, committed: set[int]) -> None:
        self.connection = connection
        self.committed = committed
        self.open: list[int] = []

    def step(self, rng: random.Random) -> None:
        """Do one thing that a business transaction may do."""
        what = rng.choices(
            ["enqueue", "number first", "savepoint", "commit", "rollback"], [40, 15, 10, 30, 8]
        )[0]
        if what == "enqueue":
            self.open += enqueue(self.connection, rng.randrange(1, 4))
        elif what == "number first":  # nextval runs before the transaction has an xid; the row comes later
            place = self.connection.execute("SELECT nextval('pgqueue.pos_seq')").fetchone()
            if rng.random() < 0.7:
                assert place
                made = self.connection.execute(
                    "INSERT INTO pgqueue.job (name, queue, priority, pos) VALUES (%s, %s, 5, %s) RETURNING id",
                    [NAME, QUEUE, place[0]],
                ).fetchone()
                assert made
                self.open.append(made[0])
        elif what == "savepoint":
            self.connection.execute("SAVEPOINT here")
            enqueue(self.connection, 2)
            self.connection.execute("ROLLBACK TO SAVEPOINT here")
        else:
            self.end(commit=what == "commit")

    def end(self, *, commit: bool) -> None:
        """End the transaction."""
        if commit:
            self.connection.commit()
            self.committed.update(self.open)
        else:
            self.connection.rollback()
        self.open = []


def play(
    dsn: str, seed: int, kind: type[Reader], steps: int = 150
) -> tuple[set[int], list[int], list[Reader]]:
    """Play one schedule: producers that commit late, two workers; return committed, claimed, the workers."""
    rng = random.Random(seed)
    wipe(dsn)
    committed: set[int] = set()
    claimed: list[int] = []
    with ExitStack() as stack:
        producers = [Producer(stack.enter_context(psycopg.connect(dsn)), committed) for _ in range(PRODUCERS)]
        readers = [kind(stack.enter_context(Holder(dsn, nonce))) for nonce in (1, 2)]

        def turn(reader: Reader, n: int) -> int:
            jobs = reader.round(n)
            back = [job for job in jobs if rng.random() < 0.05]
            if back and kind is Reader:
                reader.holder.run(release(back))
                for other in readers:
                    other.lower()
            else:
                back = []
            done = [job for job in jobs if job not in back]
            reader.holder.run(ack(done))
            claimed.extend(ids(done))
            return len(jobs)

        for _ in range(steps):
            if rng.random() < 0.35:
                reader = rng.choice(readers)
                reader.clock += rng.choice([0.0, 0.01, 0.3, 1.5])
                turn(reader, rng.choice([1, 3, 10, 500]))
            else:
                rng.choice(producers).step(rng)
        for producer in producers:
            producer.end(commit=rng.random() < 0.8)
        quiet = 0
        while quiet < 6:
            for reader in readers:
                reader.clock += 2.0
            quiet = quiet + 1 if not sum(turn(reader, 500) for reader in readers) else 0
    return committed, claimed, readers


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(chaos(8, 100)))
def test_every_committed_job_is_claimed_once_without_any_sweep(dsn: str, seed: int) -> None:
    committed, claimed, readers = play(dsn, seed, Reader)
    assert len(committed) > 20
    assert sorted(claimed) == sorted(committed)
    assert all(reader.floors.floor[0] > 0 for reader in readers), "the floors never rose: nothing was tested"


def test_a_floor_at_the_highest_claimed_position_loses_jobs_under_the_same_schedules(dsn: str) -> None:
    """The control: it shows that the schedules hold what the proof protects from."""
    lost = 0
    for seed in range(3):
        committed, claimed, _ = play(dsn, seed, Hasty)
        lost += len(committed.difference(claimed))
    assert lost > 0


def test_the_job_of_a_long_transaction_is_claimed_as_soon_as_it_commits(dsn: str, conn: Connection) -> None:
    with Holder(dsn) as holder, psycopg.connect(dsn) as long, psycopg.connect(dsn) as short:
        reader = Reader(holder)
        (late,) = enqueue(long)
        for turn in range(6):
            made = enqueue(short, 3)
            short.commit()
            reader.clock = float(turn)
            assert ids(reader.round(500)) == made
        assert reader.floors.horizon.guarded
        raised = reader.floors.floor[0]
        assert raised > 0
        long.commit()
        reader.clock += 0.1
        assert reader.round(500) == []
        assert reader.floors.floor[0] < raised
        assert ids(reader.round(500)) == [late]


def test_the_floor_follows_the_work_within_a_few_rounds(dsn: str, conn: Connection) -> None:
    enqueue(conn, 5_000)
    conn.commit()
    with Holder(dsn) as holder:
        reader = Reader(holder)
        trails = []
        while jobs := reader.round(100):
            holder.run(ack(jobs))
            trails.append(jobs[-1].pos - reader.floors.floor[0])
        assert max(trails[3:]) <= 200


def test_a_sequence_that_went_back_makes_claims_look_from_the_start(dsn: str, conn: Connection) -> None:
    """After a failover to a standby that lagged, numbers below the floor are handed out again."""
    with Holder(dsn) as holder:
        reader = Reader(holder)
        enqueue(conn, 10)
        conn.commit()
        for _ in range(3):
            reader.round(500)
        assert reader.floors.floor[0] > 0
        conn.execute("SELECT setval('pgqueue.pos_seq', (SELECT last_value - 8 FROM pgqueue.pos_seq))")
        conn.execute("DELETE FROM pgqueue.job")
        (again,) = enqueue(conn)
        conn.commit()
        assert reader.round(500) == []
        seen = holder.run(horizon())
        reader.floors.observed(seen.last, seen.holders, 9.0)
        assert ids(reader.round(500)) == [again]


def test_a_sequence_that_was_never_used_has_settled_nothing(server: Server) -> None:
    """Its last_value reads 1 before the first number is drawn; a floor of 1 would pass the first job by."""
    name = server.migrated()
    try:
        with Holder(server.dsn(name)) as holder:
            assert holder.run(horizon()).last == 0
            with psycopg.connect(server.dsn(name)) as connection:
                enqueue(connection)
            assert holder.run(horizon()).last == 1
    finally:
        server.drop(name)


def test_the_holders_are_those_who_may_still_commit_a_number(dsn: str) -> None:
    with Holder(dsn) as holder, ExitStack() as stack:
        opened: Sequence[Connection] = [stack.enter_context(psycopg.connect(dsn)) for _ in range(4)]
        idle, drew, wrote, ended = opened
        idle.execute("SELECT count(*) FROM pgqueue.job")
        drew.execute("SELECT nextval('pgqueue.pos_seq')")
        enqueue(wrote)
        enqueue(ended)
        ended.rollback()
        mine = holder.run(horizon())
        assert len(mine.holders) == 2
        drew.commit()
        assert len(holder.run(horizon()).holders) == 1
        wrote.commit()
        assert holder.run(horizon()).holders == []


def test_claims_stay_flat_while_another_session_pins_an_old_snapshot(dsn: str, conn: Connection) -> None:
    """Peers' claims read every dead index entry again: at 20,000 drained jobs they read 20,000 of them."""
    enqueue(conn, 20_000)
    conn.commit()
    with Holder(dsn) as holder, psycopg.connect(dsn) as pin:
        pin.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        pin.execute("SELECT count(*) FROM pgqueue.job")
        reader = Reader(holder)
        costs = []
        for turn in range(40):
            if turn % 4 == 3:
                holder.begin()
                costs.append(buffers(explain(holder.connection, reader.statement(50))))
                holder.rollback()
            jobs = reader.round(500)
            assert len(jobs) == 500
            holder.run(ack(jobs))
        assert max(costs) <= 1.3 * min(costs) + 20, costs
        assert reader.round(500) == []
