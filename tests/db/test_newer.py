"""Without ordering: whatever order versions arrive in, the newest state stands in the end."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from pgqueue import App, Backoff, Job
from pgqueue.testing import drain
from relay import Inbox
from tests.db.relaying import cleared
from tests.factories import wipe
from tests.server import Connection, Server

inbox = Inbox()
app = App()
VERSIONS = range(1, 6)
WHO = {"consumer": "catalogue", "source": "/outbox/shop"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    sku: str
    version: int
    fails: int = 0


@app.job("set-price", transactional=True, backoff=Backoff(base=0.01, cap=0.01))
def set_price(price: Price, job: Job, conn: psycopg.Connection[Any]) -> None:
    fresh = inbox.newer(
        conn, consumer="set-price", source="jobs", aggregate_id=price.sku, version=price.version
    )
    if fresh:
        apply(conn, price.sku, price.version)
    if job.attempt <= price.fails:
        raise RuntimeError("fails after its effect, and before the commit")


def apply(conn: psycopg.Connection[Any], key: str, version: int) -> None:
    """Write an absolute state: what is so now, not what has changed."""
    conn.execute(
        "INSERT INTO public.state VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET version = excluded.version",
        [key, version],
    )


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[str]:
    name = server.migrated()
    dsn = server.dsn(name)
    with psycopg.connect(dsn) as conn:
        conn.execute("CREATE TABLE public.state (key text PRIMARY KEY, version int NOT NULL)")
    yield dsn
    server.drop(name)


@pytest.fixture
def dsn(shared: str) -> str:
    with psycopg.connect(shared) as conn:
        conn.execute("TRUNCATE public.state")
    return wipe(cleared(shared))


def states(conn: Connection) -> set[object]:
    rows = conn.execute("SELECT DISTINCT version FROM public.state").fetchall()
    conn.commit()
    return {row[0] for row in rows}


def test_all_orders_of_five_versions_over_two_connections_end_in_the_newest(
    dsn: str, conn: Connection
) -> None:
    """eugene-khyst/postgresql-event-sourcing#2: a late one overwrote what was newer."""
    orders = list(itertools.permutations(VERSIONS))
    with psycopg.connect(dsn) as one, psycopg.connect(dsn) as two:
        for place in range(len(VERSIONS)):
            for n, order in enumerate(orders):
                handle = (one, two)[(n + place) % 2]
                if inbox.newer(handle, **WHO, aggregate_id=f"sku-{n}", version=order[place]):
                    apply(handle, f"sku-{n}", order[place])
            one.commit()
            two.commit()
    assert states(conn) == {5}
    count = conn.execute("SELECT count(*) FROM public.state").fetchone()
    assert count == (len(orders),)


def test_two_consumers_at_once_leave_the_newest_whoever_commits_last(dsn: str, conn: Connection) -> None:
    begin = threading.Barrier(2)
    keys = [f"sku-{n}" for n in range(60)]

    def consume(seed: int) -> None:
        shuffled = [(key, version) for key in keys for version in VERSIONS]
        random.Random(seed).shuffle(shuffled)
        with psycopg.connect(dsn) as handle:
            begin.wait(60)
            for key, version in shuffled:
                if inbox.newer(handle, **WHO, aggregate_id=key, version=version):
                    apply(handle, key, version)
                handle.commit()

    threads = [threading.Thread(target=consume, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert states(conn) == {5}


def test_a_version_that_rolled_back_was_not_seen(conn: Connection) -> None:
    assert inbox.newer(conn, **WHO, aggregate_id="a", version=5)
    conn.rollback()
    assert inbox.newer(conn, **WHO, aggregate_id="a", version=3)
    assert inbox.newer(conn, **WHO, aggregate_id="a", version=5)
    assert not inbox.newer(conn, **WHO, aggregate_id="a", version=5)


def test_jobs_of_five_versions_in_any_order_end_in_the_newest_though_some_fail_and_run_later(
    dsn: str, conn: Connection
) -> None:
    """A stale job is done without an effect; one that failed has not used its version up."""
    prices = [
        Price(sku=f"sku-{n}", version=v, fails=int((n + v) % 4 == 0)) for n in range(40) for v in VERSIONS
    ]
    random.Random(7).shuffle(prices)
    set_price.enqueue_many(conn, prices)
    conn.commit()
    drain(app, dsn, timeout=100)
    # Retries are delayed by an instant, which drain does not wait for.
    while conn.execute("SELECT FROM pgqueue.job").rowcount:
        conn.execute("UPDATE pgqueue.job SET run_at = clock_timestamp() WHERE run_at IS NOT NULL")
        conn.commit()
        drain(app, dsn, timeout=100)
    assert states(conn) == {5}
    assert conn.execute("SELECT FROM pgqueue.dead_job").rowcount == 0
