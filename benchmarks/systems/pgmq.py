"""pgmq's SQL driven by a bare loop: read 500, call the handler, delete 500. A ceiling, not a job queue.

It has no retries, no concurrency, no policy and no heartbeat; it shows what the database does when the client does
almost nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from benchmarks.program import QUEUE, Program, library, main, setting
from benchmarks.system import Python, System

BATCH = 500

SYSTEM = System(
    name="pgmq",
    title="pgmq, bare loop",
    language="Python",
    install=Python(packages=("pgmq", "asyncpg", "uvloop")),
    settings={
        "loop": "asyncpg, one connection: pgmq.read of 500 with visibility 30 s, handler, pgmq.delete of the array",
        "bulk": "pgmq.send_batch, 1,000 a call",
        "queue": "logged table, no notification (the loop never idles)",
        "event loop": "uvloop",
    },
    left=f"SELECT EXISTS (SELECT FROM pgmq.q_{QUEUE})",  # noqa: S608 - a constant
    count_left=f"SELECT count(*) FROM pgmq.q_{QUEUE}",  # noqa: S608 - a constant
    modes=frozenset({"drain", "large", "bulk"}),
    versions=("pgmq", "asyncpg"),
)


class Pgmq(Program):
    """Functions of pgmq over asyncpg."""

    async def setup(self) -> None:
        connection = await self.open()
        await connection.execute(library("pgmq.install").get_embedded_install_sql())
        await connection.execute("SELECT pgmq.create($1)", QUEUE)

    async def open(self) -> Any:
        return await library("asyncpg").connect(setting("DSN"))

    async def many(self, handle: Any, payloads: list[dict[str, Any]]) -> None:
        messages = [json.dumps(payload) for payload in payloads]
        await handle.fetch("SELECT pgmq.send_batch($1, $2::jsonb[])", QUEUE, messages)

    async def one(self, handle: Any, payload: dict[str, Any]) -> None:
        await handle.fetch("SELECT pgmq.send($1, $2::jsonb)", QUEUE, json.dumps(payload))

    async def work(self, note: Callable[[int], None]) -> None:
        async def handler(payload: dict[str, Any]) -> None:
            note(payload["n"])

        connection = await self.open()
        read = await connection.prepare(f"SELECT msg_id, message FROM pgmq.read('{QUEUE}', 30, {BATCH})")  # noqa: S608 - constants
        delete = await connection.prepare(f"SELECT pgmq.delete('{QUEUE}', $1::bigint[])")
        while True:
            rows = await read.fetch()
            for row in rows:
                await handler(json.loads(row["message"]))
            if rows:
                await delete.fetch([row["msg_id"] for row in rows])
            else:
                await asyncio.sleep(0.005)


if __name__ == "__main__":
    main(Pgmq())
