"""The rig of the Pulsar sink, on Apache Pulsar with its BookKeeper in one process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.jars import PULSAR, class_path
from tests.sinks.broker_rigs import ANSWER_S, BrokerRig
from tests.sinks.brokers import LOOPBACK, Broker, free_port, listens, started
from tests.sinks.events import Arrived

OPENED = ("java.lang", "java.io", "sun.net")


class Pulsar(Broker):
    """Apache Pulsar, one node. Clients that ask at `behind_proxy` are sent to `proxied`, whatever forwards it."""

    kind = "pulsar"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.behind_proxy = free_port()
        self.proxied = free_port()
        self.bookie = free_port()
        lines = {
            "clusterName": "standalone",
            "brokerServicePort": str(self.port),
            "webServicePort": str(free_port()),
            "bindAddress": LOOPBACK,
            "bindAddresses": f"proxied:pulsar://{LOOPBACK}:{self.behind_proxy}",
            "internalListenerName": "direct",
            "advertisedListeners": f"direct:pulsar://{LOOPBACK}:{self.port},"
            f"proxied:pulsar://{LOOPBACK}:{self.proxied}",
            "managedLedgerDefaultEnsembleSize": "1",
            "managedLedgerDefaultWriteQuorum": "1",
            "managedLedgerDefaultAckQuorum": "1",
            "allowLoopback": "true",
            "listeningInterface": "lo",
            "diskUsageThreshold": "0.99",
            "diskUsageWarnThreshold": "0.98",
            "loadBalancerEnabled": "false",
            "webSocketServiceEnabled": "false",
            "systemTopicEnabled": "false",
            "topicLevelPoliciesEnabled": "false",
            "numIOThreads": "2",
            "numHttpServerThreads": "4",
            "numOrderedExecutorThreads": "2",
            "statsProviderClass": "org.apache.bookkeeper.stats.NullStatsProvider",
        }
        settings = "".join(f"{name}={value}\n" for name, value in lines.items())
        (folder / "standalone.conf").write_text(settings)

    def command(self) -> Sequence[str]:
        """Return the command line."""
        small = ["-Xms128m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m", "-XX:+UseSerialGC"]
        opened = [part for name in OPENED for part in ("--add-opens", f"java.base/{name}=ALL-UNNAMED")]
        return [
            "java",
            *small,
            "-XX:TieredStopAtLevel=1",
            *opened,
            "-cp",
            class_path(PULSAR) or "",
            "org.apache.pulsar.PulsarStandaloneStarter",
            *("--config", str(self.folder / "standalone.conf")),
            *(
                "--metadata-dir",
                str(self.folder / "metadata"),
                "--bookkeeper-dir",
                str(self.folder / "ledgers"),
            ),
            *("--bookkeeper-port", str(self.bookie), "--num-bookies", "1"),
            "--no-functions-worker",
            "--no-stream-storage",
        ]

    def ready(self) -> bool:
        """Tell whether it stores a message: it listens before its namespaces are there."""
        import pulsar

        if not listens(self.port):
            return False
        client = self.client()
        try:
            client.create_producer("ready", send_timeout_millis=2000).send(b"")
        except pulsar.PulsarException:
            return False
        finally:
            client.close()
        return True

    def client(self, patience: float = 5.0) -> Any:
        """Return a client that goes there directly and logs nothing."""
        import pulsar

        quiet = pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull)
        return pulsar.Client(
            f"pulsar://{LOOPBACK}:{self.port}", operation_timeout_seconds=int(patience), logger=quiet
        )


class PulsarRig(BrokerRig):
    """A topic."""

    broker: Pulsar

    def target(self) -> int:
        """Return the port that announces the proxy."""
        return self.broker.behind_proxy

    def front(self) -> int:
        """Return the port that the broker announces."""
        return self.broker.proxied

    def url(self, port: int) -> str:
        """Return the URL of the sink."""
        return f"pulsar://{LOOPBACK}:{port}/public/default/{self.name}?max_bytes=1100000"

    def messages(self, topic: str | None = None) -> list[Any]:
        """Return what is stored."""
        import pulsar

        client = self.broker.client(ANSWER_S)
        try:
            place = f"persistent://public/default/{topic or self.name}"
            reader = client.create_reader(place, pulsar.MessageId.earliest)
            found: list[Any] = []
            while reader.has_message_available():
                found.append(reader.read_next(int(1000 * ANSWER_S)))
        finally:
            client.close()
        return found

    def arrived(self) -> list[Arrived]:
        """Return the messages as events."""
        return [
            Arrived(
                key=message.properties()["ce_id"],
                event_type=message.properties()["ce_type"],
                aggregate=message.properties().get("ce_partitionkey"),
                payload=json.loads(message.data()),
                context={n[3:]: v for n, v in message.properties().items() if n.startswith("ce_")}
                | {"datacontenttype": message.properties()["content-type"]},
            )
            for message in self.messages()
        ]


@pytest.fixture(scope="session")
def pulsar_server() -> Iterator[Broker]:
    """Give Apache Pulsar."""
    if find_spec("pulsar") is None:
        pytest.skip("broker: no Pulsar client; install the Python package pulsar-client")
    if class_path(PULSAR) is None:
        pytest.skip("broker: no Apache Pulsar; install Java 17 and Maven")
    yield from started(Pulsar, "pulsar")


@pytest.fixture
def pulsar_rig(pulsar_server: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerRig]:
    """Give the Pulsar sink, which looks for a broker that is away no longer than a stall may last."""
    monkeypatch.setattr("relay.sinks.pulsar.OPERATION_S", 5.0)
    rig = PulsarRig(pulsar_server)
    try:
        yield rig
    finally:
        rig.close()
