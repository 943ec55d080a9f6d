"""Ordering keys under everything at once: late commits, rollbacks, crashes, expiries, retries, several workers.

Workers are threads with short leases that forget what they hold now and then. A history of what committed, was
handed out and was acknowledged is checked afterwards; a control shows that the check sees a violation.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import psycopg
import pytest

from pgqueue.finish import Failed, ack, bury, release, retry
from pgqueue.job import Claimed
from pgqueue.lanes import LaneSize, lane_claim, lane_jobs, lane_release, lane_take, route
from pgqueue.pipeline import Pipeline
from pgqueue.promote import promote
from pgqueue.pulse import LONG_AGO
from tests.factories import Connection, Holder, buried, enqueue, retried, scope, token
from tests.waiting import chaos, eventually

QUEUES = ("default", "mail")
KEYS = ("hot", "hot", "hot", "a", "b", "c", "d", "e")
LEASE = timedelta(milliseconds=60)
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
SECONDS = float(chaos(6, 60))


class HandOut(NamedTuple):
    """A claim: when it was sent, when its answer had come, when its end was sent."""

    lease: int
    sent: float
    got: float
    finishing: float


@dataclass(slots=True)
class History:
    """What happened. Times are of one monotonic clock; sets and lists are only added to."""

    lane_of: dict[int, tuple[str, str]] = field(default_factory=dict)
    #: When a job could be seen by every claim, and not before it was enqueued as ready.
    visible: dict[int, float] = field(default_factory=dict)
    delayed: set[int] = field(default_factory=set)
    acked: list[int] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    #: The claim under which each job was acknowledged or buried.
    ended: dict[int, HandOut] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def inversions(self) -> list[tuple[int, int]]:
        """Return (older, younger): the younger was handed out though the older was there and had not ended.

        Times of statements are not known, only of their sending and their answers, so the check takes the ends of
        those spans that are on the safe side.
        """
        found = []
        by_lane: dict[tuple[str, str], list[int]] = defaultdict(list)
        for job_id in self.ended:
            by_lane[self.lane_of[job_id]].append(job_id)
        for members in by_lane.values():
            for younger in members:
                mine = self.ended[younger]
                found += [
                    (older, younger)
                    for older in members
                    if older < younger
                    and older not in self.delayed
                    and self.visible[older] < mine.sent
                    and self.ended[older].lease != mine.lease
                    and self.ended[older].finishing > mine.got
                ]
        return found


def produce(dsn: str, history: History, seed: int, stop: threading.Event, lock: threading.Lock) -> None:
    """Enqueue: often late, at times rolled back, at times delayed."""
    rng = random.Random(seed)
    with psycopg.connect(dsn) as connection:
        while not stop.is_set():
            made: dict[int, tuple[str, str]] = {}
            delayed: set[int] = set()
            for _ in range(rng.randrange(1, 6)):
                queue, key = rng.choice(QUEUES), rng.choice(KEYS)
                delay = timedelta(milliseconds=rng.randrange(200)) if rng.random() < 0.08 else None
                (job_id,) = enqueue(
                    connection, queue=queue, key=key, delay=delay, priority=rng.choice([5, 5, 5, 1])
                )
                made[job_id] = (queue, key)
                if delay:
                    delayed.add(job_id)
            if rng.random() < 0.3:
                stop.wait(rng.random() * 0.05)
            if rng.random() < 0.1:
                connection.rollback()
                continue
            connection.commit()
            now = time.monotonic()
            with lock:
                history.lane_of.update(made)
                history.delayed |= delayed
                history.visible.update(dict.fromkeys(made, now))
            stop.wait(rng.random() * 0.01)


class Crew:
    """One worker: rounds of route, ack, claim of lanes, release; it oversleeps, forgets and fails at times."""

    def __init__(self, holder: Holder, history: History, seed: int, lock: threading.Lock) -> None:
        self.holder = holder
        self.history = history
        self.rng = random.Random(seed)
        self.lock = lock
        self.of = scope(queues=QUEUES, priorities=range(10))
        self.calm = False

    def round(self) -> int:
        """Take lanes, run what they hold, write it; return how many jobs came."""
        rng, holder = self.rng, self.holder
        sent = time.monotonic()
        lease = holder.leases.new()
        size = LaneSize(lanes=rng.choice([1, 3, 8]), depth=rng.choice([1, 2, 5]), total=20)
        with Pipeline(holder.connection) as p:
            p.begin()
            p.send(route(dict.fromkeys(QUEUES, 0)))
            p.commit()
            p.begin()
            p.send(promote(LONG_AGO, timedelta(0)))
            p.commit()
            p.begin()
            floors = [0] * len(self.of.queues)
            if rng.random() < 0.5:  # as in a backlog; what only the other form can do waits for it
                p.send(lane_take(self.of, floors, size.lanes, lease, LEASE))
                taken = p.send(lane_jobs(self.of, size, lease, LEASE))
            else:
                taken = p.send(lane_claim(self.of, floors, size, lease, LEASE))
            p.run("ROLLBACK") if not self.calm and rng.random() < 0.05 else p.commit()
        if holder.connection.info.transaction_status.value:
            raise AssertionError("the round left its transaction open")
        jobs = taken.result()
        got = time.monotonic()
        fate = rng.random() if not self.calm else 1.0
        if fate < 0.03:
            return len(jobs)  # the process died: nobody gives anything back
        if fate < 0.15:
            time.sleep(0.09)  # it stalled past its lease, and goes on as if nothing had been
        lanes: dict[tuple[str, str], list[Claimed]] = defaultdict(list)
        for job in sorted(jobs, key=lambda job: job.id):
            lanes[self.of.queues[job.level - 1], job.key or ""].append(job)
        for lane, held in lanes.items():
            self.finish(lane, held, HandOut(lease, sent, got, time.monotonic()))
        return len(jobs)

    def finish(self, lane: tuple[str, str], held: list[Claimed], hand_out: HandOut) -> None:
        """Write the results of one lane in one transaction; a failed head ends the lane's turn."""
        rng, holder = self.rng, self.holder
        done, dead, wait = list(held), [], 0.0
        failed: list[Claimed] = []
        if not self.calm and rng.random() < 0.05:
            failed, done, wait = done[:1], [], 0.02
        elif not self.calm and rng.random() < 0.03:
            dead, done = done[:1], []
        rest = held[len(done) + len(dead) + len(failed) :]
        with Pipeline(holder.connection) as p:
            p.begin()
            acked = p.send(ack(done))
            buried_ = p.send(bury([Failed(claim=token(job), outcome=buried()) for job in dead], "w"))
            p.send(release(rest))
            p.send(retry([Failed(claim=token(job), outcome=retried(wait)) for job in failed], "w"))
            p.send(lane_release([lane], hand_out.lease, wait))
            p.commit()
        mine = acked.result()
        ours = [job.id for job in done] if mine is None else mine
        with self.lock:
            self.history.acked += ours
            self.history.dead += buried_.result()
            self.history.ended.update(dict.fromkeys([*ours, *buried_.result()], hand_out))


def work(crew: Crew, stop: threading.Event) -> None:
    """Do rounds until told to stop; an error is kept for the test."""
    try:
        while not stop.is_set():
            if not crew.round():
                stop.wait(0.002)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test fails with it
        crew.history.errors.append(f"{type(error).__name__}: {error}")


def count(connection: Connection, table: str) -> int:
    found = connection.execute(f"SELECT count(*) FROM pgqueue.{table}").fetchone()
    connection.commit()
    assert found
    return int(found[0])


def play(dsn: str, seconds: float) -> History:
    """Produce and work for so long, and until something has happened; then work in peace until nothing is left."""
    history, lock = History(), threading.Lock()
    stop_producing, stop = threading.Event(), threading.Event()
    holders = [Holder(dsn, nonce) for nonce in range(1, 6)]
    crews = [Crew(holder, history, seed, lock) for seed, holder in enumerate(holders)]
    producers = [
        threading.Thread(target=produce, args=(dsn, history, 100 + n, stop_producing, lock)) for n in range(3)
    ]
    workers = [threading.Thread(target=work, args=(crew, stop)) for crew in crews]
    try:
        for thread in producers + workers:
            thread.start()
        stop_producing.wait(seconds)
        eventually(lambda: history.errors or len(history.acked) > 500)
        stop_producing.set()
        for thread in producers:
            thread.join(60)
        for crew in crews:
            crew.calm = True
        with psycopg.connect(dsn) as connection:
            eventually(lambda: history.errors or count(connection, "job") == 0, 30.0)
            eventually(lambda: history.errors or count(connection, "lane") == 0, 10.0)
    finally:
        stop_producing.set()
        stop.set()
        for thread in workers:
            thread.join(60)
        for holder in holders:
            holder.connection.close()
    assert history.errors == []
    return history


def test_keys_keep_their_order_and_no_job_is_lost_or_done_twice(dsn: str) -> None:
    history = play(dsn, SECONDS)
    with psycopg.connect(dsn) as connection:
        deadlocks = connection.execute(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
        assert deadlocks == (0,)
        assert count(connection, "dead_job") == len(history.dead)
    done = history.acked
    assert len(done) == len(set(done)), "a job was acknowledged twice"
    assert set(done).isdisjoint(history.dead)
    assert set(done) | set(history.dead) == set(history.visible), "a job was lost, or one came from nowhere"
    assert history.inversions() == []


def test_lanes_read_from_their_youngest_job_break_the_order(dsn: str) -> None:
    """The control: the same play with one word of the claim changed."""
    with psycopg.connect(dsn) as connection:
        found = connection.execute(
            "SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.oid::regproc = 'pgqueue.lane_claim'::regproc"
        ).fetchone()
        assert found
        ordered = found[0].replace("ORDER BY j0.id LIMIT", "ORDER BY j0.id DESC LIMIT")
        assert ordered != found[0]
        connection.execute(ordered.encode())
    assert play(dsn, 1.5).inversions() != []


def test_the_check_sees_a_younger_job_that_went_ahead() -> None:
    """The control: a history with one violation."""
    history = History()
    history.lane_of = {1: ("q", "k"), 2: ("q", "k"), 3: ("q", "l")}
    history.visible = {1: 0.0, 2: 0.1, 3: 0.2}
    history.ended = {
        1: HandOut(11, sent=1.2, got=1.25, finishing=1.3),
        2: HandOut(12, sent=1.0, got=1.05, finishing=1.1),
        3: HandOut(13, sent=0.5, got=0.55, finishing=0.6),
    }
    assert history.inversions() == [(1, 2)]
    history.visible[1] = 1.05  # it was not there yet when the younger was claimed
    assert history.inversions() == []
    history.visible[1] = 0.0
    history.ended[2] = HandOut(
        12, sent=1.25, got=1.35, finishing=1.4
    )  # claimed after the older one had ended
    assert history.inversions() == []
