"""Business commits: an order row and a job in one transaction, beside an idle worker and without any wake-up."""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from benchmarks.bench import Case, Quantity, Workload, paced
from benchmarks.server import ask, pgbench
from benchmarks.work import RunFailed, Worker

CLIENTS = 16
SLICE_S = 2
#: Nobody serves it here: what is compared is what the look for idle workers costs the commit.
QUEUE_OF_JOBS = "orders"

TABLE = "CREATE TABLE business_order (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer int, total numeric)"
TEXT = "x" * 120
SCRIPT = f"""
\\set customer random(1, 10000)
BEGIN;
INSERT INTO business_order (customer, total) VALUES (:customer, 9.99);
SELECT pgqueue.enqueue('send-receipt', '{{"customer": 1, "text": "{TEXT}"}}', queue => '{QUEUE_OF_JOBS}');
COMMIT;
"""  # noqa: S608 - constants of this file


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Commit in n pairs of slices: with an idle worker of another queue, and without wake-up, in turn first."""
    with case.connect(autocommit=True) as connection:
        connection.execute(TABLE)
    case.fill(1, rest=False)
    waking, silent = [], []
    with case.workers(1) as workers:
        workers.wait_for(1, 30.0)
        paced(1.0)
        rate(case)  # what only the first slice pays: files, plans, caches
        for pair in range(n):
            for first in (pair % 2 == 0, pair % 2 == 1):
                if first:
                    waking.append(rate(case))
                else:
                    with no_wake_up(case, workers.all[0]):
                        silent.append(rate(case))
    return {
        "commit": statistics.median(waking),
        "commit.silent": statistics.median(silent),
        "commit.share": statistics.median(a / b for a, b in zip(waking, silent, strict=True)),
    }


def rate(case: Case) -> float:
    """Commit for one slice on empty tables; return commits per second, checked against the rows."""
    with case.connect(autocommit=True) as connection:
        connection.execute("TRUNCATE pgqueue.job, business_order")
        connection.execute("CHECKPOINT")
    found = pgbench(case.dsn, SCRIPT, clients=CLIENTS, seconds=SLICE_S)
    orders, jobs = (ask(case.dsn, f"SELECT count(*) FROM {t}") for t in ("business_order", "pgqueue.job"))  # noqa: S608 - constants
    if orders != jobs or not orders:
        raise RunFailed(f"{orders} orders came with {jobs} jobs")
    return found


@contextmanager
def no_wake_up(case: Case, worker: Worker) -> Iterator[None]:
    """Take the trigger away and let the worker stand still: the same rows and indexes, and nothing else.

    One job at a time does not take the way of a bulk, which wakes without the trigger.
    """
    with case.connect(autocommit=True) as connection:
        connection.execute("ALTER TABLE pgqueue.job DISABLE TRIGGER job_wake")
        os.killpg(worker.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(worker.process.pid, signal.SIGCONT)
            connection.execute("ALTER TABLE pgqueue.job ENABLE TRIGGER job_wake")
    paced(0.5)  # the worker catches up and is idle again


WORKLOAD = Workload(
    name="commit",
    text=f"pgbench, {CLIENTS} clients: an order row and a job in one transaction while one idle worker serves another "
    f"queue. In turn with it, in slices of {SLICE_S} s, the same rows without the trigger that looks for idle workers, "
    "the worker stopped. n pairs of slices.",
    quantities=[
        Quantity(what="commit", unit="commits/s", title="business commits beside an idle worker"),
        Quantity(what="commit.silent", unit="commits/s", title="the same without wake-up"),
        Quantity(
            what="commit.share",
            unit="with / without",
            title="commit rate beside an idle worker by the one without",
        ),
    ],
    n=6,
    measure=measure,
    most=8,
)
