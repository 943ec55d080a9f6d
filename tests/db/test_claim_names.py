"""Names a worker does not know: they neither run nor slow it, and what stands behind them is found."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import pytest

from pgqueue.app import App
from pgqueue.claim import Paused, claim
from pgqueue.config import WorkerSettings
from pgqueue.events import Bus
from pgqueue.finish import ack
from pgqueue.floors import EVERYTHING, WINDOW
from pgqueue.hand import Hand
from pgqueue.intake import Intake
from pgqueue.loop import Wake
from pgqueue.plan import Plan
from pgqueue.quota import Quota
from pgqueue.results import Results
from pgqueue.retries import Retries
from pgqueue.round import Leases, Rounds
from pgqueue.run import Runner
from pgqueue.shelf import Shelf
from pgqueue.threads import ThreadSlots
from tests.factories import (
    MINUTE,
    QUEUE,
    Connection,
    Holder,
    buffers,
    enqueue,
    explain,
    ids,
    nodes,
    row,
    scope,
    wipe,
)

FOREIGN = 20_000


@pytest.fixture
def dsn(database: str) -> str:
    return wipe(database)


class Desk:
    """What a worker process claims with: its intake and its rounds, without threads."""

    def __init__(self, holder: Holder, concurrency: int = 8, queues: tuple[str, ...] = (QUEUE,)) -> None:
        app = App()

        @app.job("work")
        def work() -> None: ...

        settings = WorkerSettings(concurrency=concurrency, queues=queues)
        levels = [("", 0), *((queue, priority) for queue in queues for priority in range(10))]
        runners: Mapping[str, Runner] = {name: Runner(kind) for name, kind in app.types.items()}
        self.hand = Hand(Wake())
        quota = Quota(settings, self.hand, levels)
        threads = ThreadSlots(
            Shelf(settings.queues), runners, levels, self.hand, size=concurrency, reserved={}, report_all=False
        )  # fmt: skip
        self.intake = Intake(
            settings=settings, runners=runners, levels=levels, hand=self.hand, quota=quota, threads=threads, tasks=None,
            bus=Bus(), retries=Retries(levels, on=False),
        )  # fmt: skip
        self.shelf = threads.shelf
        self.rounds = Rounds(holder.connection, Leases(1), timedelta(seconds=60), "w")

    def round(self, *, called: bool = False) -> int:
        """Claim once, as the engine does; return how many jobs came."""
        intake = self.intake
        wishes = intake.wishes(called=called)
        settled = intake.floors.horizon.settled
        out = self.rounds.run(Plan(results=Results(), wishes=wishes, observe=intake.floors.wants_proof()))
        got = sum(
            intake.took(wish, settled, answer) for wish, answer in zip(wishes, out.answers, strict=True)
        )
        if out.observation is not None:
            intake.floors.observed(out.observation.last, out.observation.holders, 0.0)
        return got

    def sweep(self, n: int) -> int:
        """Sweep once, with room for n jobs."""
        wish = self.intake.sweep_wish([QUEUE], n)
        ceilings = [EVERYTHING] * len(wish.levels)
        answer, recovered, _ = self.rounds.sweep(wish, wish, ceilings, recovering=n > 0, alone=False)
        return self.intake.swept(wish, answer, wish, recovered)


def job_scans(plan: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Return the index scans of a claim over ready jobs."""
    return [node for node in nodes(plan) if node.get("Index Name") == "job_ready"]


def test_a_claim_examines_at_most_a_window_of_foreign_names(dsn: str, conn: Connection) -> None:
    """A plain filter read all of them for every claim: 138 ms over a million foreign rows."""
    enqueue(conn, FOREIGN, name="else")
    (mine,) = enqueue(conn)
    conn.commit()
    with Holder(dsn) as holder:
        plan = explain(holder.connection, claim(scope(), [0], 100, 77, MINUTE, {QUEUE: 0}))
        (scan,) = job_scans(plan)
        assert scan["Actual Rows"] == WINDOW
        assert buffers(plan) < 3 * WINDOW
        answer = holder.answer(100)
        assert answer.jobs == []
        assert list(answer.full) == [0]
        first = conn.execute(
            "SELECT pos FROM pgqueue.job ORDER BY pos OFFSET %s LIMIT 1", [WINDOW - 1]
        ).fetchone()
        assert (answer.full[0],) == first
        for _ in range(FOREIGN // WINDOW):
            answer = holder.answer(100, floors=[answer.full[0]])
        assert ids(answer.jobs) == [mine]


def test_a_worker_gets_past_foreign_names_once_and_then_claims_at_a_bounded_cost(
    dsn: str, conn: Connection
) -> None:
    enqueue(conn, FOREIGN, name="else")
    made = enqueue(conn, 40)
    conn.commit()
    with Holder(dsn) as holder:
        desk = Desk(holder)
        rounds = 0
        while len(desk.hand.held) < 8:
            desk.round()
            rounds += 1
            assert rounds < 20
        assert sorted(desk.hand.held) == made[:8]
        floors = desk.intake.floors
        wish = desk.intake.wishes
        holder.run(ack(list(desk.hand.held.values())))
        desk.hand.held.clear()
        (again,) = wish()
        plan = explain(holder.connection, claim(again.scope, again.starts, 1, 78, MINUTE, {QUEUE: 0}))
        assert buffers(plan) < 200
        assert floors.floor[5] > 3 * WINDOW


def test_a_first_look_at_a_full_window_of_foreign_names_does_not_take_it_for_the_end(
    dsn: str, conn: Connection
) -> None:
    """It does not tell where a window was full: no floor may pass what it has not looked at."""
    enqueue(conn, WINDOW + 10, name="else")
    (mine,) = enqueue(conn)
    conn.commit()
    last = conn.execute("SELECT last_value FROM pgqueue.pos_seq").fetchone()
    assert last
    with Holder(dsn) as holder:
        desk = Desk(holder)
        desk.intake.few = True
        desk.intake.floors.observed(int(str(last[0])), [], 0.0)
        assert all(wish.few for wish in desk.intake.wishes(called=True))
        assert desk.round(called=True) == 0
        assert desk.round() == 0
        assert desk.round() == 1
        assert list(desk.hand.held) == [mine]


def test_the_sweep_gets_past_foreign_names_and_finds_what_is_behind_them(dsn: str, conn: Connection) -> None:
    enqueue(conn, FOREIGN, name="else")
    (late,) = enqueue(conn)
    conn.commit()
    with Holder(dsn) as holder:
        desk = Desk(holder)
        desk.intake.floors.floor = [EVERYTHING - 1] * 10  # no claim would ever find it
        for _ in range(FOREIGN // WINDOW + 1):
            desk.sweep(8)
        assert list(desk.hand.held) == [late]


def test_a_sweep_without_room_for_jobs_does_not_send_the_cursor_back(dsn: str, conn: Connection) -> None:
    """Else a worker that is busy at times never comes to the end of a long row of foreign names."""
    enqueue(conn, FOREIGN, name="else")
    (late,) = enqueue(conn)
    conn.commit()
    with Holder(dsn) as holder:
        desk = Desk(holder)
        desk.intake.floors.floor = [EVERYTHING - 1] * 10
        for _ in range(FOREIGN // WINDOW + 1):
            desk.sweep(8)
            desk.sweep(0)
        assert list(desk.hand.held) == [late]


def test_after_the_end_of_a_queue_the_sweep_begins_again(dsn: str, conn: Connection) -> None:
    enqueue(conn, WINDOW + 10, name="else")
    conn.commit()
    with Holder(dsn) as holder:
        desk = Desk(holder)
        desk.sweep(8)
        assert desk.intake.cursor[5] > 0
        desk.sweep(8)
        assert desk.intake.cursor[5] == 0


def test_foreign_names_are_left_as_they_are(dsn: str, conn: Connection) -> None:
    made = enqueue(conn, 5, name="else")
    conn.commit()
    before = [row(conn, job_id) for job_id in made]
    with Holder(dsn) as holder:
        desk = Desk(holder)
        for _ in range(3):
            desk.round()
            desk.sweep(8)
        assert not desk.hand.held
    assert [row(conn, job_id) for job_id in made] == before


def test_paused_names_and_queues_are_not_claimed_and_come_back_after_it(dsn: str, conn: Connection) -> None:
    (job_id,) = enqueue(conn)
    conn.commit()
    with Holder(dsn) as holder:
        desk = Desk(holder)
        desk.intake.pause(Paused(frozenset(), frozenset({"work"})))
        assert desk.round() == 0
        assert desk.sweep(8) == 0
        desk.intake.pause(Paused(frozenset({QUEUE}), frozenset()))
        assert desk.intake.wishes() == []
        desk.intake.pause(Paused(frozenset(), frozenset()))
        desk.intake.floors.lower([QUEUE])
        assert desk.round() == 1
        assert list(desk.hand.held) == [job_id]
