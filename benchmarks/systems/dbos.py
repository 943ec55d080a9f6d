"""DBOS: durable workflows on queues; every step of a workflow's life is a statement of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

from benchmarks.program import IO_S, QUEUE, Program, library, main, setting
from benchmarks.system import Python, System

SYSTEM = System(
    name="dbos",
    title="DBOS",
    language="Python",
    install=Python(packages=("dbos>=3.4,<4", "psycopg[binary]")),
    settings={
        "worker": "worker_concurrency 1,000, polling_interval_sec 0.1, pool 20 (100 and 500, pools of 10 and 50, "
        "polls of 10 ms and 1 s were not faster), finished workflows kept (default)",
        "I/O": "worker_concurrency 500, the rest the same",
        "pickup": "worker_concurrency 100, polling_interval_sec 0.01: it has no notification, and a shorter poll costs "
        "it more than it brings",
        "bulk": "enqueue_in_transaction, 1,000 in a transaction",
    },
    left="SELECT EXISTS (SELECT FROM dbos.workflow_status WHERE status IN ('ENQUEUED', 'PENDING', 'DELAYED'))",
    count_left="SELECT count(*) FROM dbos.workflow_status WHERE status <> 'SUCCESS'",
    modes=frozenset({"drain", "io", "latency", "bulk"}),
    versions=("dbos", "psycopg"),
    most=2_000,
)

NAME, VERSION = "bench", "1"
#: By mode: how many workflows at once, and how often the queue is looked at, in seconds.
LIMITS = {"": (1_000, 0.1), "io": (500, 0.1), "latency": (100, 0.01)}


def url() -> str:
    """Return the URL in SQLAlchemy's form."""
    return setting("DSN").replace("postgresql://", "postgresql+psycopg://")


class Dbos(Program):
    """Enqueue by the client, work by the library itself."""

    def open(self) -> Any:
        engine = library("sqlalchemy").create_engine(url(), pool_size=1)
        return library("dbos").DBOSClient(system_database_engine=engine), engine

    def setup(self) -> None:
        self.launch(5).destroy()

    def launch(self, pool: int) -> Any:
        """Start the library; its schema is made at the first start."""
        dbos = library("dbos").DBOS
        made = dbos(
            config={
                "name": "bench", "system_database_url": url(), "sys_db_pool_size": pool, "log_level": "ERROR",
                "application_version": VERSION, "executor_id": f"bench-{os.getpid()}",
            }
        )  # fmt: skip
        dbos.launch()
        return made

    def many(self, handle: Any, payloads: list[dict[str, Any]]) -> None:
        options = {"workflow_name": NAME, "queue_name": QUEUE}
        client, engine = handle
        with engine.begin() as connection:
            for payload in payloads:
                client.enqueue_in_transaction(connection, options, **payload)

    def one(self, handle: Any, payload: dict[str, Any]) -> None:
        client, _ = handle
        client.enqueue({"workflow_name": NAME, "queue_name": QUEUE}, **payload)

    def work(self, note: Callable[[int], None]) -> None:
        dbos = library("dbos").DBOS
        mode = setting("MODE")

        def handler(*, n: int, text: str) -> None:  # noqa: ARG001 - the payload's shape
            note(n)

        async def handler_async(*, n: int, text: str) -> None:  # noqa: ARG001 - the payload's shape
            note(n)

        async def sleeper(*, n: int, text: str) -> None:  # noqa: ARG001 - the payload's shape
            note(n)
            await asyncio.sleep(IO_S)

        dbos.workflow(name=NAME)({"async": handler_async, "io": sleeper}.get(mode, handler))
        self.launch(20)
        concurrency, poll_s = LIMITS.get(mode, LIMITS[""])
        dbos.register_queue(QUEUE, worker_concurrency=concurrency, polling_interval_sec=poll_s)
        threading.Event().wait()


if __name__ == "__main__":
    main(Dbos())
