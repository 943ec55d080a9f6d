"""Business commits: an order row and a job in one transaction, with and without the wake-up of idle workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from psycopg import sql

from benchmarks.bench import Case, Quantity, Workload, paced
from benchmarks.server import ask, pgbench
from benchmarks.work import RunFailed

CLIENTS = 16
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
    """Commit for n seconds silently, with an idle worker of another queue, silently again."""
    with case.connect(autocommit=True) as connection:
        connection.execute(TABLE)

    def rate() -> float:
        with case.connect(autocommit=True) as connection:
            connection.execute("TRUNCATE pgqueue.job, business_order")
            connection.execute("CHECKPOINT")
        rate = pgbench(case.dsn, SCRIPT, clients=CLIENTS, seconds=n)
        orders = ask(case.dsn, "SELECT count(*) FROM business_order")
        if ask(case.dsn, "SELECT count(*) FROM pgqueue.job") != orders:
            raise RunFailed("orders and jobs differ in number")
        return rate

    before = _silently(case, rate)
    case.fill(1, rest=False)
    with case.workers(1) as workers:
        workers.wait_for(1, 30.0)
        paced(1.0)
        waking = rate()
    after = _silently(case, rate)
    silent = (before + after) / 2
    return {"commit": waking, "commit.silent": silent, "commit.share": waking / silent}


def _silently(case: Case, rate: Callable[[], float]) -> float:
    """Measure with the wake-up switched off for every new session of this database."""
    with case.connect(autocommit=True) as connection:
        connection.execute(
            sql.SQL("ALTER DATABASE {} SET pgqueue.notify = off").format(sql.Identifier(case.database))
        )
    try:
        return rate()
    finally:
        with case.connect(autocommit=True) as connection:
            connection.execute(
                sql.SQL("ALTER DATABASE {} RESET pgqueue.notify").format(sql.Identifier(case.database))
            )


WORKLOAD = Workload(
    name="commit",
    text=f"pgbench, {CLIENTS} clients, n seconds: an order row and a job in one transaction; one idle worker serves "
    "another queue. Before and after it the same rows with the wake-up switched off and no worker.",
    quantities=[
        Quantity(what="commit", unit="commits/s", title="business commits beside an idle worker"),
        Quantity(what="commit.silent", unit="commits/s", title="the same without wake-up"),
        Quantity(
            what="commit.share",
            unit="with / without",
            title="commit rate beside an idle worker by the one without",
        ),
    ],
    n=3,
    measure=measure,
    most=30,
)
