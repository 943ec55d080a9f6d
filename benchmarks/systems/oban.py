"""oban for Python: the open edition, whose jobs are acknowledged one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks.program import IO_S, QUEUE, Program, library, main, setting
from benchmarks.system import Python, System

SYSTEM = System(
    name="oban",
    title="oban",
    language="Python",
    install=Python(packages=("oban", "psycopg[binary,pool]", "uvloop"), at_least=(3, 12)),
    settings={
        "worker": "limit 200, pool 20 (limits of 50, 500 and 1,000 were slower), finished jobs kept (default)",
        "I/O": "limit 500, pool 20",
        "bulk": "enqueue_many, 1,000 a call",
        "event loop": "uvloop",
    },
    left="SELECT EXISTS (SELECT FROM oban_jobs WHERE state IN ('available', 'executing', 'scheduled', 'retryable'))",
    count_left="SELECT count(*) FROM oban_jobs WHERE state <> 'completed'",
    modes=frozenset({"drain", "io", "latency", "bulk"}),
    versions=("oban", "psycopg", "uvloop"),
    most=20_000,
)


class ObanProgram(Program):
    """A worker class of one queue."""

    def kind(self, note: Callable[[int], None] | None = None) -> Any:
        """Return the worker class."""
        io = setting("MODE") == "io"

        class Bench:
            async def process(self, job: Any) -> None:
                if note is not None:
                    note(job.args["n"])
                if io:
                    await asyncio.sleep(IO_S)

        return library("oban").worker(queue=QUEUE)(Bench)

    async def setup(self) -> None:
        oban = library("oban.oban").Oban
        pool = await oban.create_pool(dsn=setting("DSN"), max_size=2)
        await library("oban.schema").install(pool)
        await pool.close()

    async def open(self) -> Any:
        oban = library("oban.oban").Oban
        instance = oban(pool=await oban.create_pool(dsn=setting("DSN"), min_size=1, max_size=1))
        return instance, self.kind()

    async def many(self, handle: Any, payloads: list[dict[str, Any]]) -> None:
        instance, kind = handle
        await instance.enqueue_many([kind.new(payload) for payload in payloads])

    async def one(self, handle: Any, payload: dict[str, Any]) -> None:
        instance, kind = handle
        await instance.enqueue(kind.new(payload))

    async def work(self, note: Callable[[int], None]) -> None:
        self.kind(note)
        oban = library("oban.oban").Oban
        limit = 500 if setting("MODE") == "io" else 200
        pool = await oban.create_pool(dsn=setting("DSN"), min_size=1, max_size=20)
        async with oban(pool=pool, queues={QUEUE: limit}):
            await asyncio.Event().wait()


if __name__ == "__main__":
    main(ObanProgram())
