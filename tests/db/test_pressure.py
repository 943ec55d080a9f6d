"""A queue over its limits refuses jobs without breaking the caller's transaction, and costs the others nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from pgqueue import App, BadOption, JobRef, QueueFull
from pgqueue.connection import execute
from pgqueue.declare import declare
from pgqueue.depth import sample
from pgqueue.pressure import full, limit
from tests.db.test_enqueue_cost import answers
from tests.factories import wipe
from tests.server import Connection, Server

app = App()
PGQUEUE = str(Path(sys.executable).with_name("pgqueue"))


@dataclass
class Receipt:
    order_id: int


@app.job("send-receipt", queue="mail")
def send_receipt(receipt: Receipt) -> None: ...


@app.job("refresh-recommendations", queue="mail", sheddable=True)
def refresh(customer: int) -> None: ...


@app.job("elsewhere", queue="other")
def elsewhere() -> None: ...


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[str]:
    """Give a database for the tests of this file."""
    name = server.migrated()
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def conn(shared: str) -> Iterator[Connection]:
    """Give a connection to it, with the job types declared."""
    wipe(shared)
    with psycopg.connect(shared) as connection:
        connection.execute("SET search_path = ''")
        execute(connection, declare(kind.policy for kind in app.types.values()))
        connection.commit()
        yield connection
        connection.rollback()


def sampled(
    conn: Connection,
    queue: str = "mail",
    *,
    ready: int = 0,
    delayed: int = 0,
    in_flight: int = 0,
    blocked: int = 0,
    oldest: float = 0.0,
    ago: float = 1.0,
) -> None:
    """Write what a worker sampled `ago` seconds ago."""
    conn.execute(
        "INSERT INTO pgqueue.depth_sample VALUES"
        " (%s, clock_timestamp() - make_interval(secs => %s), %s, %s, %s, %s, %s, false)",
        [queue, ago, ready, delayed, in_flight, blocked, oldest],
    )


def count(conn: Connection) -> int:
    found = conn.execute("SELECT count(*) FROM pgqueue.job").fetchone()
    assert found
    return int(str(found[0]))


def test_a_full_queue_refuses_a_job_and_the_transaction_goes_on(conn: Connection) -> None:
    """rails/solid_queue#224: an expected refusal aborted the caller's transaction."""
    execute(conn, limit("mail", max_depth=100))
    sampled(conn, ready=80, blocked=15, in_flight=5, oldest=20)
    conn.execute("CREATE TABLE public.orders (id int)")
    with pytest.raises(QueueFull, match="queue 'mail' is full; try again in 5 s") as caught:
        send_receipt.enqueue(conn, Receipt(order_id=1))
    assert caught.value.queue == "mail"
    assert caught.value.retry_after == timedelta(seconds=5)
    conn.execute("INSERT INTO public.orders VALUES (1)")
    elsewhere.enqueue(conn)
    conn.commit()
    assert count(conn) == 1
    conn.execute("DROP TABLE public.orders")
    conn.commit()


@pytest.mark.parametrize(
    ("limits", "seen", "refused"),
    [
        ({"max_depth": 100}, {"ready": 99}, False),
        ({"max_depth": 100}, {"ready": 100}, True),
        ({"max_depth": 100}, {"blocked": 100}, True),
        ({"max_depth": 100}, {"in_flight": 100}, True),
        ({"max_depth": 100}, {"delayed": 5_000}, False),
        ({"max_depth": 100}, {"ready": 5_000, "ago": 20.0}, True),
        ({"max_depth": 100}, {"ready": 5_000, "ago": 31.0}, False),
        ({"max_age": 60}, {"ready": 5_000, "oldest": 59.0}, False),
        ({"max_age": 60}, {"ready": 1, "oldest": 60.0}, True),
        ({"max_age": timedelta(minutes=1)}, {"ready": 1, "oldest": 61.0}, True),
        ({"max_depth": 100, "max_age": 60}, {"ready": 1, "oldest": 61.0}, True),
        ({"max_depth": 100, "max_age": 60}, {"ready": 101, "oldest": 1.0}, True),
        ({"max_depth": 100, "max_age": 60}, {"ready": 99, "oldest": 59.0}, False),
        ({}, {"ready": 100_000, "oldest": 1e6}, False),
    ],
)
def test_the_sample_decides(
    limits: dict[str, Any], seen: dict[str, Any], refused: bool, conn: Connection
) -> None:
    execute(conn, limit("mail", **limits))
    sampled(conn, **seen)
    if refused:
        with pytest.raises(QueueFull):
            send_receipt.enqueue(conn, Receipt(order_id=1))
    else:
        assert send_receipt.enqueue(conn, Receipt(order_id=1)).created


@pytest.mark.parametrize("bulk", [1, 20])
def test_a_queue_overshoots_its_limit_by_no_more_than_what_comes_between_two_samples(
    conn: Connection, bulk: int
) -> None:
    """The bound of its softness: 60 jobs a second, sampled every five seconds, the workers away."""
    depth, rate, period = 200, 60, 5
    execute(conn, limit("mail", max_depth=depth))
    accepted, refused = 0, False
    for second in range(40):
        conn.execute("UPDATE pgqueue.depth_sample SET at = at - interval '1 s'")  # a second passes
        if second % period == 0:
            execute(conn, sample(["mail"]))
        for _ in range(rate // bulk):
            try:
                send_receipt.enqueue_many(conn, [Receipt(order_id=1)] * bulk)
            except QueueFull:
                refused = True
                assert accepted >= depth  # nobody is refused before the queue is full
            else:
                accepted += bulk
    assert refused
    assert accepted == count(conn) < depth + period * rate
    conn.execute("DELETE FROM pgqueue.job WHERE id % 10 > 0")
    conn.execute("UPDATE pgqueue.depth_sample SET at = at - interval '5 s'")
    execute(conn, sample(["mail"]))
    assert send_receipt.enqueue(conn, Receipt(order_id=1)).created


def test_a_queue_that_nobody_sampled_takes_jobs(conn: Connection) -> None:
    execute(conn, limit("mail", max_depth=1))
    send_receipt.enqueue_many(conn, [Receipt(order_id=n) for n in range(3)])
    assert execute(conn, full("mail")) is None


def test_the_sample_of_a_worker_is_what_decides(conn: Connection) -> None:
    send_receipt.enqueue_many(conn, [Receipt(order_id=n) for n in range(20)])
    execute(conn, limit("mail", max_depth=20))
    execute(conn, sample(["mail"]))
    with pytest.raises(QueueFull):
        send_receipt.enqueue(conn, Receipt(order_id=20))
    assert execute(conn, full("mail")) == 5


@pytest.mark.parametrize(
    ("limits", "seen", "seconds"),
    [
        (
            {"max_depth": 100},
            {"ready": 200, "oldest": 40.0},
            20,
        ),  # half of it has to go, which takes half its age
        ({"max_depth": 100}, {"ready": 101, "oldest": 40.0}, 5),
        ({"max_depth": 100}, {"ready": 10_000, "oldest": 3_600.0}, 60),
        ({"max_age": 60}, {"ready": 1, "oldest": 90.0}, 30),
    ],
)
def test_the_wait_that_is_suggested_follows_from_depth_and_age(
    limits: dict[str, Any], seen: dict[str, Any], seconds: int, conn: Connection
) -> None:
    execute(conn, limit("mail", **limits))
    sampled(conn, **seen)
    assert execute(conn, full("mail")) == seconds


def test_the_queue_that_counts_is_the_one_the_job_goes_to(conn: Connection) -> None:
    execute(conn, limit("mail", max_depth=1))
    sampled(conn, ready=9)
    assert send_receipt.using(queue="other").enqueue(conn, Receipt(order_id=1)).created
    with pytest.raises(QueueFull, match="queue 'mail'"):
        elsewhere.using(queue="mail").enqueue(conn)
    with pytest.raises(QueueFull, match="queue 'mail'"):
        App().enqueue(conn, "send-receipt", {"order_id": 1})


def test_a_bulk_is_refused_as_a_whole(conn: Connection) -> None:
    execute(conn, limit("mail", max_depth=1))
    sampled(conn, ready=9)
    with pytest.raises(QueueFull):
        send_receipt.enqueue_many(conn, [Receipt(order_id=n) for n in range(100)])
    with pytest.raises(QueueFull):
        send_receipt.using(dedup_key="k").enqueue(conn, Receipt(order_id=1))
    assert send_receipt.enqueue_many(conn, []) == []
    assert count(conn) == 0


@pytest.mark.parametrize("window", [timedelta(hours=1), "live"])
def test_a_full_queue_answers_a_taken_dedup_key_which_adds_no_job(conn: Connection, window: Any) -> None:
    """Once and in bulk alike; where a key is free, the call is refused as a whole."""
    once = send_receipt.using(dedup_key=lambda receipt: f"k{receipt.order_id}", dedup_window=window)
    made = once.enqueue_many(conn, [Receipt(order_id=n) for n in range(2)])
    execute(conn, limit("mail", max_depth=1))
    sampled(conn, ready=9)
    assert once.enqueue(conn, Receipt(order_id=1)) == JobRef(made[1].id)
    again = once.enqueue_many(conn, [Receipt(order_id=n) for n in (1, 0, 1)])
    assert again == [JobRef(made[n].id) for n in (1, 0, 1)]
    assert once.using(dedup_mode="replace").enqueue(conn, Receipt(order_id=1)).changed
    with pytest.raises(QueueFull):
        once.enqueue(conn, Receipt(order_id=2))
    with pytest.raises(QueueFull):
        once.enqueue_many(conn, [Receipt(order_id=n) for n in range(3)])
    found = conn.execute("SELECT pgqueue.enqueue('send-receipt', dedup_key => 'k1')").fetchone()
    assert found == (made[1].id,)
    conn.execute("DELETE FROM pgqueue.job")
    conn.execute("UPDATE pgqueue.dedup SET until = clock_timestamp() WHERE until IS NOT NULL")
    with pytest.raises(QueueFull):
        once.enqueue(conn, Receipt(order_id=1))
    assert count(conn) == 0


def test_of_a_sheddable_bulk_only_jobs_whose_dedup_key_is_free_are_shed(conn: Connection) -> None:
    once = refresh.using(dedup_key=lambda customer: f"k{customer}")
    kept = once.enqueue(conn, 1)
    execute(conn, limit("mail", max_depth=1))
    sampled(conn, ready=9)
    assert once.enqueue(conn, 1) == JobRef(kept.id)
    assert once.enqueue(conn, 2).shed
    assert once.enqueue_many(conn, [2, 1, 3]) == [JobRef(0), JobRef(kept.id), JobRef(0)]
    counted = conn.execute("SELECT sum(n) FROM pgqueue.tally WHERE outcome = 'shed'").fetchone()
    assert counted == (3,)
    assert count(conn) == 1
    assert conn.execute("SELECT key FROM pgqueue.dedup").fetchall() == [("k1",)]


def test_a_sheddable_job_is_dropped_and_counted(conn: Connection) -> None:
    execute(conn, limit("mail", max_depth=1))
    assert not refresh.enqueue(conn, 1).shed
    sampled(conn, ready=9)
    refs = refresh.enqueue_many(conn, [2, 3, 4])
    assert [(ref.id, ref.created, ref.shed) for ref in refs] == [(0, False, True)] * 3
    assert count(conn) == 1
    assert conn.execute("SELECT queue, name, outcome, n FROM pgqueue.tally").fetchall() == [
        ("mail", "refresh-recommendations", "shed", 3)
    ]


def test_what_was_shed_in_a_transaction_that_rolled_back_is_not_counted(conn: Connection) -> None:
    execute(conn, limit("mail", max_depth=1))
    sampled(conn, ready=9)
    conn.commit()
    refresh.enqueue(conn, 1)
    conn.rollback()
    assert conn.execute("SELECT count(*) FROM pgqueue.tally").fetchone() == (0,)


def test_sql_producers_get_an_error_of_their_own(conn: Connection) -> None:
    execute(conn, limit("mail", max_depth=1))
    sampled(conn, ready=9)
    with (
        pytest.raises(
            psycopg.errors.ConfigurationLimitExceeded, match="queue mail is full; try again in 5 s"
        ),
        conn.transaction(),
    ):
        conn.execute("SELECT pgqueue.enqueue('send-receipt', '{\"order_id\": 1}')")
    assert conn.execute("SELECT pgqueue.enqueue('refresh-recommendations', '1')").fetchone() == (0,)
    found = conn.execute(
        "SELECT id, created FROM pgqueue.enqueue_many('send-receipt', '[1, 2]', when_full => 'tell')"
    ).fetchall()
    assert found == [(-5, False)]
    kept = conn.execute(
        "SELECT count(*) FROM pgqueue.enqueue_many('send-receipt', '[1, 2]', when_full => 'ignore')"
    )
    assert kept.fetchone() == (2,)


def test_every_kind_of_handle_learns_it_without_an_error_of_the_database(
    shared: str, conn: Connection
) -> None:
    execute(conn, limit("mail", max_depth=1))
    sampled(conn, ready=9)
    conn.commit()
    engine = create_engine(shared.replace("postgresql://", "postgresql+psycopg://", 1))
    with Session(engine) as session, session.begin():
        with pytest.raises(QueueFull):
            send_receipt.enqueue(session, Receipt(order_id=1))
        assert session.execute(text("SELECT 1")).scalar() == 1
    engine.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_asynchronous_handles_too(driver: str, shared: str, conn: Connection) -> None:
    execute(conn, limit("mail", max_depth=1))
    sampled(conn, ready=9)
    conn.commit()

    async def refuse() -> None:
        engine = create_async_engine(shared.replace("postgresql://", f"postgresql+{driver}://", 1))
        async with AsyncSession(engine) as session, session.begin():
            with pytest.raises(QueueFull):
                await send_receipt.aenqueue(session, Receipt(order_id=1))
            assert (await session.execute(text("SELECT 1"))).scalar() == 1
        await engine.dispose()

    asyncio.run(refuse())


# What it costs.


def touched(conn: Connection, queue: str) -> int:
    """Count the buffers that an enqueue into a queue touches, on a warm connection."""
    for _ in range(8):  # past the custom plans
        conn.execute("SELECT pgqueue.enqueue('send-receipt', '1', queue => %s)", [queue])

    def look() -> int:
        found = conn.execute(
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT pgqueue.enqueue('send-receipt', '1', queue => %s)",
            [queue],
        ).fetchone()
        assert found
        plan: dict[str, Any] = found[0][0]["Plan"]  # type: ignore[index]
        return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])

    return min(look() for _ in range(3))  # autovacuum may have the plans made anew at any moment


def test_a_limit_costs_a_few_buffers_where_it_is_set_and_nothing_elsewhere(conn: Connection) -> None:
    free = touched(conn, "free")
    execute(conn, limit("mail", max_depth=1_000))
    sampled(conn, ready=9)
    conn.execute("ANALYZE pgqueue.queue, pgqueue.depth_sample")
    assert abs(touched(conn, "free") - free) <= 1
    assert touched(conn, "mail") - free <= 6


@pytest.mark.parametrize("limited", [False, True])
def test_an_enqueue_stays_one_round_trip(limited: bool, conn: Connection) -> None:
    if limited:
        execute(conn, limit("mail", max_depth=1_000))
    conn.execute("SELECT 1")
    assert answers(conn, lambda: send_receipt.enqueue(conn, Receipt(order_id=1))) == 1


# Setting limits.


def test_a_limit_is_set_changed_and_lifted_alone(conn: Connection) -> None:
    assert execute(conn, limit("mail", max_depth=10)) == (10, None)
    assert execute(conn, limit("mail", max_age=60)) == (10, 60.0)
    assert execute(conn, limit("mail", max_depth=0)) == (None, 60.0)
    assert execute(conn, limit("mail", max_depth=5, max_age=0)) == (5, None)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"max_depth": -1}, "max_depth: -1 is not a whole number from 0 to 100000"),
        ({"max_depth": 100_001}, "the sample counts no further; limit the age instead"),
        ({"max_depth": 1.5}, "1.5 is not a whole number"),
        ({"max_age": -1}, "max_age: -1 is not between 0 s and a year"),
        ({"max_age": float("nan")}, "nan is not between"),
        ({"max_age": timedelta(days=400)}, "is not between"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(limits: dict[str, Any], says: str) -> None:
    with pytest.raises(BadOption, match=says):
        limit("mail", **limits)


def test_limits_are_set_from_the_command_line(shared: str, conn: Connection) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PGQUEUE, "queue", "set", *arguments], env=os.environ | {"PGQUEUE_DSN": shared}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip

    conn.commit()
    assert (
        run("mail", "--max-depth", "500", "--max-age", "5m").stdout
        == "queue mail: max depth 500, max age 300 s\n"
    )
    assert run("mail", "--max-depth", "0").stdout == "queue mail: max depth none, max age 300 s\n"
    assert run("mail").stderr == "error: queue set: give --max-depth, --max-age or --age-after\n"
    assert "limit the age instead" in run("mail", "--max-depth", "1000000").stderr
