"""Real brokers as plain processes, for tests: on free loopback ports, data in a temp folder, gone with their owner.

Each is started the first time a test asks for it and lives to the end of the run; `kill` is SIGKILL, and
`start` after it begins again on the same port and data. A test that finds no program for its broker is
skipped, with a reason that begins with "broker:".
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.brokers import LOOPBACK, Broker, Nats, Rabbit, Redis, free_port, listens, program
from benchmarks.kafka import Kafka, Tansu

__all__ = [
    "LOOPBACK", "Broker", "Kafka", "Nats", "Rabbit", "Redis", "Tansu", "apache_kafka", "free_port", "kafka_server",
    "listens", "nats_server", "program", "rabbit_server", "redis_server", "started", "tansu",
]  # fmt: skip


def _needs(kind: type[Broker]) -> None:
    if (lacking := kind.lacking()) is not None:
        pytest.skip(f"broker: {lacking}")


def started(make: Callable[[Path], Broker], kind: str) -> Iterator[Broker]:
    """Start a broker in a folder of its own; end it and remove the folder afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=f"pgqueue-{kind}-"))
    broker = make(folder)
    try:
        broker.start()
        yield broker
    finally:
        broker.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[Broker]:
    """Give NATS with JetStream."""
    _needs(Nats)
    yield from started(Nats, "nats")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Broker]:
    """Give Redis."""
    _needs(Redis)
    yield from started(Redis, "redis")


@pytest.fixture(scope="session")
def rabbit_server() -> Iterator[Broker]:
    """Give RabbitMQ."""
    _needs(Rabbit)
    yield from started(Rabbit, "rabbitmq")


@pytest.fixture(scope="session")
def apache_kafka() -> Iterator[Broker]:
    """Give Apache Kafka; for what only the real one does."""
    _needs(Kafka)
    yield from started(Kafka, "kafka")


@pytest.fixture(scope="session")
def kafka_server(request: pytest.FixtureRequest) -> Kafka:
    """Give Apache Kafka, or else the small one with its protocol."""
    if Kafka.lacking() is None:
        found: Kafka = request.getfixturevalue("apache_kafka")
        return found
    small: Kafka = request.getfixturevalue("tansu")
    return small


@pytest.fixture(scope="session")
def tansu() -> Iterator[Broker]:
    """Give the small broker with Kafka's protocol."""
    _needs(Tansu)
    yield from started(Tansu, "tansu")
