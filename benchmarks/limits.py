"""`python -m benchmarks.limits`: what limits cost, as ratios to the same drain without any.

Every round drains a backlog of no-op jobs once in each way, in another order; figures are medians over the rounds,
and the ratio is the median of each round's own. WAL and commits are those of the whole server during the drain.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from pgqueue import App, migrate
from pgqueue.config import WorkerSettings
from pgqueue.connection import execute
from pgqueue.declare import declare
from pgqueue.embedded import Embedded
from pgqueue.worker import Worker

KEYS = 100
PLAIN = "no limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to drain: what the job type declares, the keys of its jobs, and what its queue is set to."""

    title: str
    policy: dict[str, object]
    keys: int = 0
    queue: str | None = None


WAYS = [
    Way(title=PLAIN, policy={}),
    Way(title="limit=8", policy={"limit": 8}),
    Way(title="rate, never reached", policy={"rate": "1000000/s", "limit": 8}),
    Way(title=f"ordering key, {KEYS} keys", policy={}, keys=KEYS),
    Way(title=f"key_limit=8, {KEYS} keys", policy={"key_limit": 8}, keys=KEYS),
    Way(title="queue limit, never reached", policy={}, queue="slots => 100000"),
    Way(title="queue limit 8", policy={}, queue="slots => 8"),
    Way(title="queue rate, never reached", policy={}, queue="rate_per_s => 1000000"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Jobs a second, and bytes of WAL and commits a job."""

    rate: float
    wal: float
    commits: float


def drain(dsn: str, way: Way, n: int) -> Drained:
    """Enqueue a backlog, bring the database to rest, and drain it with one worker."""
    app = App()
    ran: list[int] = []

    @app.job("bench", **way.policy)  # type: ignore[arg-type]
    def bench(n: int) -> None:
        ran.append(n)

    with psycopg.connect(dsn, autocommit=True) as conn:
        if way.queue is not None:
            conn.execute(f"SELECT pgqueue.limit_queue('default', {way.queue})".encode())
        execute(conn, declare([bench.policy]))
        kind = bench.using(key=lambda value: f"key-{value % way.keys}") if way.keys else bench
        with conn.transaction():
            for start in range(0, n, 1000):
                kind.enqueue_many(conn, list(range(start, min(n, start + 1000))))
        conn.execute("VACUUM ANALYZE")
        conn.execute("CHECKPOINT")

        def counters() -> tuple[int, int]:
            found = conn.execute(
                "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint, "
                "(SELECT xact_commit FROM pg_stat_database WHERE datname = current_database())"
            ).fetchone()
            return (int(found[0]), int(found[1])) if found else (0, 0)

        worker = Worker(app, dsn, WorkerSettings())
        before, began = counters(), time.monotonic()
        worker.start()
        while len(ran) < n or conn.execute("SELECT EXISTS (SELECT FROM pgqueue.job)").fetchone() != (False,):
            time.sleep(0.01)
        took = time.monotonic() - began
        worker.stop()
        time.sleep(1.1)  # counters of a session that lives are reported once a second
        after = counters()
    return Drained(rate=n / took, wal=(after[0] - before[0]) / n, commits=(after[1] - before[1]) / n)


def compare(fresh: Callable[[], str], ways: list[Way], n: int, runs: int) -> dict[str, list[Drained]]:
    """Drain in every way, each round in another order, each on a fresh database."""
    found: dict[str, list[Drained]] = {way.title: [] for way in ways}
    for run in range(runs):
        order = list(ways)
        random.Random(run).shuffle(order)
        for way in order:
            found[way.title].append(drain(fresh(), way, n))
            print(".", end="", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Read the options, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=20_000, help="jobs a drain")
    parser.add_argument("--runs", type=int, default=5, help="rounds")
    parser.add_argument("--only", help="ways whose title holds this")
    options = parser.parse_args()
    ways = [way for way in WAYS if way.title == PLAIN or options.only is None or options.only in way.title]
    with Embedded(settings={"fsync": "off", "max_wal_size": "4GB"}) as server:
        names = iter(range(10_000))

        def fresh() -> str:
            name = f"limits_{next(names)}"
            with psycopg.connect(server.dsn(), autocommit=True) as admin:
                admin.execute(f"CREATE DATABASE {name}".encode())
            dsn = psycopg.conninfo.make_conninfo(server.dsn(), dbname=name)
            migrate.upgrade(dsn)
            return dsn

        found = compare(fresh, ways, options.n, options.runs)
    print(
        f"\n| {options.n:,} no-op jobs, one worker | jobs/s | of those without | WAL a job | commits a job |"
    )
    print("|---|---:|---:|---:|---:|")
    for title, runs in found.items():
        ratios = [mine.rate / plain.rate for mine, plain in zip(runs, found[PLAIN], strict=True)]
        middle = statistics.median
        print(
            f"| {title} | {middle(r.rate for r in runs):,.0f} | {middle(ratios):.2f} "
            f"[{min(ratios):.2f} to {max(ratios):.2f}] | {middle(r.wal for r in runs):,.0f} B "
            f"| {middle(r.commits for r in runs):.4f} |"
        )


if __name__ == "__main__":
    main()
