"""The limit line of the benchmarks keeps as many rounds under way as a worker, and runs every job once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.program import QUEUE
from benchmarks.systems.limit import BATCH, Limit
from pgqueue.flights import MOST
from pgqueue.pipeline import Pipeline
from tests.server import Connection

N = 6 * BATCH + 17
ENQUEUE = "SELECT count(*) FROM pgqueue.enqueue_many('bench', %s::json, queue => %s)"


class Over(Exception):
    """Every job was noted."""


def test_the_limit_line_has_as_many_rounds_under_way_as_a_worker(
    dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, most, away = list[int](), 0, 0
    depart, land = Pipeline.departing, Pipeline.land

    @contextmanager
    def departing(self: Pipeline) -> Iterator[Pipeline]:
        nonlocal most, away
        with depart(self):
            yield self
        away += 1
        most = max(most, away)

    def landed(self: Pipeline) -> None:
        nonlocal away
        land(self)
        away -= 1

    def note(number: int) -> None:
        ran.append(number)
        if len(ran) == N:
            raise Over

    monkeypatch.setattr(Pipeline, "departing", departing)
    monkeypatch.setattr(Pipeline, "land", landed)
    monkeypatch.setenv("BENCH_DSN", dsn)
    conn.execute(ENQUEUE, [json.dumps([{"n": n} for n in range(N)]), QUEUE])
    conn.commit()
    with pytest.raises(Over):
        Limit().work(note)
    assert sorted(ran) == list(range(N))
    assert most == MOST
    assert conn.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (0,)
