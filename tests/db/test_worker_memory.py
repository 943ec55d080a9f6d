"""A worker holds large payloads by their size: what it claims ahead is bounded in bytes, not only in jobs."""

from __future__ import annotations

from contextlib import ExitStack

import msgspec
import pytest

from pgqueue import App, quota
from pgqueue.config import WorkerSettings
from pgqueue.plan import Plan
from pgqueue.round import Rounds
from pgqueue.worker import Worker
from tests.factories import enqueue
from tests.server import Connection
from tests.waiting import eventually

SIZE, FIT = 10_000, 25


class Text(msgspec.Struct):
    """A payload of a size."""

    text: str


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
def test_claims_of_short_jobs_with_large_payloads_ask_for_what_may_be_in_hand(
    dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch, *, keyed: bool
) -> None:
    asked: list[int] = []
    ran: list[int] = []
    start = Rounds.start
    app = App()

    def noted(self: Rounds, plan: Plan) -> object:
        asked.extend(wish.n for wish in plan.wishes)
        asked.extend([plan.lane_wish.total] if plan.lane_wish else [])
        return start(self, plan)

    @app.job("large")
    def large(text: Text) -> None:
        ran.append(len(text.text))

    monkeypatch.setattr(Rounds, "start", noted)
    monkeypatch.setattr(quota, "MOST_PAYLOAD", FIT * (SIZE + 20))
    for number in range(20):
        key = f"k{number}" if keyed else None
        enqueue(conn, 60, name="large", key=key, payload={"text": "x" * SIZE})
    conn.commit()
    with ExitStack() as stack:
        worker = Worker(app, dsn, WorkerSettings(concurrency=4))
        stack.callback(worker.stop)
        worker.start()
        eventually(lambda: len(ran) >= 1200)
    assert max(asked) <= FIT
