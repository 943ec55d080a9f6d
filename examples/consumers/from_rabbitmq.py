"""Consume a RabbitMQ queue: python -m examples.consumers.from_rabbitmq HOST:PORT QUEUE DSN

The message is acknowledged after the transaction. A crash in between delivers it again, and the inbox drops it.
For order per aggregate declare the queue with single active consumer.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import amqp
import psycopg

from examples.consumers.warehouse import TABLE, reserve


def consume(server: str, queue: str, dsn: str) -> None:
    """Apply events until the process ends."""
    with amqp.Connection(server) as connection, psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(TABLE)
        channel = connection.channel()
        channel.basic_qos(prefetch_size=0, prefetch_count=50, a_global=False)

        def apply(message: Any) -> None:
            source, key = message.headers["cloudEvents_source"], message.properties["message_id"]
            done = reserve(conn, source=source, key=key, order=json.loads(message.body))
            channel.basic_ack(message.delivery_tag)
            print("reserved" if done else "already reserved", key, flush=True)

        channel.basic_consume(queue, callback=apply)
        while True:
            connection.drain_events()


if __name__ == "__main__":
    consume(*sys.argv[1:])
