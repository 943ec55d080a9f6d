"""Relay processes that append what they publish to one file, and producers that keep the rules."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psycopg

from relay import Outbox
from relay.event import CONFIRMED, Event, Receipt
from relay.sinks import Sink, SinkUnavailable
from tests.server import Connection
from tests.waiting import eventually

HERE = Path(__file__).resolve()

outbox = Outbox()


class FileSink:
    """Appends a line per event; one write each call, so the file's order is the order of publishing."""

    name = "file"
    ordered = False
    marks = False

    def __init__(self, path: str, *, moody: bool = False) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._moody = moody

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Append the events; a moody sink is away every other second."""
        if self._moody and int(time.monotonic()) % 2:
            raise SinkUnavailable(self.name, "away")
        os.write(self._file, "".join(f"{event.key} {event.id}\n" for event in events).encode())
        time.sleep(0.001)  # a round trip, in which a signal may come
        return [CONFIRMED] * len(events)

    def close(self) -> None:
        """Keep the file."""


class RelayProcess:
    """One relay in a process of its own; a routed one has a second sink, which comes and goes.

    `skew` is by how many seconds its clock goes wrong, `sink` the URL of a broker to publish to instead of the file.
    A `lease` of a second runs out when the machine stalls; where it must not, a test gives a longer one.
    """

    def __init__(
        self,
        dsn: str,
        log: Path,
        name: str,
        *,
        routed: bool = False,
        skew: float = 0.0,
        sink: str = "",
        lease: float = 1.0,
    ) -> None:
        given = {"dsn": dsn, "name": name, "log": str(log), "routed": routed, "skew": skew, "sink": sink}
        options = json.dumps(given | {"lease": lease})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.relaying", options], cwd=HERE.parents[2]
        )

    def stall(self) -> None:
        """Stop it where it is."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> int:
        """Ask it to stop; return its exit status."""
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        return self.process.wait(60)


def repartition(watch: Connection, count: int) -> None:
    """Change the number of partitions; a relay that was stopped inside a transaction loses its connection."""

    def done() -> bool:
        try:
            watch.execute("SELECT pgqueue.outbox_repartition(%s)", [count])
        except psycopg.errors.LockNotAvailable:
            watch.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_catalog.pg_stat_activity"
                " WHERE datname = current_database() AND application_name ~ ' (publish|upkeep)$'"
            )
            return False
        return True

    eventually(done, 60)


def published(log: Path) -> list[tuple[str, int]]:
    """Return what was published, in order, repetitions included."""
    if not log.exists():
        return []
    rows = (line.split() for line in log.read_text().splitlines())
    return [(key, int(id_)) for key, id_ in rows]


class Producers:
    """Threads that write events: the aggregate's row is locked first, some commit late, some roll back."""

    def __init__(self, dsn: str, *, threads: int = 4, aggregates: int = 60) -> None:
        self.dsn = dsn
        self.aggregates = aggregates
        self.committed: list[int] = []
        self.rolled_back: list[int] = []
        self._over = threading.Event()
        with psycopg.connect(dsn) as conn:
            conn.execute("CREATE TABLE public.aggregate (id text PRIMARY KEY)")
            conn.execute(
                "INSERT INTO public.aggregate SELECT i::text FROM generate_series(0, %s) i", [aggregates]
            )
        self._threads = [threading.Thread(target=self._produce, args=[seed]) for seed in range(threads)]

    def start(self) -> None:
        """Begin to write."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End when the open transactions have ended."""
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _produce(self, seed: int) -> None:
        chance = random.Random(seed)
        conn: Connection | None = None
        while not self._over.is_set():
            ids: list[int] = []
            try:
                if conn is None:
                    conn = psycopg.connect(self.dsn)
                self._write(conn, chance, ids)
                if chance.random() < 0.1:
                    conn.rollback()
                    self.rolled_back += ids
                else:
                    conn.commit()
                    self.committed += ids
            except psycopg.OperationalError:
                # The server went away: whether the last commit happened, the table tells.
                if conn is not None:
                    conn.close()
                conn = None
                self._over.wait(0.1)
            self._over.wait(0.002)
        if conn is not None:
            conn.close()

    def _write(self, conn: Connection, chance: random.Random, ids: list[int]) -> None:
        chosen = sorted(
            {str(int(self.aggregates * chance.random() ** 3)) for _ in range(chance.randint(1, 3))}
        )
        for aggregate in chosen:
            conn.execute("SELECT 1 FROM public.aggregate WHERE id = %s FOR UPDATE", [aggregate])
            kind = chance.choice(("e", "e", "odd"))
            ids.append(outbox.add(conn, kind, {"n": 1}, aggregate_id=aggregate))
        dice = chance.random()
        if dice < 0.05:
            self._over.wait(chance.random() * 0.06)
        elif dice < 0.053:
            self._over.wait(1.5)


def main() -> None:
    """Run one relay until SIGTERM."""
    given = json.loads(sys.argv[1])
    if skew := given["skew"]:
        right, right_ns = time.time, time.time_ns
        time.time = lambda: right() + skew
        time.time_ns = lambda: right_ns() + int(skew * 1e9)
    from relay.config import RelayConfig
    from relay.routes import Routes
    from relay.service import Relay
    from relay.sinks import SinkContext, open_sink

    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    config = RelayConfig(
        dsn=given["dsn"],
        name=given["name"],
        source="/s",
        lease=given["lease"],
        send_timeout=1.0,
        batch=50,
        pause=0,
    )
    context = SinkContext(
        source="/s",
        send_timeout=2.0,
        allow_private=True,
        dsn=given["dsn"],
        subscribers=lambda kind: [f"on {kind}"],
    )
    sinks: dict[str, Sink] = {
        "*": open_sink(given["sink"], context) if given["sink"] else FileSink(given["log"])
    }
    if given["routed"]:
        sinks["odd"] = FileSink(given["log"], moody=True)
    relay = Relay(config, Routes(sinks))
    relay.start()
    while not told.wait(1.0):
        if os.getppid() == 1:  # the test is gone
            os._exit(1)
    os._exit(0 if relay.stop(40) else 1)


if __name__ == "__main__":
    main()
