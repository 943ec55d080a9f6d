"""Kafka: what can go wrong with it, on a real broker, and on a mock cluster what a broker seldom does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pgqueue.errors import ConfigError
from relay.event import Confirmed, Held, Rejected, Unavailable
from relay.send import send
from relay.sinks import Sink, SinkContext, SinkUnavailable, kafka_pipeline, open_sink
from tests.sinks.broker_rigs import SEND_S, KafkaRig
from tests.sinks.brokers import Broker, Kafka
from tests.sinks.events import SOURCE, Made, attempt
from tests.sinks.kafka_mock import MockCluster, mock_cluster
from tests.sinks.ordeal import endure, network_faults, restart
from tests.waiting import eventually

LATER = float("inf")
TOPIC_AUTHORIZATION_FAILED = 29
MSG_SIZE_TOO_LARGE = 10
NOT_LEADER, NOT_ENOUGH_REPLICAS = 6, 19
INVALID_RECORD = 87


@pytest.fixture
def mock() -> Iterator[MockCluster]:
    """Give a mock cluster with a topic `t` of one partition."""
    with mock_cluster() as cluster:
        cluster.create("t")
        yield cluster


@pytest.fixture
def made() -> Made:
    """Give a maker of events."""
    return Made()


def test_a_record_carries_key_attributes_and_a_plain_id(kafka_rig: KafkaRig) -> None:
    kafka_rig.sink.publish([kafka_rig.event("order-7 é", '{"id": 7}')])
    (record,) = kafka_rig.messages()
    assert record.key() == "order-7 é".encode()
    assert record.value() == b'{"id": 7}'
    assert {name: value.decode() for name, value in record.headers()} == {
        "id": "outbox:1",
        "content-type": "application/json",
        "ce_specversion": "1.0",
        "ce_id": "outbox:1",
        "ce_source": SOURCE,
        "ce_type": "order.placed",
        "ce_time": "2030-01-02T03:04:05.000000Z",
        "ce_subject": "order/order-7 é",
        "ce_partitionkey": "order-7 é",
        "ce_sequence": "0000000000000000001",
        "ce_traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }


def test_keys_land_in_the_partitions_of_a_java_producer(kafka_rig: KafkaRig) -> None:
    kafka_rig.sink.publish([kafka_rig.event(f"order-{i}") for i in (1, 2, 3, 4)])
    assert {r.key().decode(): r.partition() for r in kafka_rig.messages()} == {
        "order-1": 2,
        "order-2": 3,
        "order-3": 3,
        "order-4": 2,
    }


def test_an_event_without_an_aggregate_has_no_key(kafka_rig: KafkaRig) -> None:
    kafka_rig.sink.publish([kafka_rig.event(None), kafka_rig.event("")])
    assert sorted((r.key() is None for r in kafka_rig.messages()), reverse=True) == [True, False]


def test_a_place_in_the_topic_is_filled_from_the_event(kafka_rig: KafkaRig) -> None:
    kafka_rig.create(f"{kafka_rig.name}.order")
    sink = sink_at(kafka_rig, f"{kafka_rig.name}.{{aggregate_type}}")
    assert not sink.ordered
    assert sink.publish([kafka_rig.event()]) == [Confirmed()]
    assert len(kafka_rig.messages(f"{kafka_rig.name}.order")) == 1
    sink.close()


def test_a_missing_topic_is_waited_for_and_is_not_created(kafka_rig: KafkaRig) -> None:
    topic = f"{kafka_rig.name}-late"
    sink = sink_at(kafka_rig, topic)
    with pytest.raises(SinkUnavailable, match=rf"topic '{topic}' does not exist, or .*; create it"):
        sink.publish([kafka_rig.event()])
    sink.close()
    kafka_rig.create(topic)
    assert sink.publish([kafka_rig.event()]) == [Confirmed()]
    sink.close()


def test_a_missing_topic_of_one_event_stops_its_aggregate_and_no_other(kafka_rig: KafkaRig) -> None:
    kafka_rig.create(f"{kafka_rig.name}.known")
    sink = sink_at(kafka_rig, f"{kafka_rig.name}.{{event_type}}")
    events = [
        kafka_rig.event("a", event_type="unknown"),
        kafka_rig.event("a", event_type="known"),
        kafka_rig.event("b", event_type="known"),
        kafka_rig.event("c", event_type="no legal name"),
    ]
    sent = send(sink, events, deadline=LATER)
    assert sent.confirmed == [3]
    assert "does not exist" in sent.unanswered[1].reason
    assert "no legal topic name" in sent.rejected[4]
    sink.close()


def test_a_record_over_the_topics_limit_is_refused_before_anything_of_its_aggregate_is_sent(
    kafka_rig: KafkaRig, apache_kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_pipeline, "LIMIT_S", SEND_S)
    topic = f"{kafka_rig.name}-small"
    kafka_rig.create(topic, **{"max.message.bytes": "3000"})
    sink = sink_at(kafka_rig, topic)
    big = json.dumps("x" * 4000)
    events = [kafka_rig.event("a"), kafka_rig.event("a", big), kafka_rig.event("a"), kafka_rig.event("b")]
    first, refused, behind, other = sink.publish(events)
    assert (first, behind, other) == (Confirmed(), Held(), Confirmed())
    assert isinstance(refused, Rejected)
    assert "takes 3000" in refused.reason
    assert len(kafka_rig.messages(topic)) == 2
    sink.close()


def test_many_small_records_fit_a_topic_that_takes_only_small_batches(
    kafka_rig: KafkaRig, apache_kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_pipeline, "LIMIT_S", SEND_S)
    topic = f"{kafka_rig.name}-small"
    kafka_rig.create(topic, **{"max.message.bytes": "3000"})
    sink = sink_at(kafka_rig, topic)
    events = [kafka_rig.event("a", json.dumps("x" * 1000)) for _ in range(200)]
    assert sink.publish(events) == [Confirmed()] * 200
    assert [int(dict(r.headers())["id"].decode()[7:]) for r in kafka_rig.messages(topic)] == list(
        range(1, 201)
    )
    sink.close()


def test_a_record_the_broker_refuses_in_spite_of_the_check_is_found_in_its_batch(
    kafka_rig: KafkaRig, apache_kafka: Broker
) -> None:
    topic = f"{kafka_rig.name}-shrunk"
    kafka_rig.create(topic, **{"max.message.bytes": "3000"})
    place = url(kafka_rig, f"{topic}?max_bytes=9000")
    sink = open_sink(place, SinkContext(source=SOURCE, send_timeout=SEND_S))
    events = [kafka_rig.event("a"), kafka_rig.event("b", json.dumps("x" * 4000)), kafka_rig.event("b")]
    events += [kafka_rig.event(f"c{i}") for i in range(5)]
    receipts = sink.publish(events)
    assert isinstance(receipts[1], Rejected)
    assert receipts[2] == Held()
    assert [r for i, r in enumerate(receipts) if i not in (1, 2)] == [Confirmed()] * 6
    assert "outbox:3" not in {dict(r.headers())["id"].decode() for r in kafka_rig.messages(topic)}
    sink.close()


def test_a_full_local_queue_only_slows_down(kafka_rig: KafkaRig) -> None:
    sink = open_sink(
        url(kafka_rig, f"{kafka_rig.name}?queue.buffering.max.messages=100"), SinkContext(source=SOURCE)
    )
    events = [kafka_rig.event(f"order-{i % 7}") for i in range(2000)]
    assert sink.publish(events) == [Confirmed()] * 2000
    sink.close()


def test_a_small_broker_that_makes_topics_itself_is_let(tansu: Kafka, made: Made) -> None:
    sink = open_sink(
        f"kafka://127.0.0.1:{tansu.port}/made-on-demand?auto_create=true", SinkContext(source=SOURCE)
    )
    assert sink.publish([made.event()]) == [Confirmed()]
    sink.close()


def test_a_frozen_broker_is_given_up_within_the_send_timeout(
    kafka_rig: KafkaRig, apache_kafka: Broker
) -> None:
    sink = kafka_rig.open(send_timeout=1.0)
    event = kafka_rig.event()
    eventually(lambda: attempt(sink, event) == Confirmed())
    kafka_rig.proxy.freeze()
    began = time.monotonic()
    assert isinstance(attempt(sink, event), Unavailable)
    with pytest.raises(SinkUnavailable):
        sink.publish([event])
    sink.close()
    assert time.monotonic() - began < 25
    kafka_rig.proxy.heal()
    eventually(lambda: attempt(sink, event) == Confirmed())
    sink.close()


def test_an_outage_in_the_middle_of_a_batch_keeps_the_order_of_its_records(
    mock: MockCluster, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_pipeline, "DOWN_S", 40.0)
    sink = sink_of(mock, send_timeout=40)
    assert sink.publish([made.event("a")]) == [Confirmed()]
    mock.go_down()
    back = threading.Timer(0.5, mock.come_up)
    back.start()
    assert sink.publish([made.event("a") for _ in range(5)]) == [Confirmed()] * 5
    back.join()
    sink.close()
    assert list(dict.fromkeys(stored(mock))) == [f"outbox:{i}" for i in range(1, 7)]


def test_an_outage_longer_than_the_send_timeout_confirms_nothing_and_lets_no_later_record_pass(
    mock: MockCluster, made: Made
) -> None:
    sink = sink_of(mock, send_timeout=1.0)
    before = made.event("a")
    eventually(lambda: attempt(sink, before) == Confirmed())
    mock.go_down()
    events = [made.event("a") for _ in range(5)]
    sent = send(sink, events, deadline=LATER)
    assert not sent.confirmed
    assert not sent.rejected
    sink.close()
    mock.come_up()
    eventually(lambda: not send(sink, events, deadline=LATER).unconfirmed, 20)
    sink.close()
    first = list(dict.fromkeys(stored(mock)))
    assert first == [f"outbox:{i}" for i in range(1, 7)]


def test_errors_that_pass_are_retried_in_order(mock: MockCluster, made: Made) -> None:
    sink = sink_of(mock, send_timeout=40)
    assert sink.publish([made.event("a")]) == [Confirmed()]
    mock.fail_next([NOT_LEADER, 0, NOT_ENOUGH_REPLICAS, NOT_LEADER])
    events = [made.event("a") for _ in range(300)]
    assert sink.publish(events) == [Confirmed()] * 300
    sink.close()
    assert list(dict.fromkeys(stored(mock))) == [f"outbox:{i}" for i in range(1, 302)]


def test_a_batch_refused_once_is_sent_again_record_by_record_and_nothing_is_rejected(
    mock: MockCluster, made: Made
) -> None:
    sink = sink_of(mock, send_timeout=40)
    assert sink.publish([made.event("a")]) == [Confirmed()]
    mock.fail_next([MSG_SIZE_TOO_LARGE])
    events = [made.event("a") for _ in range(20)]
    assert sink.publish(events) == [Confirmed()] * 20
    sink.close()
    assert list(dict.fromkeys(stored(mock))) == [f"outbox:{i}" for i in range(1, 22)]


def test_a_record_that_fails_the_brokers_own_check_stops_its_aggregate(mock: MockCluster, made: Made) -> None:
    sink = sink_of(mock, send_timeout=40)
    assert sink.publish([made.event("a")]) == [Confirmed()]
    mock.fail_next([INVALID_RECORD] * 2)
    refused, behind = sink.publish([made.event("a"), made.event("a")])
    assert isinstance(refused, Rejected)
    assert behind == Held()
    sink.close()


def test_a_topic_that_is_not_allowed_spends_no_attempt(mock: MockCluster, made: Made) -> None:
    sink = sink_of(mock, send_timeout=40)
    assert sink.publish([made.event("a")]) == [Confirmed()]
    mock.fail_next([TOPIC_AUTHORIZATION_FAILED] * 5)
    sent = send(sink, [made.event("a"), made.event("b")], deadline=LATER)
    assert not sent.confirmed
    assert not sent.rejected
    assert "authorization" in (sent.down or next(iter(sent.unanswered.values())).reason).lower()
    sink.close()


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("", "no topic"),
        ("a topic", "no legal topic name"),
        ("{kind}", "{kind}"),
        ("t?acks=1", "acks"),
        ("t?delivery.timeout.ms=5000", "not to be changed"),
        ("t?enable.idempotence=false", "not to be changed"),
        ("t?metadata.broker.list=other:9092", "not to be changed"),
        ("t?allow.auto.create.topics=true", "not to be changed"),
        ("t?compression.type=middle-out", "middle-out"),
        ("t?no.such.property=1", "no.such.property"),
        ("t?max_bytes=-1", "max_bytes=-1"),
    ],
)
def test_a_url_that_says_too_little_or_too_much_is_refused(place: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_sink(f"kafka://h/{place}", SinkContext(source=SOURCE))


@pytest.mark.parametrize(
    ("place", "ordered"),
    [("t", True), ("t.{part}", True), ("t?pipeline=false", False), ("t.{event_type}", False)],
)
def test_a_sink_keeps_the_order_itself_where_an_aggregate_has_one_topic(place: str, ordered: bool) -> None:
    assert open_sink(f"kafka://h/{place}", SinkContext(source=SOURCE)).ordered is ordered


def test_a_broker_that_is_not_there_is_away_and_the_password_stays_hidden(made: Made) -> None:
    place = "kafka://someone:geheim@127.0.0.1:1/t?security.protocol=SASL_PLAINTEXT"
    sink = open_sink(place, SinkContext(source=SOURCE, send_timeout=1.0))
    assert "geheim" not in sink.name
    began = time.monotonic()
    with pytest.raises(SinkUnavailable) as caught:
        sink.publish([made.event()])
    sink.close()
    assert "geheim" not in str(caught.value)
    assert time.monotonic() - began < 25


def test_nothing_is_lost_or_inverted_under_network_faults_and_a_killed_broker(
    kafka_rig: KafkaRig, apache_kafka: Broker, dsn: str
) -> None:
    endure(kafka_rig, dsn, [*network_faults(kafka_rig), restart(kafka_rig)], drain_s=60)


def url(rig: KafkaRig, place: str) -> str:
    """Return the URL of another topic of the same broker."""
    return f"kafka://127.0.0.1:{rig.kafka.port}/{place}"


def sink_at(rig: KafkaRig, place: str) -> Sink:
    """Return a sink for another topic of the same broker."""
    return open_sink(url(rig, place), SinkContext(source=SOURCE, send_timeout=SEND_S))


def sink_of(mock: MockCluster, *, send_timeout: float) -> Sink:
    """Return a sink for the topic of the mock cluster."""
    # The mock does not answer what a topic takes. Unlike a broker it takes a request whose predecessor it has refused:
    # what is published at once goes in one.
    url = f"kafka://{mock.servers}/t?max_bytes=1000000&linger.ms=50"
    return open_sink(url, SinkContext(source=SOURCE, send_timeout=send_timeout))


def stored(mock: MockCluster) -> list[str]:
    """Return the keys of the events in the topic of the mock cluster, in order."""
    from confluent_kafka import Consumer, TopicPartition

    settings: dict[str, Any] = {
        "bootstrap.servers": mock.servers,
        "group.id": "g",
        "enable.partition.eof": True,
    }
    consumer = Consumer(settings)
    consumer.assign([TopicPartition("t", 0, 0)])
    found: list[str] = []
    until = time.monotonic() + 60
    while time.monotonic() < until:
        message = consumer.poll(0.5)
        if message is None:
            continue
        if message.error() is not None:
            break
        found.append(dict(message.headers() or [])["id"].decode())  # type: ignore[union-attr]
    consumer.close()
    return found
