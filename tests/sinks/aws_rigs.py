"""The rigs of the AWS sinks, on an emulator in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from relay.sinks import SinkContext
from relay.sinks.aws import Place
from tests.sinks.broker_rigs import BrokerRig
from tests.sinks.brokers import LOOPBACK, Broker, listens, program, started
from tests.sinks.events import SOURCE, Arrived

REGION = "eu-central-1"
ACCOUNT = "000000000000"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}


class Ministack(Broker):
    """An emulator of AWS."""

    kind = "ministack"

    def command(self) -> Sequence[str]:
        """Return the command line."""
        return [program("ministack") or ""]

    def environment(self) -> dict[str, str]:
        """Return its settings: everything on loopback."""
        return {
            "MINISTACK_HOST": LOOPBACK,
            "BIND_HOST": LOOPBACK,
            "GATEWAY_PORT": str(self.port),
            "SERVICES": "sqs,sns,kinesis",
            "TMPDIR": str(self.folder),
        }

    def ready(self) -> bool:
        """Tell whether it answers."""
        return listens(self.port)


class AwsRig(BrokerRig):
    """A sink of AWS, and a client that goes to the emulator directly."""

    scheme = ""
    suffix = ""

    def __init__(self, broker: Broker) -> None:
        self.kept: list[Arrived] = []
        super().__init__(broker)
        self.make()

    def url(self, port: int) -> str:
        """Return the URL of the sink."""
        where = f"region={REGION}&account={ACCOUNT}&endpoint=http://{LOOPBACK}:{port}"
        return f"{self.scheme}://{self.name}{self.suffix}?{where}"

    def client(self, service: str) -> Any:
        """Return a client that goes there directly."""
        return Place(self.url(self.broker.port)).client(service, SinkContext(source=SOURCE))

    def make(self) -> None:
        """Make the queue, topic or stream."""
        raise NotImplementedError

    def queue(self, name: str) -> str:
        """Make a queue; return its URL."""
        fifo = {"FifoQueue": "true"} if name.endswith(".fifo") else {}
        attributes = {"VisibilityTimeout": "60", "MaximumMessageSize": "1048576", **fifo}
        url: str = self.client("sqs").create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
        return url

    def received(self, queue: str) -> list[Any]:
        """Take all messages out of a queue."""
        client = self.client("sqs")
        messages: list[Any] = []
        while page := client.receive_message(
            QueueUrl=queue, MaxNumberOfMessages=10, AttributeNames=["All"], MessageAttributeNames=["All"]
        ).get("Messages", []):
            for message in page:
                client.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
            messages += page
        return messages


def arrived(text: str | bytes) -> Arrived:
    """Read a structured event."""
    event = json.loads(text)
    return Arrived(
        key=event["id"],
        event_type=event["type"],
        aggregate=event.get("partitionkey"),
        payload=event.pop("data"),
        context=event,
    )


class SqsRig(AwsRig):
    """A FIFO queue."""

    scheme, suffix = "sqs", ".fifo"
    deduplicates = True

    def make(self) -> None:
        """Make the queue."""
        self.own = self.queue(f"{self.name}{self.suffix}")

    def arrived(self) -> list[Arrived]:
        """Return what was ever in the queue."""
        self.kept += [arrived(message["Body"]) for message in self.received(self.own)]
        return self.kept


class SnsRig(AwsRig):
    """A FIFO topic with a queue behind it."""

    scheme, suffix = "sns", ".fifo"
    deduplicates = True
    large = 250_000

    def make(self) -> None:
        """Make the topic and a queue that subscribes to it."""
        self.own = self.queue(f"{self.name}{self.suffix}")
        sns = self.client("sns")
        topic = sns.create_topic(Name=f"{self.name}{self.suffix}", Attributes={"FifoTopic": "true"})[
            "TopicArn"
        ]
        sns.subscribe(
            TopicArn=topic,
            Protocol="sqs",
            Endpoint=f"arn:aws:sqs:{REGION}:{ACCOUNT}:{self.name}{self.suffix}",
            Attributes={"RawMessageDelivery": "true"},
        )

    def arrived(self) -> list[Arrived]:
        """Return what the queue got."""
        self.kept += [arrived(message["Body"]) for message in self.received(self.own)]
        return self.kept


class KinesisRig(AwsRig):
    """A stream of two shards."""

    scheme = "kinesis"

    def make(self) -> None:
        """Make the stream."""
        self.client("kinesis").create_stream(StreamName=self.name, ShardCount=2)

    def records(self) -> list[Any]:
        """Return all records, shard by shard."""
        client = self.client("kinesis")
        found: list[Any] = []
        for shard in client.list_shards(StreamName=self.name)["Shards"]:
            where = client.get_shard_iterator(
                StreamName=self.name, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
            )["ShardIterator"]
            while page := (answer := client.get_records(ShardIterator=where, Limit=1000))["Records"]:
                found += page
                where = answer["NextShardIterator"]
        return found

    def arrived(self) -> list[Arrived]:
        """Return the records as events."""
        return [arrived(record["Data"]) for record in self.records()]


@pytest.fixture(scope="session")
def aws_server() -> Iterator[Broker]:
    """Give the emulator."""
    if program("ministack") is None or find_spec("boto3") is None:
        pytest.skip("broker: no emulator of AWS; install the Python packages ministack and boto3")
    yield from started(Ministack, "aws")


@pytest.fixture
def aws(aws_server: Broker, monkeypatch: pytest.MonkeyPatch) -> Broker:
    """Give the emulator, and the environment of a client of it."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return aws_server


@pytest.fixture
def sqs_rig(aws: Broker) -> Iterator[BrokerRig]:
    """Give the SQS sink."""
    rig = SqsRig(aws)
    yield rig
    rig.close()


@pytest.fixture
def sns_rig(aws: Broker) -> Iterator[BrokerRig]:
    """Give the SNS sink."""
    rig = SnsRig(aws)
    yield rig
    rig.close()


@pytest.fixture
def kinesis_rig(aws: Broker) -> Iterator[BrokerRig]:
    """Give the Kinesis sink."""
    rig = KinesisRig(aws)
    yield rig
    rig.close()
