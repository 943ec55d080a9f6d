"""This queue: `pgqueue-worker` with its defaults, handlers with a typed payload."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.program import QUEUE, Program, main, payload, setting
from benchmarks.system import Python, System

SYSTEM = System(
    name="ours",
    title="pgqueue",
    language="Python",
    install=Python(),
    settings={
        "worker": "pgqueue-worker with its defaults: concurrency 8, prefetch by duration, visibility 30 s",
        "I/O": "concurrency 500, `async def` handler",
        "payload": "msgspec Struct, decoded and checked for every job",
        "bulk": "enqueue_many, 1,000 jobs a call and a transaction",
        "relay": "outbox-relay and sinks with their defaults; published events are kept",
        "driver": "psycopg with its C part; standard event loop",
    },
    left="SELECT EXISTS (SELECT FROM pgqueue.job)",
    count_left="SELECT count(*) FROM pgqueue.job",
    modes=frozenset({"drain", "large", "async", "io", "latency", "bulk", "snapshot", "relay"}),
    versions=("pgqueue-relay", "psycopg", "msgspec"),
    most=5_000_000,
)

APPS = {"async": "tasks", "io": "sleepers", "mixed": "mixed"}
IO_CONCURRENCY = 500
#: The key that has many jobs.
HOT = "hot"


def even_key(number: int, keys: int) -> str:
    """Return the key of a job where all keys have as many."""
    return f"key-{number % keys}"


def hot_key(number: int, keys: int) -> str:
    """Return the key of a job where one key has two of five jobs, and so many others share the rest."""
    turn, place = divmod(number, 5)
    return HOT if place < 2 else f"key-{(3 * turn + place - 2) % keys}"


class Ours(Program):
    """Enqueue with psycopg, work with the command that users run."""

    def setup(self) -> None:
        import psycopg

        from benchmarks.systems import jobs
        from pgqueue import migrate
        from pgqueue.connection import execute
        from pgqueue.declare import declare

        migrate.upgrade(setting("DSN"))
        with psycopg.connect(setting("DSN")) as connection:
            execute(connection, declare([jobs.bench.policy]))

    def open(self) -> Any:
        import psycopg

        return psycopg.connect(setting("DSN"), prepare_threshold=0)

    def many(self, handle: Any, payloads: list[dict[str, Any]]) -> None:
        from benchmarks.systems import jobs

        prepared: Any = jobs.bench.using(queue=setting("QUEUE", QUEUE))
        if setting("KEYS"):
            name = hot_key if setting("HOT") else even_key
            keys = int(setting("KEYS"))
            prepared = jobs.bench.using(key=lambda payload: name(payload.n, keys))
        prepared.enqueue_many(handle, [jobs.Payload(**payload) for payload in payloads])
        handle.commit()

    def one(self, handle: Any, payload: dict[str, Any]) -> None:
        from benchmarks.systems import jobs

        jobs.bench.using(queue=setting("QUEUE", QUEUE)).enqueue(handle, jobs.Payload(**payload))
        handle.commit()

    def work(self, note: Callable[[int], None]) -> None:
        from benchmarks.systems import jobs
        from pgqueue.cli import worker

        jobs.note = note
        app = APPS.get(setting("MODE"), "threads")
        words = ["--queues", setting("QUEUE", QUEUE)]
        if setting("MODE") == "io":
            words += ["--concurrency", str(IO_CONCURRENCY)]
        sys.argv = ["pgqueue-worker", f"benchmarks.systems.jobs:{app}", *words]
        worker()


def hold(clients: int, each: int, hold_s: float) -> None:
    """Produce from `clients` threads at once: every transaction enqueues one job and stays open for `hold_s`."""
    import json

    first, sent = int(setting("FIRST", "0")), []
    program = Ours()

    def produce(client: int) -> None:
        with program.open() as handle:
            from benchmarks.systems import jobs

            for turn in range(each):
                number = first + client * each + turn
                called = time.monotonic()
                jobs.bench.enqueue(handle, jobs.Payload(n=number, text="x" * 120))
                time.sleep(hold_s)
                handle.commit()
                sent.append((number, called, time.monotonic()))

    threads = [threading.Thread(target=produce, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Path(setting("OUT")).write_text(json.dumps(sent))
    os._exit(0)


def flow(count: int, rate: float) -> None:
    """Enqueue `count` jobs, `rate` a second, 40 ms' worth a transaction."""
    program = Ours()
    chunk = max(1, round(rate * 0.04))
    with program.open() as handle:
        due = time.monotonic()
        for start in range(0, count, chunk):
            time.sleep(max(0.0, due - time.monotonic()))
            program.many(handle, [payload(n) for n in range(start, min(count, start + chunk))])
            due += chunk / rate
    Path(setting("OUT")).write_text("[]")


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    if sys.argv[1] == "flow":
        flow(int(sys.argv[2]), float(sys.argv[3]))
        raise SystemExit
    main(Ours())
