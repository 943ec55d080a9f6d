"""Rotating partitions against the shipped table, in one run: `python -m benchmarks.prototypes.rotation`.

Both sides run the same loop on one connection: enqueue 500, claim 500, acknowledge them, each a durable commit, with
the same batch and payload. The shipped side uses the product's own statements. Rounds alternate; every round has
fresh databases. Three scenes: nobody else is there; another session holds a snapshot; it holds a snapshot and has
read the job table in the same transaction, as pg_dump does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.program import TEXT
from benchmarks.server import Server, ask, settle, started
from benchmarks.work import RunFailed
from pgqueue import migrate
from pgqueue.claim import Scope, claim
from pgqueue.connection import execute
from pgqueue.finish import ack
from pgqueue.worker import connect

BATCH, RANGE, AHEAD = 500, 25_000, 4
#: Jobs a round.
JOBS = 150_000
#: A try to drop stops every claim for up to 50 ms where somebody reads the table.
RETRY_S = 1.0
VISIBILITY = timedelta(seconds=30)
POSITION = "SELECT pg_catalog.pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
PAYLOADS = json.dumps([{"n": n, "text": TEXT} for n in range(BATCH)])
SIZE = """
SELECT coalesce(sum(pg_catalog.pg_total_relation_size(c.oid)), 0)::bigint FROM pg_catalog.pg_class c
WHERE c.relnamespace = %s::regnamespace AND c.relname ~ '^job(_[0-9]+)?$' AND c.relkind = 'r'
"""

ENQUEUE_SHIPPED = """
INSERT INTO pgqueue.job (name, queue, priority, payload)
SELECT 'bench', 'bench', 5, p.value FROM json_array_elements(%s::json) p
"""
ENQUEUE = "INSERT INTO rotation.job (payload) SELECT p.value FROM json_array_elements(%s::json) p"
CLAIM = """
WITH w AS MATERIALIZED (
  SELECT j.pos FROM rotation.job j
  WHERE j.queue = 'bench' AND j.priority = 5 AND j.pos > %(floor)s AND j.lease = 0 AND j.lost = 0
  ORDER BY j.pos LIMIT %(n)s FOR NO KEY UPDATE SKIP LOCKED)
UPDATE rotation.job j SET lease = %(lease)s, deadline = clock_timestamp() + %(visibility)s::interval,
  attempt = j.attempt + 1, claimed_at = statement_timestamp()
FROM w WHERE j.pos = w.pos AND j.pos > %(floor)s
RETURNING j.pos, j.name, j.attempt, j.enqueued_at, j.payload::text
"""
#: The bounds let the planner leave partitions out; an array of positions alone does not.
ACK = """
DELETE FROM rotation.job j
WHERE j.pos = ANY (%(ids)s) AND j.pos BETWEEN %(low)s AND %(high)s AND j.lease = %(lease)s
"""


class Rotating:
    """The prototype: one worker that also looks after the partitions."""

    schema = "rotation"

    def __init__(self, dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(Path(__file__).with_suffix(".sql").read_bytes())
        self.connection = connect(dsn, "rotation")
        self.connection.execute("SET search_path = rotation, pg_catalog")
        self.floor, self.oldest, self.newest = 0, 1, 1
        self.dropped, self.refused, self.next_try = 0, 0, 0.0
        self.leases = itertools.count(1)
        self._ahead()

    def step(self) -> int:
        """Enqueue, claim, acknowledge; then keep the partitions; return the jobs done."""
        self.connection.execute(ENQUEUE, (PAYLOADS,))
        lease = next(self.leases)
        params = {"floor": self.floor, "n": BATCH, "lease": lease, "visibility": VISIBILITY}
        rows = self.connection.execute(CLAIM, params).fetchall()
        positions = sorted(row[0] for row in rows)
        self.floor = positions[-1]
        done = self.connection.execute(
            ACK, {"ids": positions, "low": positions[0], "high": positions[-1], "lease": lease}
        )
        self._rotate()
        return done.rowcount

    def _rotate(self) -> None:
        while self.floor >= self.oldest + RANGE and time.monotonic() >= self.next_try:
            row = self.connection.execute(
                "SELECT rotation.drop_oldest(%s, %s)", (self.oldest, self.oldest + RANGE)
            ).fetchone()
            if not row or not row[0]:
                self.refused += 1
                self.next_try = time.monotonic() + RETRY_S
            else:
                self.dropped += 1
                self.oldest += RANGE
        self._ahead()

    def _ahead(self) -> None:
        while self.newest < self.floor + AHEAD * RANGE:
            self.connection.execute("SELECT rotation.add(%s, %s)", (self.newest, self.newest + RANGE))
            self.newest += RANGE


class Shipped:
    """The product's table and its own statements."""

    schema = "pgqueue"

    def __init__(self, dsn: str) -> None:
        migrate.upgrade(dsn)
        self.connection = connect(dsn, "shipped")
        self.scope = Scope(queues=["bench"], priorities=[5], names=["bench"])
        self.floor, self.leases = 0, itertools.count(1)
        self.dropped = self.refused = 0

    def step(self) -> int:
        """Enqueue, claim, acknowledge; return the jobs done."""
        self.connection.execute(ENQUEUE_SHIPPED, (PAYLOADS,))
        found = execute(
            self.connection,
            claim(self.scope, [self.floor], BATCH, next(self.leases), VISIBILITY, {"bench": 0}),
        ).jobs
        self.floor = found[-1].pos
        if execute(self.connection, ack(found)) is not None:
            raise RunFailed("the ack found jobs that were not ours")
        return len(found)


@contextmanager
def holding(dsn: str, scene: str, schema: str) -> Iterator[None]:
    """Play the other session of a scene for the length of the block."""
    with psycopg.connect(dsn) as other:
        if scene != "alone":
            other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            other.execute("SELECT count(*) FROM pg_catalog.pg_class")
        if scene == "table read":
            other.execute(f"SELECT count(*) FROM {schema}.job".encode())  # noqa: S608 - a constant
        yield


def measure(server: Server, kind: type[Rotating | Shipped], n: int, scene: str) -> dict[str, float]:
    """Let n jobs flow through a fresh database."""
    database = server.create()
    try:
        side = kind(server.dsn(database))
        settle(server.dsn(database))
        with side.connection, holding(server.dsn(database), scene, side.schema):
            before = ask(server.dsn(database), POSITION)
            took: list[float] = []
            for _ in range(n // BATCH):
                began = time.perf_counter()
                if side.step() != BATCH:
                    raise RunFailed(f"{kind.__name__}: a round lost jobs")
                took.append(time.perf_counter() - began)
            wal = float(ask(server.dsn(database), POSITION) - before)
            left = ask(server.dsn(database), f"SELECT count(*) FROM {side.schema}.job")  # noqa: S608 - a constant
            size = ask(server.dsn(database), SIZE, side.schema)
        if left:
            raise RunFailed(f"{kind.__name__}: {left} jobs are left")
        tenth = max(1, len(took) // 10)
        return {
            "jobs/s": n / sum(took), "WAL B/job": wal / n, "size MB": size / 1e6,
            "last tenth / first": sum(took[:tenth]) / sum(took[-tenth:]), "slowest round ms": 1000 * max(took),
            "dropped": side.dropped, "drops put off": side.refused,
        }  # fmt: skip
    finally:
        server.drop(database)


def main() -> None:
    """Print the medians of both sides in every scene."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=JOBS, help=f"jobs a round (default {JOBS:,})")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    options = parser.parse_args()
    with started() as server:
        server.set("full_page_writes", "off")
        for scene in ("alone", "snapshot held", "table read"):
            runs: dict[str, list[dict[str, float]]] = {"Shipped": [], "Rotating": []}
            for turn in range(options.rounds):
                for kind in (Shipped, Rotating) if turn % 2 == 0 else (Rotating, Shipped):
                    runs[kind.__name__].append(measure(server, kind, options.n, scene))
            print(scene)
            for name, found in runs.items():
                told: dict[str, Any] = {
                    what: statistics.median(run[what] for run in found) for what in found[0]
                }
                print(f"  {name:9}", ", ".join(f"{what} {value:,.4g}" for what, value in told.items()))


if __name__ == "__main__":
    main()
