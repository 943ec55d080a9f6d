"""awa: a Rust engine with Python handlers, on its queue-storage engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.program import IO_S, QUEUE, Program, library, main, setting
from benchmarks.system import Python, System

#: Jobs enqueued and not yet completed, by its own tables: its view awa.jobs joins 30,000 jobs for minutes.
LEFT = """
(SELECT count(*) FROM awa.ready_entries) + (SELECT count(*) FROM awa.deferred_jobs)
- (SELECT coalesce(sum(b.completed_count), 0) FROM awa.receipt_completion_batches b)
- (SELECT count(*) FROM awa.done_entries)
"""

SYSTEM = System(
    name="awa",
    title="awa-pg",
    language="Rust and Python",
    install=Python(packages=("awa-pg", "uvloop")),
    settings={
        "worker": "queue storage (install_queue_storage), 2,000 workers (128 and 512 were slower), "
        "pool 20, poll 50 ms",
        "I/O": "500 workers, pool 20",
        "bulk": "enqueue_many_copy, 1,000 a call",
        "event loop": "uvloop",
    },
    left=f"SELECT {LEFT} > 0",
    count_left=f"SELECT ({LEFT})::bigint",
    modes=frozenset({"drain", "io", "latency", "bulk"}),
    versions=("awa-pg", "uvloop"),
    most=30_000,
)


@dataclass
class Bench:
    """The payload, by which awa names the kind of job."""

    n: int
    text: str


def client(connections: int) -> Any:
    """Return a client; its URLs need a host even where a socket folder is given."""
    return library("awa").AsyncClient(
        setting("DSN").replace("@/", "@localhost/"), max_connections=connections
    )


class Awa(Program):
    """An asynchronous client."""

    async def setup(self) -> None:
        owner = client(2)
        await owner.migrate()
        await owner.install_queue_storage(schema="awa")

    async def open(self) -> Any:
        return client(1)

    async def many(self, handle: Any, payloads: list[dict[str, Any]]) -> None:
        await handle.enqueue_many_copy([Bench(**payload) for payload in payloads], queue=QUEUE)

    async def one(self, handle: Any, payload: dict[str, Any]) -> None:
        await handle.insert(Bench(**payload), queue=QUEUE)

    async def work(self, note: Callable[[int], None]) -> None:
        worker = client(20)

        async def handler(job: Any) -> None:
            note(job.args.n)

        async def sleeper(job: Any) -> None:
            note(job.args.n)
            await asyncio.sleep(IO_S)

        io = setting("MODE") == "io"
        worker.task(Bench, queue=QUEUE)(sleeper if io else handler)
        await worker.start([(QUEUE, 500 if io else 2_000)], poll_interval_ms=50)
        await asyncio.Event().wait()


if __name__ == "__main__":
    main(Awa())
