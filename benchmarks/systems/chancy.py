"""chancy: asynchronous executor; results are written once a second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from benchmarks.program import IO_S, QUEUE, Program, library, main, setting
from benchmarks.system import Python, System

SYSTEM = System(
    name="chancy",
    title="chancy",
    language="Python",
    install=Python(packages=("chancy", "psycopg[binary,pool]", "uvloop"), at_least=(3, 12)),
    settings={
        "worker": "AsyncExecutor, concurrency 2,000, eager_polling, polling every second (100 and 500 were slower)",
        "I/O": "concurrency 500",
        "bulk": "push_many, 1,000 a call",
        "event loop": "uvloop",
    },
    left="SELECT EXISTS (SELECT FROM chancy_jobs WHERE state NOT IN ('succeeded', 'failed', 'expired'))",
    count_left="SELECT count(*) FROM chancy_jobs WHERE state <> 'succeeded'",
    modes=frozenset({"drain", "io", "latency", "bulk"}),
    versions=("chancy", "psycopg", "uvloop"),
    most=5_000,
)


def _nothing(_: int) -> None:
    """Record nothing."""


#: chancy imports a handler by its path; a worker puts its recorder here.
note: Callable[[int], None] = _nothing


async def bench(*, n: int, text: str) -> None:  # noqa: ARG001 - the payload's shape
    """Do nothing."""
    note(n)


async def bench_io(*, n: int, text: str) -> None:  # noqa: ARG001 - the payload's shape
    """Await 10 ms."""
    note(n)
    await asyncio.sleep(IO_S)


class Chancy(Program):
    """An application with one queue."""

    def app(self) -> Any:
        """Return the application; its log lines would cost it dear."""
        return library("chancy").Chancy(setting("DSN"), log=logging.getLogger("chancy"))

    def job(self, payload: dict[str, Any]) -> Any:
        """Return a job of the handler that the worker will import."""
        module = library("benchmarks.systems.chancy")
        function = module.bench_io if setting("MODE") == "io" else module.bench
        return library("chancy").Job.from_func(function, kwargs=payload, queue=QUEUE)

    async def setup(self) -> None:
        async with self.app() as app:
            await app.migrate()

    async def open(self) -> Any:
        return await self.app().__aenter__()

    async def many(self, handle: Any, payloads: list[dict[str, Any]]) -> None:
        async for _ in handle.push_many([self.job(payload) for payload in payloads]):
            pass

    async def one(self, handle: Any, payload: dict[str, Any]) -> None:
        await handle.push(self.job(payload))

    async def work(self, note: Callable[[int], None]) -> None:
        library("benchmarks.systems.chancy").note = note
        chancy = library("chancy")
        concurrency = 500 if setting("MODE") == "io" else 2_000
        queue = chancy.Queue(
            QUEUE,
            concurrency=concurrency,
            executor=chancy.Chancy.Executor.Async,
            polling_interval=1,
            eager_polling=True,
        )
        async with self.app() as app:
            await app.declare(queue, upsert=True)
            async with chancy.Worker(app, register_signal_handlers=False) as worker:
                await worker.wait_for_shutdown()


if __name__ == "__main__":
    main(Chancy())
