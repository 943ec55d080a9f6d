"""The consumer examples: each event is applied once, under repeated delivery and SIGKILL."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.event import Event
from relay.send import send
from tests.db.relaying import cleared
from tests.sinks.broker_rigs import AmqpRig, BrokerRig, KafkaRig, NatsRig
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
EVENTS = 300

Publish = Callable[[], object]


@contextmanager
def consumer(module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an example until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-m", f"examples.consumers.{module}", *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def reserved(dsn: str) -> list[int]:
    """Return the orders that stock was reserved for, repetitions included."""
    with psycopg.connect(dsn) as conn:
        if conn.execute("SELECT to_regclass('public.reservation')").fetchone() == (None,):
            return []
        return [row[0] for row in conn.execute("SELECT order_id FROM public.reservation ORDER BY order_id")]


def apply_all(rig: BrokerRig, dsn: str, module: str, *arguments: str, again: Publish | None = None) -> None:
    """Deliver everything, kill the consumer half way, deliver everything again; see what was applied."""
    events = [order(rig, number) for number in range(EVENTS)]
    publish(rig, events)
    with consumer(module, *arguments, dsn):
        eventually(lambda: len(reserved(dsn)) >= EVENTS // 3, 40)
    if again is None:
        publish(rig, events)
    else:
        again()
    # When the last one is applied, the repetitions before it have been delivered.
    publish(rig, [order(rig, EVENTS)])
    with consumer(module, *arguments, dsn):
        eventually(lambda: len(set(reserved(dsn))) == EVENTS + 1, 40)
    assert reserved(dsn) == list(range(EVENTS + 1))


def order(rig: BrokerRig, number: int) -> Event:
    """Return an event to publish."""
    return rig.event("order-1", json.dumps({"id": number, "quantity": 1}))


def publish(rig: BrokerRig, events: Sequence[Event]) -> None:
    """Publish events, all of one aggregate."""
    assert not send(rig.sink, events, deadline=float("inf")).unconfirmed


def test_a_kafka_consumer_applies_each_event_once(kafka_rig: KafkaRig, dsn: str) -> None:
    servers = f"127.0.0.1:{kafka_rig.kafka.port}"
    apply_all(kafka_rig, dsn, "from_kafka", servers, kafka_rig.name, "warehouse")


def test_a_rabbitmq_consumer_applies_each_event_once(amqp_rig: AmqpRig, dsn: str) -> None:
    apply_all(amqp_rig, dsn, "from_rabbitmq", f"127.0.0.1:{amqp_rig.broker.port}", amqp_rig.name)


def test_a_nats_consumer_applies_each_event_once(nats_rig: NatsRig, dsn: str) -> None:
    async def past_the_window(js: Any) -> None:
        for message in await nats_rig.read(js):
            headers = {k: v for k, v in message.headers.items() if not k.startswith("Nats-")}
            await js.publish(message.subject, message.data, headers=headers)

    server = f"nats://127.0.0.1:{nats_rig.broker.port}"
    again = partial(nats_rig.ask, past_the_window)
    apply_all(nats_rig, dsn, "from_nats", server, nats_rig.name, "warehouse", again=again)


@pytest.fixture
def dsn(shop: str) -> Iterator[str]:
    """Give the module's database, without reservations."""
    yield cleared(shop)
    with psycopg.connect(shop) as conn:
        conn.execute("DROP TABLE IF EXISTS public.reservation")
