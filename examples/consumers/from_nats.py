"""Consume a JetStream stream: python -m examples.consumers.from_nats nats://HOST:PORT STREAM DURABLE DSN

The message is acknowledged after the transaction. A crash in between delivers it again, and the inbox drops it:
a stream's own duplicate window ends after minutes, the inbox remembers for days.
"""

from __future__ import annotations

import asyncio
import json
import sys
from urllib.parse import unquote

import nats
import psycopg
from nats.errors import TimeoutError as NothingNew
from nats.js.api import ConsumerConfig

from examples.consumers.warehouse import TABLE, areserve


async def consume(server: str, stream: str, durable: str, dsn: str) -> None:
    """Apply events until the process ends."""
    client = await nats.connect(server)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await conn.execute(TABLE)
        # What a crashed consumer had fetched comes again after ack_wait, in seconds.
        settings = ConsumerConfig(ack_wait=5)
        messages = await client.jetstream().pull_subscribe("", durable, stream, config=settings)
        while True:
            try:
                batch = await messages.fetch(50, timeout=5)
            except NothingNew:
                continue
            for message in batch:
                headers = message.headers or {}
                source, key = unquote(headers["ce-source"]), headers["ce-id"]
                done = await areserve(conn, source=source, key=key, order=json.loads(message.data))
                await message.ack()
                print("reserved" if done else "already reserved", key, flush=True)


if __name__ == "__main__":
    asyncio.run(consume(*sys.argv[1:]))
