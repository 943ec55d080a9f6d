"""Eight connections cancel, acknowledge, fail, extend, take over and claim the same rows: nothing deadlocks."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pgqueue.cancel import cancel
from pgqueue.finish import Failed, ack, bury, drop, release, retry, snooze
from pgqueue.heartbeat import heartbeat, lane_heartbeat
from pgqueue.job import Claim, Claimed
from pgqueue.promote import promote
from pgqueue.pulse import LONG_AGO
from pgqueue.statement import Statement
from tests.factories import QUEUE, Connection, Holder, buried, enqueue, retried, token
from tests.waiting import chaos, eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
SECONDS = float(chaos(4, 60))
SHORT = timedelta(milliseconds=20)


class Hand:
    """The claims that all connections share: each works on anybody's, in any order."""

    def __init__(self) -> None:
        self.claims: list[Claimed] = []

    def some(self, rng: random.Random) -> list[Claimed]:
        recent = self.claims[-200:]
        picked = rng.sample(recent, min(len(recent), 40))
        rng.shuffle(picked)
        return picked


def statements(held: list[Claimed]) -> dict[str, Callable[[], Statement[Any]]]:
    """Return what may be done with these claims; acknowledgements come in id order, as a worker sends them."""
    ordered = sorted(held, key=lambda job: job.id)
    failed = [Failed(claim=token(job), outcome=retried(0.0)) for job in held]
    dead = [Failed(claim=token(job), outcome=buried()) for job in held[:5]]
    lanes = [(QUEUE, job.key, job.lease) for job in held if job.key is not None]
    return {
        "ack": lambda: ack(ordered),
        "ack_skip": lambda: ack(held, skip=True),
        "retry": lambda: retry(failed, "w"),
        "bury": lambda: bury(dead, "w"),
        "snooze": lambda: snooze(held, [0.0] * len(held)),
        "release": lambda: release(held),
        "drop": lambda: drop(held[:5]),
        "heartbeat": lambda: heartbeat([Claim(job.id, job.lease) for job in held], timedelta(seconds=30)),
        "lane_heartbeat": lambda: lane_heartbeat(lanes, SHORT),
        "cancel": lambda: cancel([job.id for job in held[:10]]),
        "promote": lambda: promote(LONG_AGO, timedelta(0)),
    }


def hammer(holder: Holder, hand: Hand, seed: int, stop: threading.Event, trouble: list[str]) -> None:
    """Do random things to random claims, at times several in one transaction."""
    rng = random.Random(seed)
    with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
        holder.connection.execute("SET deadlock_timeout = '10ms'")  # detect before the lock timeout undoes
    while not stop.is_set():
        try:
            holder.begin()
            holder.connection.execute("SET LOCAL lock_timeout = '250ms'")
            held = hand.some(rng)
            # As in a round: the acknowledgement, which alone waits for locks, comes first.
            for name in sorted(rng.sample(sorted(statements(held)), 2), key=lambda name: name != "ack"):
                if held:
                    holder.run(statements(held)[name]())
            taken = holder.claim(30, visibility=SHORT)
            taken += holder.lanes(5, depth=3, visibility=SHORT, routing=False)
            if rng.random() < 0.1:
                holder.rollback()
            else:
                holder.commit()
                hand.claims += taken
            hand.claims += holder.suspects(8)
            holder.route()
        except psycopg.errors.LockNotAvailable:
            holder.rollback()
        except psycopg.Error as error:
            trouble.append(f"{type(error).__name__}: {error}")
            return


def produce(dsn: str, stop: threading.Event) -> None:
    with psycopg.connect(dsn) as connection:
        while not stop.is_set():
            enqueue(connection, 20)
            for key in "abc":
                enqueue(connection, 3, key=key)
            connection.commit()
            stop.wait(0.02)


def deadlocks(connection: Connection) -> int:
    found = connection.execute(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    ).fetchone()
    assert found
    return int(found[0])


def test_a_hammer_of_eight_connections_on_the_same_rows_makes_no_deadlock(dsn: str, conn: Connection) -> None:
    hand, stop, trouble = Hand(), threading.Event(), list[str]()
    holders = [Holder(dsn, nonce) for nonce in range(1, 9)]
    threads = [
        threading.Thread(target=hammer, args=(holder, hand, seed, stop, trouble))
        for seed, holder in enumerate(holders)
    ]
    threads.append(threading.Thread(target=produce, args=(dsn, stop)))
    try:
        for thread in threads:
            thread.start()
        stop.wait(SECONDS)
        eventually(lambda: trouble or len(hand.claims) > 200)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
        for holder in holders:
            holder.connection.close()
    assert trouble == []
    assert deadlocks(conn) == 0


def test_the_count_of_deadlocks_sees_one(dsn: str, conn: Connection) -> None:
    """The control: two transactions that lock two rows in opposite order."""
    first, second = enqueue(conn, 2)
    conn.commit()
    lock = "UPDATE pgqueue.job SET headers = '{}' WHERE id = %s"
    failed: list[BaseException] = []
    with psycopg.connect(dsn) as a, psycopg.connect(dsn) as b:
        a.execute(lock, [first])
        b.execute(lock, [second])

        def cross() -> None:
            try:
                a.execute(lock, [second])
            except psycopg.errors.DeadlockDetected as error:
                failed.append(error)
                a.rollback()

        thread = threading.Thread(target=cross)
        thread.start()
        try:
            b.execute(lock, [first])
        except psycopg.errors.DeadlockDetected as error:
            failed.append(error)
            b.rollback()
        thread.join(60)
        for connection in (a, b):
            connection.rollback()
            connection.execute("SELECT pg_stat_force_next_flush()")
            connection.commit()
    assert len(failed) == 1
    assert deadlocks(conn) == 1
