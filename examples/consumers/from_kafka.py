"""Consume a Kafka topic: python -m examples.consumers.from_kafka HOST:PORT TOPIC GROUP DSN

The offset is committed after the transaction. A crash in between delivers again what was applied, and the inbox
drops it.
"""

from __future__ import annotations

import json
import sys
from typing import cast

import psycopg
from confluent_kafka import Consumer, KafkaException

from examples.consumers.warehouse import TABLE, reserve


def consume(servers: str, topic: str, group: str, dsn: str) -> None:
    """Apply events until the process ends."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            # A process that is started again takes its place at once; a second one needs another id.
            "group.instance.id": f"{group}-1",
        }
    )
    consumer.subscribe([topic])
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(TABLE)
        while True:
            message = consumer.poll(1.0)
            if message is None:
                continue
            if message.error():
                raise KafkaException(message.error())
            headers = dict(cast("list[tuple[str, bytes]]", message.headers()))
            source, key = headers["ce_source"].decode(), headers["ce_id"].decode()
            order = json.loads(message.value() or b"null")
            done = reserve(conn, source=source, key=key, order=order)
            consumer.commit(message=message, asynchronous=False)
            print("reserved" if done else "already reserved", key, flush=True)


if __name__ == "__main__":
    consume(*sys.argv[1:])
