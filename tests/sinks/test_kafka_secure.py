"""Apache Kafka that asks who is there: TLS, SASL in the clear and over TLS, and rights of an account."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

pytest.importorskip(
    "confluent_kafka", reason="broker: no Kafka client; install the Python package confluent-kafka"
)

from confluent_kafka import admin as kafka_admin

from relay.event import Confirmed, Event, Unavailable
from relay.sinks import Sink, SinkContext, SinkUnavailable, open_sink
from tests.sinks.broker_rigs import ANSWER_S, SEND_S, KafkaRig
from tests.sinks.brokers import LOOPBACK, Broker, Kafka, free_port
from tests.sinks.events import SOURCE, attempt
from tests.waiting import eventually

admin: Any = kafka_admin

PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required user_alice=geheim;"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
LISTENERS = {"TLS": "SSL", "NAMED": "SASL_PLAINTEXT", "BOTH": "SASL_SSL"}


class SecureKafka(Kafka):
    """Kafka with a listener of each kind beside the open one, where an account needs rights."""

    certificate: Path

    def __init__(self, folder: Path) -> None:
        self.ports = {name: free_port() for name in LISTENERS}
        super().__init__(folder)

    def settings(self) -> dict[str, str]:
        """Return the properties of the server."""
        made = super().settings()
        places = [f"{name}://{LOOPBACK}:{port}" for name, port in self.ports.items()]
        made["listeners"] = ",".join([made["listeners"], *places])
        made["advertised.listeners"] = ",".join([made["advertised.listeners"], *places])
        made["listener.security.protocol.map"] += "".join(f",{a}:{b}" for a, b in LISTENERS.items())
        for name in ("named", "both"):
            made[f"listener.name.{name}.sasl.enabled.mechanisms"] = "PLAIN,SCRAM-SHA-512"
            made[f"listener.name.{name}.plain.sasl.jaas.config"] = PLAIN
            made[f"listener.name.{name}.scram-sha-512.sasl.jaas.config"] = SCRAM
        return made | {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.certificate / "both"),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }


@pytest.fixture(scope="module")
def secure_kafka(
    apache_kafka: Broker, certificate: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecureKafka]:
    """Give Kafka with an account that may write to topics whose name begins with t."""
    SecureKafka.certificate = certificate
    broker = SecureKafka(tmp_path_factory.mktemp("kafka"))
    try:
        broker.start()
        scram = admin.ScramCredentialInfo(admin.ScramMechanism.SCRAM_SHA_512, 4096)
        account = admin.UserScramCredentialUpsertion("alice", scram, b"geheim")
        client = admin.AdminClient(broker.client())
        for done in client.alter_user_scram_credentials([account]).values():
            done.result(ANSWER_S)
        allow(broker, "t", "WRITE", "DESCRIBE")
        yield broker
    finally:
        broker.kill()


def allow(broker: Kafka, prefix: str, *rights: str) -> None:
    """Give the account rights on the topics whose name begins so."""
    kind = admin.ResourceType.TOPIC
    bindings = [
        admin.AclBinding(
            kind, prefix, admin.ResourcePatternType.PREFIXED, "User:alice", "*",
            admin.AclOperation[right], admin.AclPermissionType.ALLOW,
        )
        for right in rights
    ]  # fmt: skip
    client = admin.AdminClient(broker.client())
    for granted in client.create_acls(bindings).values() if bindings else ():
        granted.result(ANSWER_S)


@pytest.fixture
def secure_rig(secure_kafka: SecureKafka) -> Iterator[KafkaRig]:
    """Give a topic of it."""
    rig = KafkaRig(secure_kafka)
    yield rig
    rig.close()


def at(rig: KafkaRig, listener: str, account: str = "", *, topic: str | None = None, **options: str) -> Sink:
    """Return a sink that goes to a listener."""
    broker = rig.kafka
    assert isinstance(broker, SecureKafka)
    asked = {"security.protocol": LISTENERS[listener]} | {k.replace("_", "."): v for k, v in options.items()}
    place = f"{account}{LOOPBACK}:{broker.ports[listener]}/{topic or rig.name}?{urlencode(asked)}"
    return open_sink(f"kafka://{place}", SinkContext(source=SOURCE, send_timeout=SEND_S))


def refused(sink: Sink, event: Event) -> str:
    """Publish an event in vain; return why."""
    with pytest.raises(SinkUnavailable) as caught:
        sink.publish([event])
    sink.close()
    return str(caught.value)


def passes(sink: Sink, rig: KafkaRig) -> None:
    """Publish two events of an aggregate and see them arrive in order."""
    events = [rig.event(), rig.event()]
    assert sink.publish(events) == [Confirmed()] * 2
    sink.close()
    assert [a.key for a in rig.arrived()] == [event.idempotency_key for event in events]


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
@pytest.mark.parametrize("listener", ["NAMED", "BOTH"], ids=["in the clear", "over TLS"])
def test_an_account_with_its_password_publishes(
    secure_rig: KafkaRig, certificate: Path, listener: str, mechanism: str
) -> None:
    trusted = {"ssl_ca_location": str(certificate / "cert")} if listener == "BOTH" else {}
    passes(at(secure_rig, listener, "alice:geheim@", sasl_mechanism=mechanism, **trusted), secure_rig)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_a_wrong_password_makes_the_broker_away_and_is_not_shown(
    secure_rig: KafkaRig, mechanism: str
) -> None:
    said = refused(at(secure_rig, "NAMED", "alice:falsch@", sasl_mechanism=mechanism), secure_rig.event())
    assert "uthentication" in said
    assert "falsch" not in said
    assert not secure_rig.arrived()


def test_kafka_over_tls_is_trusted_by_its_authority_only(secure_rig: KafkaRig, certificate: Path) -> None:
    assert "certificate" in refused(at(secure_rig, "TLS"), secure_rig.event())
    assert not secure_rig.arrived()
    passes(at(secure_rig, "TLS", ssl_ca_location=str(certificate / "cert")), secure_rig)


@pytest.mark.parametrize("rights", [[], ["DESCRIBE"]], ids=["may not see it", "may not write"])
def test_an_account_without_a_right_waits_and_spends_no_attempt(
    secure_rig: KafkaRig, rights: list[str]
) -> None:
    topic = f"x{secure_rig.name}"
    secure_rig.create(topic)
    allow(secure_rig.kafka, topic, *rights)
    sink = at(secure_rig, "NAMED", "alice:geheim@", topic=topic, sasl_mechanism="PLAIN")
    event = secure_rig.event()
    receipt = attempt(sink, event)
    assert isinstance(receipt, Unavailable)
    assert "right" in receipt.reason or "uthoriz" in receipt.reason
    assert not secure_rig.messages(topic)
    allow(secure_rig.kafka, topic, "WRITE", "DESCRIBE")
    sink.close()
    eventually(lambda: attempt(sink, event) == Confirmed())
    sink.close()
