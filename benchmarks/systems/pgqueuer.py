"""pgqueuer: asyncpg, large batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from benchmarks.program import IO_S, QUEUE, Program, library, main, setting
from benchmarks.system import Python, System

BATCH = 500

SYSTEM = System(
    name="pgqueuer",
    title="pgqueuer",
    language="Python",
    install=Python(packages=("pgqueuer[asyncpg]", "uvloop")),
    settings={
        "worker": "batch_size 500 (default 10: a quarter of the rate), one asyncpg connection, "
        "durable tables (default)",
        "I/O": "batch_size 250, max_concurrent_tasks 500 (it must be twice the batch)",
        "bulk": "Queries.enqueue with lists, 1,000 a call",
        "event loop": "uvloop",
    },
    left="SELECT EXISTS (SELECT FROM pgqueuer)",
    count_left="SELECT count(*) FROM pgqueuer",
    modes=frozenset({"drain", "large", "async", "io", "latency", "bulk", "snapshot"}),
    versions=("pgqueuer", "asyncpg", "uvloop"),
    most=300_000,
)


class PgQueuer(Program):
    """Enqueue by Queries, work by the queue manager."""

    async def setup(self) -> None:
        handle = await self.open()
        await handle.install()

    async def open(self) -> Any:
        connection = await library("asyncpg").connect(setting("DSN"))
        return library("pgqueuer.queries").Queries.from_asyncpg_connection(connection)

    async def many(self, handle: Any, payloads: list[dict[str, Any]]) -> None:
        count = len(payloads)
        await handle.enqueue([QUEUE] * count, [json.dumps(p).encode() for p in payloads], [0] * count)

    async def one(self, handle: Any, payload: dict[str, Any]) -> None:
        await handle.enqueue(QUEUE, json.dumps(payload).encode())

    async def work(self, note: Callable[[int], None]) -> None:
        connection = await library("asyncpg").connect(setting("DSN"))
        queuer = library("pgqueuer").PgQueuer.from_asyncpg_connection(connection)

        async def handler(job: Any) -> None:
            note(json.loads(job.payload)["n"])

        async def sleeper(job: Any) -> None:
            note(json.loads(job.payload)["n"])
            await asyncio.sleep(IO_S)

        if setting("MODE") == "io":
            queuer.entrypoint(QUEUE)(sleeper)
            await queuer.run(batch_size=250, max_concurrent_tasks=500)
        else:
            queuer.entrypoint(QUEUE)(handler)
            await queuer.run(batch_size=BATCH)


if __name__ == "__main__":
    main(PgQueuer())
