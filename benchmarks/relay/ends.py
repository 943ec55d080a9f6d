"""The other ends: each is started for one measurement, says where the relay publishes, and reads back what arrived."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, unquote

import psycopg

from benchmarks import brokers, kafka
from benchmarks.brokers import LOOPBACK, Broker
from benchmarks.install import ROOT
from benchmarks.relay.outbox import Arrived
from benchmarks.relay.peers import NAME
from benchmarks.work import RunFailed

PAGE = 10_000
READ_S = 60.0
JOBS = "SELECT headers->>'id', key, payload::json FROM pgqueue.job ORDER BY id"


class End:
    """What a relay publishes to. `words` and `environ` are what its command line needs beside the sink's URL."""

    title: ClassVar[str]
    settings: ClassVar[str]
    url: str
    words: Sequence[str] = ()

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder = folder
        self.dsn = dsn
        self.environ: dict[str, str] = {}

    @classmethod
    def lacking(cls) -> str | None:
        """Return what has to be installed for it; None if nothing."""
        return None

    def version(self) -> str:
        """Return the version of what is measured, where it has one of its own."""
        return ""

    def start(self) -> None:
        """Start it."""

    def arrived(self) -> Iterator[Arrived]:
        """Yield what arrived, that of one aggregate in its order."""
        raise NotImplementedError

    def close(self) -> None:
        """End it."""


class Null(End):
    """No broker: what the relay and Postgres do alone."""

    title = "no broker"
    settings = "confirms at once and appends the ids to a file"
    milliseconds = 0.0

    def start(self) -> None:
        """Begin a file."""
        self.record = self.folder / "record"
        self.record.touch()
        self.url = f"null:{self.record}?ms={self.milliseconds}"

    def arrived(self) -> Iterator[Arrived]:
        """Yield the ids of the file."""
        return map(Arrived, array("Q", self.record.read_bytes()))


class Slow(Null):
    """A broker that is neither fast nor busy."""

    title = "a broker 10 ms away"
    settings = "confirms each batch 10 ms after it was sent and appends the ids to a file"
    milliseconds = 10.0


class Queue(End):
    """The job queue in the same database; one subscriber."""

    title = "queue:"
    settings = "one subscriber: each event becomes a job; both are in one database"
    url = "queue:"
    words = ("benchmarks.relay.subscribers:app",)

    def arrived(self) -> Iterator[Arrived]:
        """Yield the jobs."""
        with psycopg.connect(self.dsn) as connection:
            rows = connection.execute(JOBS).fetchall()
        return (_arrived(key, aggregate, payload) for key, aggregate, payload in rows)


class Https(End):
    """A receiver on this machine, over TLS."""

    title = "https:"
    settings = (
        "an asyncio server in a process of its own, TLS 1.3, kept connections, answers 204; signed requests"
    )

    @classmethod
    def lacking(cls) -> str | None:
        """Return what has to be installed for it; None if nothing."""
        return None if shutil.which("openssl") else "no openssl to make a certificate with"

    _process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Make a certificate and serve."""
        order = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=receiver"
        files = ["-keyout", str(self.folder / "key"), "-out", str(self.folder / "cert")]
        names = ["-addext", f"subjectAltName=IP:{LOOPBACK}"]
        subprocess.run(["openssl", *order.split(), *files, *names], check=True, capture_output=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.relay.receiver", str(self.folder)], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        port = self._process.stdout.readline().strip() if self._process.stdout is not None else ""
        self.url = f"https://{LOOPBACK}:{port}/events"
        self.environ = {
            "SSL_CERT_FILE": str(self.folder / "cert"), "OUTBOX_ALLOW_PRIVATE": "1",
            "OUTBOX_WEBHOOK_SECRET": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLjSw",
        }  # fmt: skip

    def arrived(self) -> Iterator[Arrived]:
        """Stop the receiver and yield what it kept."""
        if self._process is not None:
            self._process.communicate(timeout=READ_S)
        for line in (self.folder / "kept").read_text().splitlines():
            key, aggregate, body = line.split("\t")
            yield _arrived(key, unquote(aggregate), json.loads(body))

    def close(self) -> None:
        """End the receiver."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


class BrokerEnd(End):
    """A broker of its own."""

    broker_class: ClassVar[type[Broker]]

    def __init__(self, folder: Path, dsn: str) -> None:
        super().__init__(folder, dsn)
        (folder / "broker").mkdir()
        self.broker = self.broker_class(folder / "broker")
        self.place = f"{LOOPBACK}:{self.broker.port}"

    @classmethod
    def lacking(cls) -> str | None:
        """Return what has to be installed for it; None if nothing."""
        return cls.broker_class.lacking()

    def version(self) -> str:
        """Return the broker's version."""
        return self.broker_class.version()

    def start(self) -> None:
        """Start the broker and make the destination."""
        self.broker.start()
        self.prepare()

    def prepare(self) -> None:
        """Make the destination."""
        raise NotImplementedError

    def close(self) -> None:
        """End the broker."""
        self.broker.end()


class RoomyKafka(kafka.Kafka):
    """Apache Kafka as it comes, with 1 GB of memory."""

    java = ("-Xms1g", "-Xmx1g")


class RoomyRabbit(brokers.Rabbit):
    """RabbitMQ on all cores."""

    erlang = "+sbwt none"


class Kafka(BrokerEnd):
    """Apache Kafka, one node."""

    title = "Kafka"
    settings = "one node, heap 1 GB, a topic of 12 partitions"
    broker_class: ClassVar[type[Broker]] = RoomyKafka
    partitions = 12

    def prepare(self) -> None:
        """Create the topic."""
        from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

        self.url = f"kafka://{self.place}/{NAME}"
        self.client: dict[str, str | int | float] = {"bootstrap.servers": self.place, "log_level": 0}
        admin = AdminClient(dict(self.client))
        topic = NewTopic(NAME, self.partitions, 1, config={"message.timestamp.type": "LogAppendTime"})
        admin.create_topics([topic], operation_timeout=30)[NAME].result(30)
        self.broker.wait(lambda: NAME in admin.list_topics(timeout=5).topics)

    @cached_property
    def messages(self) -> Sequence[Any]:
        """The records as they stand, each partition in order."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer({**self.client, "group.id": "check", "enable.partition.eof": True})
        found: list[Any] = []
        try:
            consumer.assign([TopicPartition(NAME, part, 0) for part in range(self.partitions)])
            ended: set[int | None] = set()
            until = time.monotonic() + READ_S
            while len(ended) < self.partitions:
                if time.monotonic() > until:
                    raise RunFailed(f"the records cannot be read within {READ_S:.0f} s")
                for message in consumer.consume(PAGE, timeout=0.2):
                    if message.error() is None:
                        found.append(message)
                    else:
                        ended.add(message.partition())
        finally:
            consumer.close()
        return found

    def arrived(self) -> Iterator[Arrived]:
        """Yield the records."""
        for message in self.messages:
            headers = dict(message.headers())
            yield _arrived(headers["ce_id"].decode(), message.key().decode(), json.loads(message.value()))

    def numbered(self) -> Iterator[tuple[int, str]]:
        """Yield number and key of the records, whoever wrote them."""
        return ((json.loads(message.value())["n"], message.key().decode()) for message in self.messages)

    def first_at(self) -> float:
        """Return when the broker had the first record; seconds since 1970."""
        return float(min(message.timestamp()[1] for message in self.messages) / 1000)


class Tansu(Kafka):
    """The small broker with Kafka's protocol."""

    title = "Kafka (Tansu)"
    settings = (
        "not Apache Kafka but a small broker with its protocol, kept in memory; a topic of 12 partitions"
    )
    broker_class = kafka.Tansu


class Nats(BrokerEnd):
    """NATS JetStream, file storage."""

    title = "NATS"
    settings = "JetStream, a stream on disk, duplicate window of two minutes"
    broker_class = brokers.Nats

    def prepare(self) -> None:
        """Create the stream."""
        self.url = f"nats://{self.place}/{NAME}.{{event_type}}?stream={NAME}"
        asyncio.run(
            self._with_stream(
                lambda js: js.add_stream(name=NAME, subjects=[f"{NAME}.>"], duplicate_window=120)
            )
        )

    def arrived(self) -> Iterator[Arrived]:
        """Yield the stored messages."""
        for message in asyncio.run(self._with_stream(self._read)):
            headers = message.headers
            yield _arrived(headers["ce-id"], unquote(headers["ce-partitionkey"]), json.loads(message.data))

    @staticmethod
    async def _read(js: Any) -> list[Any]:
        from nats.js.api import AckPolicy, ConsumerConfig

        count = (await js.stream_info(NAME)).state.messages
        config = ConsumerConfig(ack_policy=AckPolicy.NONE)
        reading = await js.pull_subscribe(f"{NAME}.>", config=config)
        found: list[Any] = []
        while len(found) < count:
            found += await reading.fetch(1_000, timeout=READ_S)
        return found

    async def _with_stream(self, work: Any) -> Any:
        import nats

        client = await nats.connect(f"nats://{self.place}")
        try:
            return await work(client.jetstream())
        finally:
            await client.close()


class Rabbit(BrokerEnd):
    """RabbitMQ, a topic exchange and a quorum queue."""

    title = "RabbitMQ"
    settings = "all cores, a topic exchange and one quorum queue; publisher confirms, mandatory"
    broker_class = RoomyRabbit

    def prepare(self) -> None:
        """Declare exchange and queue."""
        self.url = f"amqp://guest:guest@{self.place}?exchange={NAME}"
        with self._connection() as connection:
            channel = connection.channel()
            channel.exchange_declare(NAME, "topic", durable=True, auto_delete=False)
            kind = {"x-queue-type": "quorum"}
            channel.queue_declare(NAME, durable=True, auto_delete=False, arguments=kind)
            channel.queue_bind(NAME, NAME, "#")

    def arrived(self) -> Iterator[Arrived]:
        """Take the messages out of the queue."""
        found: list[Any] = []
        with self._connection() as connection:
            channel = connection.channel()
            count = channel.queue_declare(NAME, passive=True).message_count
            channel.basic_consume(NAME, callback=found.append, no_ack=True)
            while len(found) < count:
                connection.drain_events(timeout=READ_S)
        for message in found:
            aggregate = message.headers["cloudEvents_partitionkey"]
            yield _arrived(message.properties["message_id"], aggregate, json.loads(message.body))

    def _connection(self) -> Any:
        import amqp

        return amqp.Connection(self.place)


class Redis(BrokerEnd):
    """Redis Streams."""

    title = "Redis"
    settings = "one stream, appendonly with appendfsync always: confirmed means on disk"
    broker_class = brokers.Redis

    def prepare(self) -> None:
        """Say where the stream is."""
        self.url = f"redis://{self.place}/0?stream={NAME}"

    def arrived(self) -> Iterator[Arrived]:
        """Yield the entries."""
        import redis

        with redis.Redis.from_url(f"redis://{self.place}", decode_responses=True) as client:
            after = "-"
            while page := client.xrange(NAME, after, count=PAGE):
                for _, fields in page:
                    yield _arrived(fields["id"], fields["partitionkey"], json.loads(fields["data"]))
                after = f"({page[-1][0]}"


def best_kafka() -> type[Kafka]:
    """Return Apache Kafka, or what else speaks its protocol here."""
    return Tansu if Kafka.lacking() and not Tansu.lacking() else Kafka


ENDS: Mapping[str, type[End]] = {
    "null": Null, "kafka": Kafka, "nats": Nats, "rabbitmq": Rabbit, "redis": Redis, "queue": Queue, "https": Https,
}  # fmt: skip


def end_named(name: str) -> type[End]:
    """Return the end of a part."""
    return best_kafka() if name == "kafka" else ENDS[name]


def timed(end: End) -> tuple[str, Path]:
    """Return a URL for the same end by a sink that notes when confirmations came, and the file it notes them in."""
    record = end.folder / "confirmed"
    return f"timed:{record}?{quote(end.url, safe='')}", record


def _arrived(key: str, aggregate: str | None, payload: Any) -> Arrived:
    number = payload["n"] if isinstance(payload, dict) else None
    return Arrived(int(key.removeprefix("outbox:")), aggregate, number)
