"""The commands of docs/brokers.md, run as they stand: nothing is replaced but the address of the broker."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay import Outbox
from tests.sinks.aws_rigs import ACCOUNT, ENVIRONMENT, KinesisRig, SnsRig, SqsRig
from tests.sinks.broker_rigs import ANSWER_S, BrokerRig, KafkaRig, NatsRig, RedisRig
from tests.sinks.brokers import LOOPBACK, Rabbit
from tests.sinks.events import Arrived
from tests.sinks.pulsar_rigs import PulsarRig
from tests.sinks.receiver import Receiver
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "brokers.md").read_text(encoding="utf-8")
#: Commands that need an account or a certificate of the broker, and the test that runs such a URL.
ELSEWHERE = {
    "sasl.mechanism=SCRAM-SHA-512": "test_an_account_with_its_password_publishes",
}

outbox = Outbox()


@cache
def commands() -> tuple[str, ...]:
    """Return the lines of the page that start a relay, in a shell's form."""
    text = PAGE.replace("\\\n", " ")
    found = [line.strip() for line in text.splitlines() if line.startswith("    ") and "outbox-relay" in line]
    return tuple(
        line for line in found if not line.startswith("pip ") and not any(e in line for e in ELSEWHERE)
    )


@dataclass(slots=True)
class Stage:
    """Where a command runs: what its addresses mean here, and how to see what arrived."""

    places: Mapping[str, str]
    arrived: Callable[[], list[Arrived]]
    environment: dict[str, str] = field(default_factory=dict)


def named(rig: type[BrokerRig], name: str) -> type[Any]:
    """Return a rig whose destination has the name of the page."""

    class Named(rig):  # type: ignore[misc,valid-type]
        """The rig with that name."""

        @property
        def name(self) -> str:
            """Return the name of the page."""
            return name

        @name.setter
        def name(self, _: str) -> None:
            """Keep the name of the page."""

    return Named


def _kafka(get: Callable[[str], Any], stack: ExitStack) -> Stage:
    class Orders(named(KafkaRig, "orders")):  # type: ignore[misc]
        """The topic of the page, which another test may have made."""

        def create(self, topic: str, **settings: str) -> None:
            """Create a topic unless it is there."""
            from confluent_kafka import KafkaException

            with suppress(KafkaException):
                super().create(topic, **settings)

    rig = Orders(get("kafka_server"))
    stack.callback(rig.close)
    place = f"{LOOPBACK}:{rig.kafka.port}"
    return Stage({"broker-1:9092,broker-2:9092": place, "broker-1:9092": place}, rig.arrived)


def _rabbit(get: Callable[[str], Any], stack: ExitStack) -> Stage:
    broker: Rabbit = get("rabbit_server")
    # One order for all: each starts a virtual machine.
    all_of_it = '<<".*">>, <<".*">>, <<".*">>'
    may = "".join(
        f'rabbit_auth_backend_internal:set_permissions(<<"{user}">>, <<"shop">>, {all_of_it}, <<"t">>),'
        for user in ("user", "guest")
    )
    broker.control(
        "eval",
        'catch rabbit_vhost:add(<<"shop">>, <<"t">>),'
        'catch rabbit_auth_backend_internal:add_user(<<"user">>, <<"password">>, <<"t">>),' + may + "ok.",
    )
    import amqp

    kept: list[Any] = []
    with amqp.Connection(f"{LOOPBACK}:{broker.port}", virtual_host="shop") as connection:
        channel = connection.channel()
        channel.exchange_declare("events", "topic", durable=True, auto_delete=False)
        channel.queue_declare("orders", durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
        channel.queue_bind("orders", "events", "#")

    def arrived() -> list[Arrived]:
        with amqp.Connection(f"{LOOPBACK}:{broker.port}", virtual_host="shop") as connection:
            channel = connection.channel()
            while (message := channel.basic_get("orders", no_ack=True)) is not None:
                kept.append(message)
        return [
            Arrived(
                key=m.properties["message_id"],
                event_type=m.headers["cloudEvents_type"],
                aggregate=m.headers["cloudEvents_partitionkey"],
                payload=json.loads(m.body),
            )
            for m in kept
        ]

    return Stage({"@rabbit/": f"@{LOOPBACK}:{broker.port}/"}, arrived)


def _nats(get: Callable[[str], Any], stack: ExitStack) -> Stage:
    class Shop(named(NatsRig, "SHOP")):  # type: ignore[misc]
        """The stream of the page, whose subjects begin with another word."""

        async def read(self, js: Any) -> list[Any]:
            """Return the stored messages."""
            count = (await js.stream_info("SHOP")).state.messages
            found = await js.subscribe("shop.>", ordered_consumer=True) if count else None
            return [await found.next_msg(timeout=ANSWER_S) for _ in range(count)] if found else []

        def _create(self) -> Any:
            async def create(js: Any) -> None:
                await js.add_stream(name="SHOP", subjects=["shop.>"], duplicate_window=120)

            return create

    rig = Shop(get("nats_server"))
    stack.callback(rig.close)
    place = f"{LOOPBACK}:{rig.broker.port}"
    return Stage({"nats-1:4222,nats-2:4222": place}, rig.arrived)


def _redis(get: Callable[[str], Any], stack: ExitStack) -> Stage:
    rig = named(RedisRig, "shop")(get("redis_server"))
    stack.callback(rig.close)
    import redis

    with rig.client() as client:
        client.config_set("requirepass", "password")
    known: Any = redis.Redis(LOOPBACK, rig.broker.port, password="password", decode_responses=True)
    stack.callback(known.close)
    stack.callback(known.config_set, "requirepass", "")

    def arrived() -> list[Arrived]:
        return [
            Arrived(
                key=f["id"], event_type=f["type"], aggregate=f["partitionkey"], payload=json.loads(f["data"])
            )
            for _, f in known.xrange("shop")
        ]

    return Stage({"redis:6379": f"{LOOPBACK}:{rig.broker.port}"}, arrived)


def _aws(kind: type[BrokerRig]) -> Callable[[Callable[[str], Any], ExitStack], Stage]:
    def stage(get: Callable[[str], Any], stack: ExitStack) -> Stage:
        broker = get("aws")
        rig = named(kind, "orders")(broker)
        stack.callback(rig.close)
        endpoint = {"AWS_ENDPOINT_URL": f"http://{LOOPBACK}:{broker.port}"}
        return Stage({"123456789012": ACCOUNT}, rig.arrived, ENVIRONMENT | endpoint)

    return stage


def _pulsar(get: Callable[[str], Any], stack: ExitStack) -> Stage:
    rig = named(PulsarRig, "orders")(get("pulsar_server"))
    stack.callback(rig.close)
    return Stage({"broker:6650": f"{LOOPBACK}:{rig.broker.port}"}, rig.arrived)


def _https(_: Callable[[str], Any], stack: ExitStack) -> Stage:
    receiver = stack.enter_context(Receiver())

    def arrived() -> list[Arrived]:
        return [
            Arrived(
                key=d.headers["ce-id"],
                event_type=d.headers["ce-type"],
                aggregate=d.headers["ce-partitionkey"],
                payload=json.loads(d.body),
            )
            for d in receiver.kept
        ]

    return Stage(
        {"https://warehouse.example.org/events": receiver.url}, arrived, {"OUTBOX_ALLOW_PRIVATE": "1"}
    )


STAGES: dict[str, Callable[[Callable[[str], Any], ExitStack], Stage]] = {
    "kafka": _kafka,
    "amqp": _rabbit,
    "nats": _nats,
    "redis": _redis,
    "sqs": _aws(SqsRig),
    "sns": _aws(SnsRig),
    "kinesis": _aws(KinesisRig),
    "pulsar": _pulsar,
    "https": _https,
}


def schemes(command: str) -> list[str]:
    """Return which sinks a command names, in its order."""
    return re.findall(r"(\w+):(?://|(?=\s|\"|$))", command)


@contextmanager
def running(command: str, dsn: str, stage: Stage, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a command of the page in a shell of its own."""
    for said, meant in stage.places.items():
        command = command.replace(said, meant)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "OUTBOX_", "DATABASE_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = kept | {"PATH": path, "PGQUEUE_DSN": dsn, "PYTHONPATH": str(folder)} | stage.environment
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            ["sh", "-c", command], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder with the app of the page."""
    section = PAGE[PAGE.index("## queue:") :]
    code = section[section.index("```python\n") + 10 :]
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "jobs.py").write_text(
        code[: code.index("```")]
        + "\n\n@app.on_event('order.cancelled')\ndef cancel(order: dict) -> None: ...\n"
    )
    return tmp_path


def written(dsn: str, *types: str) -> list[str]:
    """Write an event of each type for one aggregate; return their keys."""
    with psycopg.connect(dsn) as conn:
        return [f"outbox:{outbox.add(conn, kind, {'n': 1}, aggregate_id='order-1')}" for kind in types]


def test_every_sink_has_a_command_on_the_page() -> None:
    assert {name for command in commands() for name in schemes(command)} == {*STAGES, "stdout", "queue"}
    assert all(
        f"def {test}(" in (ROOT / "tests/sinks/test_kafka_secure.py").read_text()
        for test in ELSEWHERE.values()
    )


@pytest.mark.parametrize(
    "command", [c for c in commands() if len(schemes(c)) == 1 and schemes(c)[0] in STAGES], ids=str
)
def test_a_command_of_the_page_publishes(
    command: str, dsn: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    with ExitStack() as stack:
        stage = STAGES[schemes(command)[0]](request.getfixturevalue, stack)
        before = [a.key for a in stage.arrived()]
        keys = written(dsn, "order.placed", "order.paid")
        with running(command, dsn, stage, folder):
            eventually(lambda: done(dsn) == 2, 40)
        assert [a.key for a in stage.arrived()][len(before) :] == keys


def done(dsn: str) -> int:
    """Count the published events."""
    with psycopg.connect(dsn) as conn:
        row = conn.execute("SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NOT NULL").fetchone()
    assert row is not None
    return int(row[0])


def jobs(dsn: str) -> list[str]:
    """Return the events that became jobs."""
    with psycopg.connect(dsn) as conn:
        return [
            row[0] for row in conn.execute("SELECT headers->>'id' FROM pgqueue.job ORDER BY id").fetchall()
        ]


def test_the_command_for_stdout_writes_a_line(dsn: str, folder: Path) -> None:
    (command,) = [c for c in commands() if schemes(c) == ["stdout"]]
    (key,) = written(dsn, "order.placed")
    with running(command, dsn, Stage({}, list), folder) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["id"] == key


def test_the_command_for_the_queue_makes_a_job(dsn: str, folder: Path) -> None:
    (command,) = [c for c in commands() if schemes(c) == ["queue"]]
    (key,) = written(dsn, "order.placed")
    with running(command, dsn, Stage({}, list), folder):
        eventually(lambda: jobs(dsn) == [key], 20)


def test_the_command_with_routes_sends_each_type_to_its_sink(
    dsn: str, folder: Path, request: pytest.FixtureRequest
) -> None:
    (command,) = [c for c in commands() if len(schemes(c)) > 1]
    with ExitStack() as stack:
        kafka = _kafka(request.getfixturevalue, stack)
        https = _https(request.getfixturevalue, stack)
        before = len(kafka.arrived())
        added, placed, cancelled = written(dsn, "customer.added", "order.placed", "order.cancelled")
        stage = Stage({**kafka.places, **https.places}, list, https.environment)
        with running(command, dsn, stage, folder):
            eventually(lambda: done(dsn) == 3, 40)
        assert [a.key for a in kafka.arrived()][before:] == [added]
        assert [a.key for a in https.arrived()] == [placed]
        assert jobs(dsn) == [cancelled]
