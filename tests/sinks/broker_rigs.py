"""The rigs of the broker sinks: each with a destination of its own behind a proxy that makes faults."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import pytest

from relay.event import Event
from relay.sinks import Sink, SinkContext, open_sink
from tests.sinks.brokers import LOOPBACK, Broker, Kafka, free_port
from tests.sinks.events import SOURCE, Arrived, Made
from tests.tcp_proxy import TcpProxy
from tests.waiting import eventually

TOO_LARGE = json.dumps("x" * 1_200_000)
#: Where a test waits for no timeout, a broker that stalls is to reach none.
SEND_S = 30.0
#: For answers of a broker to the test itself.
ANSWER_S = 60.0


class BrokerRig(Made):
    """A broker sink and its other end; `go_away` is the proxy refusing."""

    rejects = goes_away = True

    def __init__(self, broker: Broker) -> None:
        super().__init__()
        self.broker = broker
        self.name = f"t{uuid.uuid4().hex[:12]}"
        self.proxy = TcpProxy(self.target(), self.front())
        self.proxy.accept()
        self.sink: Sink = self.open()

    def target(self) -> int:
        """Return the port of the broker that the proxy forwards to."""
        return self.broker.port

    def front(self) -> int:
        """Return the port that the proxy has to have."""
        return free_port()

    def url(self, port: int) -> str:
        """Return the URL of the sink."""
        raise NotImplementedError

    def open(
        self, *, send_timeout: float = SEND_S, source: str = SOURCE, more: str = "", direct: bool = False
    ) -> Sink:
        """Return one more sink with the same destination."""
        url = self.url(self.broker.port if direct else self.proxy.port) + more
        return open_sink(url, SinkContext(source=source, send_timeout=send_timeout))

    def event(
        self,
        aggregate: str | None = "order-1",
        payload: str = "{}",
        *,
        event_type: str = "order.placed",
        bad: bool = False,
    ) -> Event:
        """Return the next event; a bad one is larger than the broker takes."""
        return super().event(aggregate, TOO_LARGE if bad else payload, event_type=event_type, bad=bad)

    def arrived(self) -> list[Arrived]:
        """Return what stands at the other end, in order."""
        raise NotImplementedError

    def log(self) -> list[tuple[str, int]]:
        """Return what arrived as (aggregate, id of the event)."""
        return [(a.aggregate or "", int(a.key.removeprefix("outbox:"))) for a in self.arrived()]

    def go_away(self) -> None:
        """Refuse connections and cut those there are."""
        self.proxy.refuse()

    def come_back(self) -> None:
        """Take connections again."""
        self.proxy.accept()

    def close(self) -> None:
        """Drop everything that belongs to the test."""
        self.sink.close()
        self.proxy.__exit__()


class NatsRig(BrokerRig):
    """A JetStream stream that keeps everything."""

    deduplicates = True

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self.ask(self._create())

    def url(self, port: int) -> str:
        """Return the URL of the sink."""
        return f"nats://{LOOPBACK}:{port}/{self.name}.{{event_type}}?stream={self.name}"

    def ask(self, work: Any) -> Any:
        """Run a coroutine function on a JetStream context of the broker."""
        return asyncio.run(self._with_stream(work))

    def messages(self) -> list[Any]:
        """Return the stored messages."""

        messages: list[Any] = self.ask(self.read)
        return messages

    async def read(self, js: Any) -> list[Any]:
        """Return the stored messages."""
        count = (await js.stream_info(self.name)).state.messages
        found = await js.subscribe(f"{self.name}.>", ordered_consumer=True) if count else None
        return [await found.next_msg(timeout=ANSWER_S) for _ in range(count)] if found else []

    def arrived(self) -> list[Arrived]:
        """Return the stored messages as events."""
        return [
            Arrived(
                key=m.headers["ce-id"],
                event_type=unquote(m.headers["ce-type"]),
                aggregate=unquote(m.headers["ce-partitionkey"]) if "ce-partitionkey" in m.headers else None,
                payload=json.loads(m.data),
                context={n[3:]: unquote(v) for n, v in m.headers.items() if n.startswith("ce-")}
                | {"datacontenttype": m.headers["content-type"]},
            )
            for m in self.messages()
        ]

    def _create(self) -> Any:
        async def create(js: Any) -> None:
            await js.add_stream(name=self.name, subjects=[f"{self.name}.>"], duplicate_window=120)

        return create

    async def _with_stream(self, work: Any) -> Any:
        import nats

        client = await nats.connect(f"nats://{LOOPBACK}:{self.broker.port}")
        try:
            return await work(client.jetstream(timeout=ANSWER_S))
        finally:
            await client.close()


class RedisRig(BrokerRig):
    """A Redis stream."""

    def url(self, port: int) -> str:
        """Return the URL of the sink."""
        return f"redis://{LOOPBACK}:{port}/0?stream={self.name}&max_bytes=1100000"

    def client(self) -> Any:
        """Return a client that goes to the broker directly."""
        import redis

        return redis.Redis(LOOPBACK, self.broker.port, decode_responses=True)

    def entries(self, stream: str | None = None) -> list[dict[str, str]]:
        """Return the fields of the stream's entries."""
        with self.client() as client:
            return [fields for _, fields in client.xrange(stream or self.name)]

    def arrived(self) -> list[Arrived]:
        """Return the entries as events."""
        return [
            Arrived(
                key=fields["id"],
                event_type=fields["type"],
                aggregate=fields.get("partitionkey"),
                payload=json.loads(fields["data"]),
                context={name: value for name, value in fields.items() if name != "data"},
            )
            for fields in self.entries()
        ]


class AmqpRig(BrokerRig):
    """A topic exchange with one quorum queue that takes everything."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker)
        self.taken: dict[str, list[Any]] = {}
        with self.channel() as channel:
            channel.exchange_declare(self.name, "topic", durable=True, auto_delete=False)
            self.declare(self.name)
            channel.queue_bind(self.name, self.name, "#")

    def url(self, port: int) -> str:
        """Return the URL of the sink."""
        return f"amqp://guest:guest@{LOOPBACK}:{port}?exchange={self.name}&max_bytes=1100000"

    @contextmanager
    def channel(self) -> Iterator[Any]:
        """Give a channel that goes to the broker directly."""
        import amqp

        with amqp.Connection(f"{LOOPBACK}:{self.broker.port}") as connection:
            yield connection.channel()

    def declare(self, queue: str, *, kind: str = "quorum", durable: bool = True, **arguments: Any) -> None:
        """Declare a queue."""
        given = {"x-queue-type": kind, **{f"x-{k.replace('_', '-')}": v for k, v in arguments.items()}}
        with self.channel() as channel:
            channel.queue_declare(queue, durable=durable, auto_delete=False, arguments=given)

    def messages(self, queue: str | None = None) -> list[Any]:
        """Take what waits in the queue; return all that was ever taken from it.

        A message of our own marks the end: a quorum queue that is slow to answer counts 0.
        """
        import amqp

        name, end = queue or self.name, uuid.uuid4().hex
        waited: list[Any] = []
        with self.channel() as channel:
            channel.basic_publish(amqp.Message(b"", message_id=end), "", name)
            channel.basic_consume(name, callback=waited.append, no_ack=True)
            while not waited or waited[-1].properties.get("message_id") != end:
                channel.connection.drain_events(timeout=ANSWER_S)
        found = self.taken.setdefault(name, [])
        found += waited[:-1]
        return found

    def arrived(self) -> list[Arrived]:
        """Return the messages as events."""
        return [
            Arrived(
                key=m.properties["message_id"],
                event_type=m.headers["cloudEvents_type"],
                aggregate=m.headers.get("cloudEvents_partitionkey"),
                payload=json.loads(m.body),
                context={n[12:]: v for n, v in m.headers.items() if n.startswith("cloudEvents_")}
                | {"datacontenttype": m.properties["content_type"]},
            )
            for m in self.messages()
        ]


class KafkaRig(BrokerRig):
    """A topic of four partitions."""

    def __init__(self, broker: Kafka) -> None:
        self.kafka = broker
        super().__init__(broker)
        self.create(self.name)

    def target(self) -> int:
        """Return the port that announces the proxy."""
        return self.kafka.behind_proxy

    def front(self) -> int:
        """Return the port that the broker announces."""
        return self.kafka.proxied

    def url(self, port: int) -> str:
        """Return the URL of the sink."""
        return f"kafka://{LOOPBACK}:{port}/{self.name}"

    def create(self, topic: str, **settings: str) -> None:
        """Create a topic."""
        from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

        admin = AdminClient(self.kafka.client())
        made = admin.create_topics([NewTopic(topic, 4, 1, config=settings)], operation_timeout=ANSWER_S)
        made[topic].result(ANSWER_S)
        eventually(lambda: topic in admin.list_topics(timeout=ANSWER_S).topics)

    def messages(self, topic: str | None = None) -> list[Any]:
        """Return the records, partition by partition."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer({**self.kafka.client(), "group.id": self.name, "enable.partition.eof": True})
        try:
            consumer.assign([TopicPartition(topic or self.name, p, 0) for p in range(4)])
            found: list[Any] = []
            ended: set[Any] = set()
            until = time.monotonic() + ANSWER_S
            while len(ended) < 4 and time.monotonic() < until:
                for message in consumer.consume(500, timeout=0.2):
                    if message.error() is None:
                        found.append(message)
                        ended.discard(message.partition())
                    else:
                        ended.add(message.partition())
        finally:
            consumer.close()
        return sorted(found, key=lambda m: (m.partition(), m.offset()))

    def arrived(self) -> list[Arrived]:
        """Return the records as events."""
        return [
            Arrived(
                key=headers["ce_id"],
                event_type=headers["ce_type"],
                aggregate=message.key().decode() if message.key() is not None else None,
                payload=json.loads(message.value()),
                context={n[3:]: v for n, v in headers.items() if n.startswith("ce_")}
                | {"datacontenttype": headers["content-type"]},
            )
            for message in self.messages()
            if (headers := {name: value.decode() for name, value in message.headers()})
        ]


def _closing(rig: BrokerRig) -> Iterator[BrokerRig]:
    try:
        yield rig
    finally:
        rig.close()


@pytest.fixture
def nats_rig(nats_server: Broker) -> Iterator[BrokerRig]:
    """Give the NATS sink."""
    yield from _closing(NatsRig(nats_server))


@pytest.fixture
def redis_rig(redis_server: Broker) -> Iterator[BrokerRig]:
    """Give the Redis sink."""
    yield from _closing(RedisRig(redis_server))


@pytest.fixture
def amqp_rig(rabbit_server: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerRig]:
    """Give the RabbitMQ sink; a broker that stalls as a connection opens has as long as for anything else."""
    monkeypatch.setattr("relay.sinks.amqp.CONNECT_S", ANSWER_S)
    yield from _closing(AmqpRig(rabbit_server))


@pytest.fixture
def kafka_rig(kafka_server: Kafka) -> Iterator[BrokerRig]:
    """Give the Kafka sink."""
    yield from _closing(KafkaRig(kafka_server))
