"""A worker drains a large backlog by the short form of the claim, and forgets nothing that form does not look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

from pgqueue import App
from pgqueue.config import WorkerSettings
from pgqueue.plan import Plan
from pgqueue.round import Rounds
from pgqueue.worker import Worker
from tests.factories import enqueue
from tests.server import Connection
from tests.waiting import eventually

MINE, KEYED, FOREIGN = 6000, 300, 1500


class Nothing(msgspec.Struct):
    """The payload {}."""


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note of every claim of a worker in this process whether it took the short form."""
    seen: list[bool] = []
    start = Rounds.start

    def noted(self: Rounds, plan: Plan) -> object:
        seen.extend(wish.backlog for wish in plan.wishes)
        return start(self, plan)

    monkeypatch.setattr(Rounds, "start", noted)
    return seen


@pytest.fixture
def ran(dsn: str, conn: Connection) -> Iterator[list[str | None]]:
    """Fill the queue: jobs of this worker, keyed ones and those of a name it does not know among them; start it."""
    app, keys = App(), list[str | None]()

    @app.job("mine")
    def mine(nothing: Nothing) -> None:
        keys.append(None)

    @app.job("keyed")
    def keyed(nothing: Nothing) -> None:
        keys.append("k")

    for _ in range(3):
        enqueue(conn, MINE // 3, name="mine", payload={})
        enqueue(conn, FOREIGN // 3, name="foreign", payload={})
        enqueue(conn, KEYED // 3, name="keyed", key="k", payload={})
    conn.commit()
    with ExitStack() as stack:
        worker = Worker(app, dsn, WorkerSettings())
        stack.callback(worker.stop)
        worker.start()
        yield keys


def left(conn: Connection) -> list[tuple[str, int, int]]:
    rows = conn.execute("SELECT name, count(*), sum(attempt) FROM pgqueue.job GROUP BY name").fetchall()
    conn.rollback()
    return [(str(name), int(str(n)), int(str(attempts))) for name, n, attempts in rows]


def test_jobs_of_unknown_names_and_keyed_jobs_amid_a_backlog(
    conn: Connection, forms: list[bool], ran: list[str | None]
) -> None:
    """Keyed jobs starve if a claim that always comes back full is the only one that looks for them."""
    eventually(lambda: left(conn) == [("foreign", FOREIGN, 0)])
    assert sorted(ran, key=str) == [None] * MINE + ["k"] * KEYED
    assert ran.index("k") < MINE  # they did not wait for the end of the backlog
    assert True in forms
    assert False in forms
