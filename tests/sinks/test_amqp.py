"""RabbitMQ: what can go wrong with it, on a real server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, Confirmed, Event, Rejected, Unavailable
from relay.send import send
from relay.sinks import SinkContext, SinkUnavailable, open_sink
from tests.sinks.broker_rigs import ANSWER_S, AmqpRig
from tests.sinks.brokers import Rabbit
from tests.sinks.events import SOURCE, attempt
from tests.sinks.ordeal import endure, network_faults, restart
from tests.waiting import eventually

LATER = float("inf")


@pytest.fixture
def low_memory(rabbit_server: Rabbit) -> Iterator[Rabbit]:
    """Give the server, its memory alarm off at the end."""
    yield rabbit_server
    rabbit_server.control("set_vm_memory_high_watermark", "0.6")


def test_a_message_is_persistent_and_carries_the_attributes(amqp_rig: AmqpRig) -> None:
    amqp_rig.sink.publish([amqp_rig.event("order-7", '{"id": 7}')])
    (message,) = amqp_rig.messages()
    assert json.loads(message.body) == {"id": 7}
    assert message.delivery_info["routing_key"] == "order.placed"
    properties = {k: message.properties[k] for k in ("content_type", "delivery_mode", "message_id", "type")}
    assert properties == {
        "content_type": "application/json",
        "delivery_mode": 2,
        "message_id": "outbox:1",
        "type": "order.placed",
    }
    headers = {name: value for name, value in message.headers.items() if name != "x-delivery-count"}
    assert headers == {
        "cloudEvents_specversion": "1.0",
        "cloudEvents_id": "outbox:1",
        "cloudEvents_source": SOURCE,
        "cloudEvents_type": "order.placed",
        "cloudEvents_time": "2030-01-02T03:04:05.000000Z",
        "cloudEvents_subject": "order/order-7",
        "cloudEvents_partitionkey": "order-7",
        "cloudEvents_sequence": "0000000000000000001",
        "cloudEvents_traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }


def test_a_message_that_no_queue_takes_is_not_confirmed(amqp_rig: AmqpRig) -> None:
    bind_only(amqp_rig, "order.#")
    routed, lost = amqp_rig.sink.publish([amqp_rig.event("a"), amqp_rig.event("b", event_type="stock.low")])
    assert routed == Confirmed()
    assert isinstance(lost, Unavailable)
    assert "'stock.low' leads nowhere; bind a queue" in lost.reason
    assert len(amqp_rig.messages()) == 1


def test_a_message_is_confirmed_once_a_queue_is_bound(amqp_rig: AmqpRig) -> None:
    bind_only(amqp_rig, "order.#")
    event = amqp_rig.event(event_type="stock.low")
    assert isinstance(amqp_rig.sink.publish([event])[0], Unavailable)
    bind_only(amqp_rig, "stock.#")
    assert amqp_rig.sink.publish([event]) == [Confirmed()]


def test_a_missing_exchange_is_an_error_that_says_what_to_do(amqp_rig: AmqpRig) -> None:
    sink = sink_at(amqp_rig, "exchange=nowhere")
    with pytest.raises(SinkUnavailable, match=r"exchange 'nowhere'.*declare it, durable"):
        sink.publish([amqp_rig.event()])
    sink.close()


def test_an_exchange_deleted_under_way_is_an_error_and_no_loss(amqp_rig: AmqpRig) -> None:
    events = [amqp_rig.event(str(i)) for i in range(5)]
    assert amqp_rig.sink.publish(events[:1]) == [Confirmed()]
    with amqp_rig.channel() as channel:
        channel.exchange_delete(amqp_rig.name)
    with pytest.raises(SinkUnavailable, match="exchange"):
        amqp_rig.sink.publish(events[1:])
    with amqp_rig.channel() as channel:
        channel.exchange_declare(amqp_rig.name, "topic", durable=True, auto_delete=False)
    bind_only(amqp_rig, "#")
    assert amqp_rig.sink.publish(events[1:]) == [Confirmed()] * 4


@pytest.mark.parametrize("kind", ["direct", "topic", "fanout"])
def test_a_transient_exchange_is_refused(amqp_rig: AmqpRig, kind: str) -> None:
    name = f"{amqp_rig.name}-{kind}"
    with amqp_rig.channel() as channel:
        channel.exchange_declare(name, kind, durable=False, auto_delete=False)
        channel.queue_bind(amqp_rig.name, name, "order.placed")
    sink = sink_at(amqp_rig, f"exchange={name}")
    with pytest.raises(SinkUnavailable, match="is not durable"):
        sink.publish([amqp_rig.event()])
    sink.close()
    sink = sink_at(amqp_rig, f"exchange={name}&durable=false")
    assert sink.publish([amqp_rig.event()]) == [Confirmed()]
    sink.close()


def test_a_transient_queue_is_refused_and_a_durable_one_of_any_type_is_not(amqp_rig: AmqpRig) -> None:
    names = {kind: f"{amqp_rig.name}-{kind}" for kind in ("transient", "classic", "quorum", "limited")}
    amqp_rig.declare(names["transient"], kind="classic", durable=False)
    amqp_rig.declare(names["classic"], kind="classic")
    amqp_rig.declare(names["quorum"])
    amqp_rig.declare(names["limited"], kind="classic", max_length=10)
    for kind, name in names.items():
        sink = sink_at(amqp_rig, f"queue={name}")
        if kind == "transient":
            with pytest.raises(SinkUnavailable, match="is not durable"):
                sink.publish([amqp_rig.event()])
        else:
            assert sink.publish([amqp_rig.event()]) == [Confirmed()], kind
            assert len(amqp_rig.messages(name)) == 1
        sink.close()


@pytest.mark.parametrize("options", ["queue=nowhere", "exchange=&routing_key=nowhere"])
def test_a_missing_queue_is_an_error_that_says_what_to_do(amqp_rig: AmqpRig, options: str) -> None:
    sink = sink_at(amqp_rig, options)
    with pytest.raises(SinkUnavailable, match=r"queue 'nowhere'.*declare it, durable"):
        sink.publish([amqp_rig.event()])
    sink.close()


def test_a_full_queue_spends_no_attempt(amqp_rig: AmqpRig) -> None:
    name = f"{amqp_rig.name}-full"
    amqp_rig.declare(name, kind="classic", max_length=1, overflow="reject-publish")
    sink = sink_at(amqp_rig, f"queue={name}")
    receipts = [sink.publish([amqp_rig.event()])[0] for _ in range(5)]
    assert receipts[0] == Confirmed()
    assert isinstance(receipts[-1], Unavailable)
    assert "nack" in receipts[-1].reason
    sink.close()


def test_a_message_that_cannot_be_written_down_moves_no_confirmation(amqp_rig: AmqpRig) -> None:
    link, message = full_and_free(amqp_rig)._open(), spoiling(amqp_rig.sink)
    free, bad = amqp_rig.event(event_type="free"), amqp_rig.event(event_type="bad")
    with pytest.raises(Exception, match="int"):
        link.publish([free, bad], message, LATER)
    events = [amqp_rig.event(event_type=kind) for kind in ("full", "free", "free")]
    link.publish([free], message, time.monotonic() + ANSWER_S)  # its own and that of the first publish
    receipts = link.publish(events, message, time.monotonic() + ANSWER_S)
    link.drop()
    assert [receipts[event.id] is CONFIRMED for event in events] == [False, True, True]


def test_a_connection_with_half_a_message_is_not_used_again(
    amqp_rig: AmqpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amqp_rig.sink, "_message", spoiling(amqp_rig.sink))
    free, bad = amqp_rig.event("order-1"), amqp_rig.event("order-2", event_type="bad")
    sent = send(amqp_rig.sink, [free, bad], deadline=LATER)
    assert (sent.confirmed, list(sent.unanswered)) == ([free.id], [bad.id])
    assert amqp_rig.sink.publish([free]) == [Confirmed()]
    assert amqp_rig.proxy.connections == 3


def test_a_memory_alarm_makes_the_broker_away_and_nothing_hangs(
    amqp_rig: AmqpRig, low_memory: Rabbit
) -> None:
    sink = amqp_rig.open()
    events = [amqp_rig.event(str(i)) for i in range(20)]
    low_memory.control("set_vm_memory_high_watermark", "0")
    sent = send(sink, events, deadline=LATER)
    assert not sent.rejected
    assert sent.unconfirmed
    rest = sent.unconfirmed
    with pytest.raises(SinkUnavailable, match="low on memory"):
        sink.publish(rest)
    low_memory.control("set_vm_memory_high_watermark", "0.6")
    eventually(lambda: drained(sink, rest))
    assert {a.key for a in amqp_rig.arrived()} == {e.idempotency_key for e in events}
    sink.close()


def test_a_connection_dropped_under_an_alarm_leaves_nothing_to_be_read_later(
    amqp_rig: AmqpRig, low_memory: Rabbit
) -> None:
    events = [amqp_rig.event(str(i)) for i in range(20)]
    low_memory.control("set_vm_memory_high_watermark", "0")
    confirmed = 0
    for _ in range(3):
        confirmed += len(send(amqp_rig.sink, events, deadline=LATER).confirmed)
        amqp_rig.sink.close()
    low_memory.control("set_vm_memory_high_watermark", "0.6")
    eventually(lambda: drained(amqp_rig.sink, events))
    # The broker reads one message before it blocks a connection.
    assert len(amqp_rig.messages()) <= 20 + 3


def test_a_routing_key_too_long_for_the_protocol_is_refused(amqp_rig: AmqpRig) -> None:
    refused, sent = amqp_rig.sink.publish([amqp_rig.event("a", event_type="x" * 300), amqp_rig.event("b")])
    assert isinstance(refused, Rejected)
    assert "255" in refused.reason
    assert sent == Confirmed()


def test_headers_too_long_for_a_frame_are_refused_and_the_connection_stays(amqp_rig: AmqpRig) -> None:
    amqp_rig.sink.publish([amqp_rig.event()])
    refused, sent = amqp_rig.sink.publish([amqp_rig.event("é" * 40_000), amqp_rig.event("b")])
    assert isinstance(refused, Rejected)
    assert "frame" in refused.reason
    assert sent == Confirmed()
    assert amqp_rig.proxy.connections == 1


def test_headers_that_just_fit_are_sent(amqp_rig: AmqpRig) -> None:
    assert amqp_rig.sink.publish([amqp_rig.event("x" * 60_000)]) == [Confirmed()]


def test_a_message_for_which_the_broker_closes_the_channel_is_found(
    amqp_rig: AmqpRig, rabbit_server: Rabbit
) -> None:
    limit = "application:set_env(rabbit, max_message_size, {0}), persistent_term:put(max_message_size, {0})."
    rabbit_server.control("eval", limit.format(5000))
    try:
        events = [amqp_rig.event(str(i)) for i in range(6)]
        events[2] = amqp_rig.event("2", '"' + "x" * 10_000 + '"')
        receipts = amqp_rig.sink.publish(events)
    finally:
        rabbit_server.control("eval", limit.format(16_777_216))
    assert [r is CONFIRMED for r in receipts] == [True, True, False, True, True, True]
    assert isinstance(receipts[2], Rejected)
    assert "size" in receipts[2].reason


def test_a_frozen_server_is_given_up_within_the_send_timeout(amqp_rig: AmqpRig) -> None:
    sink = amqp_rig.open(send_timeout=0.5)
    event = amqp_rig.event()
    eventually(lambda: attempt(sink, event) == Confirmed())
    amqp_rig.proxy.freeze()
    assert isinstance(attempt(sink, event), Unavailable)
    with pytest.raises(SinkUnavailable, match="no connection"):
        sink.publish([event])
    amqp_rig.proxy.heal()
    eventually(lambda: attempt(sink, event) == Confirmed())
    sink.close()


def test_a_wrong_password_is_an_error_that_does_not_show_it(amqp_rig: AmqpRig) -> None:
    url = f"amqp://guest:geheim@127.0.0.1:{amqp_rig.broker.port}?exchange={amqp_rig.name}"
    sink = open_sink(url, SinkContext(source=SOURCE))
    with pytest.raises(SinkUnavailable) as caught:
        sink.publish([amqp_rig.event()])
    assert "geheim" not in str(caught.value)
    assert "geheim" not in sink.name


def test_a_host_that_is_away_is_passed_over(amqp_rig: AmqpRig) -> None:
    hosts = f"127.0.0.1:1,127.0.0.1:{amqp_rig.broker.port}"
    sink = open_sink(f"amqp://guest:guest@{hosts}?exchange={amqp_rig.name}", SinkContext(source=SOURCE))
    for _ in range(5):
        assert sink.publish([amqp_rig.event()]) == [Confirmed()]
        sink.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("amqp://h", "either exchange=.. or queue=.."),
        ("amqp://h?exchange=a&queue=b", "either exchange=.. or queue=.."),
        ("amqp://h?queue=b&routing_key=c", "no routing_key"),
        ("amqp://h?exchange=a&routing_key={kind}", "{kind}"),
        ("amqp://h?exchange=a&mandatory=false", "mandatory"),
        ("amqp://h?exchange=a&durable=maybe", "durable=maybe"),
        ("amqp://h?queue=", "names no queue"),
    ],
)
def test_a_url_that_says_too_little_or_too_much_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_sink(url, SinkContext(source=SOURCE))


def test_nothing_is_lost_or_inverted_under_network_faults_and_a_killed_server(
    amqp_rig: AmqpRig, dsn: str
) -> None:
    endure(amqp_rig, dsn, [*network_faults(amqp_rig), restart(amqp_rig)], drain_s=60)


def sink_at(rig: AmqpRig, options: str) -> Any:
    """Return a sink for another place of the same server."""
    return open_sink(f"amqp://127.0.0.1:{rig.broker.port}?{options}", SinkContext(source=SOURCE))


def full_and_free(rig: AmqpRig) -> Any:
    """Declare a queue that takes nothing more and one that takes all; return a sink that reaches each by its name."""
    rig.declare(f"{rig.name}-full", kind="classic", max_length=1, overflow="reject-publish")
    rig.declare(f"{rig.name}-free", kind="classic")
    with rig.channel() as channel:
        channel.queue_unbind(rig.name, rig.name, "#")
        for kind in ("full", "free"):
            channel.queue_bind(f"{rig.name}-{kind}", rig.name, kind)
    sink = rig.open(direct=True)
    eventually(lambda: isinstance(sink.publish([rig.event(event_type="full")])[0], Unavailable))
    sink.close()
    return sink


def spoiling(sink: Any) -> Any:
    """Return what makes messages, those of type `bad` with a property that no bytes stand for."""
    sound = sink._message

    def message(event: Event) -> Any:
        made = sound(event)
        if event.event_type == "bad":
            made[0].properties["timestamp"] = -1
        return made

    return message


def bind_only(rig: AmqpRig, pattern: str) -> None:
    """Route only this pattern to the queue."""
    with rig.channel() as channel:
        channel.queue_unbind(rig.name, rig.name, "#")
        channel.queue_bind(rig.name, rig.name, pattern)


def drained(sink: Any, events: Any) -> bool:
    """Tell whether everything was confirmed."""
    return not send(sink, events, deadline=LATER).unconfirmed
