"""Limits under kill -9 and SIGSTOP: never above by live leases, never stuck below."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from pgqueue.connection import execute
from pgqueue.declare import declare
from pgqueue.limits import limit_queue
from tests.process.apps import limited
from tests.process.apps.limited import KEY_LIMIT, LIMIT, QUEUE_LIMIT, app
from tests.server import Connection
from tests.waiting import chaos, eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3000)]
CYCLES = chaos(25, 1000)
KEYS = ("a", "b")
WORKERS = 4
#: Live leases of each limit, in one snapshot.
LIVE = """
SELECT count(*) FILTER (WHERE name = 'narrow'), count(*) FILTER (WHERE key = '@by-key@a'),
       count(*) FILTER (WHERE key = '@by-key@b'), count(*) FILTER (WHERE queue = 'capped')
FROM pgqueue.job WHERE lease <> 0 AND deadline > clock_timestamp()
"""
MOST = (LIMIT, KEY_LIMIT, KEY_LIMIT, QUEUE_LIMIT)
WAITING = """
SELECT count(*) FILTER (WHERE name = 'narrow'), count(*) FILTER (WHERE name = 'by-key'),
       count(*) FILTER (WHERE queue = 'capped') FROM pgqueue.job WHERE lease = 0
"""


class Herd:
    """Workers that are forked, killed, stopped and continued."""

    def __init__(self, dsn: str) -> None:
        self.parent = subprocess.Popen(
            [sys.executable, "-m", "tests.process.apps.limited", dsn],
            cwd=Path(limited.__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.running: list[int] = []
        self.stopped: list[int] = []

    def fork(self) -> None:
        assert self.parent.stdin
        assert self.parent.stdout
        self.parent.stdin.write("\n")
        self.parent.stdin.flush()
        self.running.append(int(self.parent.stdout.readline()))

    def kill(self, rng: random.Random) -> None:
        pid = rng.choice([*self.running, *self.stopped])
        os.kill(pid, signal.SIGKILL)
        (self.running if pid in self.running else self.stopped).remove(pid)

    def stop(self, rng: random.Random) -> None:
        if self.running:
            pid = self.running.pop(rng.randrange(len(self.running)))
            os.kill(pid, signal.SIGSTOP)
            self.stopped.append(pid)

    def resume(self, rng: random.Random) -> None:
        if self.stopped:
            pid = self.stopped.pop(rng.randrange(len(self.stopped)))
            os.kill(pid, signal.SIGCONT)
            self.running.append(pid)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.parent.pid, signal.SIGKILL)  # its own session: nobody else is in this group
        self.parent.communicate(timeout=40)


@pytest.fixture
def herd(dsn: str, conn: Connection) -> Iterator[Herd]:
    execute(conn, declare(kind.policy for kind in app.types.values()))
    execute(conn, limit_queue("capped", limit=QUEUE_LIMIT))
    conn.commit()
    started = Herd(dsn)
    yield started
    started.close()


def fill(conn: Connection) -> None:
    """See to it that more waits of everything than can run."""
    found = conn.execute(WAITING.encode()).fetchone()
    assert found
    narrow, by_key, capped = (int(str(n)) for n in found)
    if narrow < 100:
        app.types["narrow"].enqueue_many(conn, list(range(100)))
    if by_key < 100:
        for key in KEYS:
            app.types["by-key"].using(key=key).enqueue_many(conn, list(range(100)))
    if capped < 100:
        app.types["capped"].enqueue_many(conn, list(range(70)))
        app.types["capped"].using(key="k").enqueue_many(conn, list(range(30)))
    conn.commit()


class Watch:
    """Looks at the live leases all the time."""

    def __init__(self, dsn: str) -> None:
        self.most = [0, 0, 0, 0]
        self.now = [0, 0, 0, 0]
        self.looks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(dsn,))
        self._thread.start()

    def _look(self, dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not self._stop.wait(0.003):
                found = connection.execute(LIVE.encode()).fetchone()
                assert found
                self.now = [int(str(n)) for n in found]
                self.most = [max(pair) for pair in zip(self.most, self.now, strict=True)]
                self.looks += 1

    def expect_all(self, conn: Connection) -> None:
        """Wait until every limit has been reached since this call; enough waits all the time."""
        seen = [0, 0, 0, 0]

        def reached() -> bool:
            fill(conn)
            seen[:] = [max(pair) for pair in zip(seen, self.now, strict=True)]
            return seen == list(MOST)

        try:
            eventually(reached, timeout=60)
        except AssertionError as error:
            raise AssertionError(f"{error}: seen {seen}, now {self.now}") from None

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def test_limits_are_exact_by_live_leases_while_workers_are_killed_and_stopped(
    herd: Herd, conn: Connection, dsn: str
) -> None:
    """solid_queue#761: a limit-1 job ran eleven times at once; dbos#805: a recovered job kept its slot for ever."""
    rng = random.Random(4)
    fill(conn)
    watch = Watch(dsn)
    pace = threading.Event()
    try:
        for _ in range(WORKERS):
            herd.fork()
        watch.expect_all(conn)
        for cycle in range(CYCLES):
            rng.choice([herd.kill, herd.stop, herd.resume, herd.resume])(rng)
            while len(herd.running) + len(herd.stopped) < WORKERS:
                herd.fork()
            pace.wait(rng.random() * 0.3)
            if cycle % 20 == 0:
                fill(conn)
            if (
                cycle % 100 == 99
            ):  # every limit is reached again in the middle of it, with one worker awake for good
                herd.resume(rng)
                watch.expect_all(conn)
            assert all(m <= limit for m, limit in zip(watch.most, MOST, strict=True)), (cycle, watch.most)
        while herd.stopped:
            herd.resume(rng)
        fill(conn)
        watch.expect_all(conn)
        assert tuple(watch.most) == MOST
        assert watch.looks > CYCLES
    finally:
        watch.close()
    conn.execute(
        "DELETE FROM pgqueue.job WHERE lease = 0 AND lost = 0 AND id % 10 <> 0"
    )  # the rest is enough
    conn.commit()

    def nothing_left() -> bool:
        found = conn.execute("SELECT count(*) FROM pgqueue.job").fetchone()
        conn.rollback()
        return found == (0,)

    eventually(nothing_left, timeout=120)
