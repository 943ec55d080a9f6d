"""Bloat: what a steady flow leaves behind in table and indexes, with autovacuum as it comes and our table settings."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from benchmarks.bench import Case, Quantity, Workload, cost, paced
from benchmarks.server import ask
from benchmarks.work import RunFailed, drained_at

#: Jobs a second: 29 million an hour.
RATE = 8_000
SIZES = """
SELECT ARRAY[pg_catalog.pg_relation_size('pgqueue.job'), pg_catalog.pg_indexes_size('pgqueue.job'),
  (SELECT s.autovacuum_count FROM pg_catalog.pg_stat_user_tables s WHERE s.relid = 'pgqueue.job'::regclass)]
"""


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Let n jobs flow through a worker; the sizes twice a second; second half against first."""
    sizes: list[tuple[int, int, int]] = []
    with case.workers(n) as workers, ThreadPoolExecutor(1) as pool:
        flow = pool.submit(case.produce, "flow", n, RATE)
        while not flow.done():
            paced(0.5)
            sizes.append(ask(case.dsn, SIZES))
        flow.result()
        case.drain(n, workers)
    drained_at(case.dsn, case.system.left, 10.0)
    sizes.append(ask(case.dsn, SIZES))
    heap, indexes = [size[0] for size in sizes], [size[1] for size in sizes]
    half = (len(sizes) + 1) // 2
    whole = [a + b for a, b in zip(heap, indexes, strict=True)]
    if not max(whole):
        raise RunFailed("the table never had a page")
    return {
        "bloat.table": max(heap) / 1e6,
        "bloat.indexes": max(indexes) / 1e6,
        "bloat.job": whole[-1] / n,
        "bloat.growth": max(whole[half:]) / max(whole[:half]),
        "bloat.vacuums": float(sizes[-1][2]),
    }


WORKLOAD = Workload(
    name="bloat",
    text=f"{RATE:,} jobs a second through one worker; autovacuum wakes up once a minute, as servers come, and has "
    "the settings that the schema gives the table. Both are empty at the end: what they hold is room for reuse.",
    quantities=[
        cost("bloat.table", "MB", "table, largest"),
        cost("bloat.indexes", "MB", "its indexes, largest"),
        cost("bloat.job", "B/job", "left at the end, by jobs that flowed"),
        cost("bloat.growth", "second / first", "largest size of the second half by that of the first"),
        Quantity(what="bloat.vacuums", unit="runs", title="runs of autovacuum"),
    ],
    n=1_000_000,
    measure=measure,
    most=1_300_000,
)
