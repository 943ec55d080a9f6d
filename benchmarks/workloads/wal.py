"""WAL per job: enqueue, claim and ack, without full-page images; and the share of claims that are HOT updates."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Case, Quantity, Workload, cost
from benchmarks.server import ask, until
from benchmarks.work import RunFailed

POSITION = "SELECT pg_catalog.pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
UPDATES = """
SELECT ARRAY[s.n_tup_upd, s.n_tup_hot_upd] FROM pg_catalog.pg_stat_user_tables s
WHERE s.schemaname = 'pgqueue' AND s.relname = 'job'
"""
#: A session tells its counts when it ends.
COUNTED = f"SELECT s.u[1] >= {{n}} FROM ({UPDATES}) s(u)"  # noqa: S608 - constants


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Take the WAL position before and after filling and draining; vacuum is off, so the WAL is the queue's own."""
    with case.connect(autocommit=True) as connection:
        connection.execute("ALTER TABLE pgqueue.job SET (autovacuum_enabled = off)")
        connection.execute("ALTER TABLE pgqueue.tally SET (autovacuum_enabled = off)")
    case.server.set("full_page_writes", "off")
    try:
        until(case.dsn, "SELECT current_setting('full_page_writes') = 'off'")
        start = ask(case.dsn, POSITION)
        case.fill(n, rest=False)
        filled = ask(case.dsn, POSITION)
        with case.workers(n) as workers:
            case.drain(n, workers)
        drained = ask(case.dsn, POSITION)
    finally:
        case.server.reset("full_page_writes")
    if not until(case.dsn, COUNTED.format(n=n)):
        raise RunFailed("the server counted fewer updates than jobs")
    updates, hot = ask(case.dsn, UPDATES)
    return {
        "wal": float(drained - start) / n,
        "wal.enqueue": float(filled - start) / n,
        "wal.run": float(drained - filled) / n,
        "wal.hot": hot / max(1, updates),
    }


WORKLOAD = Workload(
    name="wal",
    text="Payload of 150 bytes, no headers, full_page_writes off, autovacuum off: WAL bytes from before the enqueue "
    "(bulk) to after the last ack, everything a worker writes included.",
    quantities=[
        cost("wal", "B/job", "WAL per job: enqueue, claim and ack"),
        cost("wal.enqueue", "B/job", "of it enqueue"),
        cost("wal.run", "B/job", "of it claim and ack"),
        Quantity(what="wal.hot", unit="share", title="claims that are HOT updates"),
    ],
    n=50_000,
    measure=measure,
)
