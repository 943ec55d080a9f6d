"""procrastinate: one fetch and one finish per job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks.program import IO_S, QUEUE, Program, library, main, setting
from benchmarks.system import Python, System

SYSTEM = System(
    name="procrastinate",
    title="procrastinate",
    language="Python",
    install=Python(packages=("procrastinate", "psycopg[binary,pool]", "uvloop")),
    settings={
        "worker": "concurrency 10, pool 10 (50 was slower), finished jobs kept (default)",
        "I/O": "concurrency 500, pool 20",
        "bulk": "batch_defer_async, 1,000 a call",
        "event loop": "uvloop",
    },
    left="SELECT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing'))",
    count_left="SELECT count(*) FROM procrastinate_jobs WHERE status <> 'succeeded'",
    modes=frozenset({"drain", "io", "latency", "bulk"}),
    versions=("procrastinate", "psycopg", "uvloop"),
    most=3_000,
)


class Procrastinate(Program):
    """A task of an app over the asynchronous connector."""

    def app(self, note: Callable[[int], None] | None = None) -> tuple[Any, Any]:
        """Return the app and its task."""
        procrastinate = library("procrastinate")
        size = 20 if setting("MODE") == "io" else 10
        connector = procrastinate.PsycopgConnector(conninfo=setting("DSN"), min_size=1, max_size=size)
        app = procrastinate.App(connector=connector)

        async def handler(n: int, text: str) -> None:  # noqa: ARG001 - the payload's shape
            if note is not None:
                note(n)

        async def sleeper(n: int, text: str) -> None:
            await handler(n, text)
            await asyncio.sleep(IO_S)

        function = sleeper if setting("MODE") == "io" else handler
        return app, app.task(name="bench", queue=QUEUE)(function)

    async def setup(self) -> None:
        app, _ = self.app()
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    async def open(self) -> Any:
        app, task = self.app()
        await app.open_async()
        return task

    async def many(self, handle: Any, payloads: list[dict[str, Any]]) -> None:
        await handle.batch_defer_async(*payloads)

    async def one(self, handle: Any, payload: dict[str, Any]) -> None:
        await handle.defer_async(**payload)

    async def work(self, note: Callable[[int], None]) -> None:
        app, _ = self.app(note)
        concurrency = 500 if setting("MODE") == "io" else 10
        async with app.open_async():
            await app.run_worker_async(queues=[QUEUE], concurrency=concurrency, install_signal_handlers=False)


if __name__ == "__main__":
    main(Procrastinate())
