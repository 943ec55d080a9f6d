"""NATS JetStream: what can go wrong with it, on a real server."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pgqueue.errors import ConfigError
from relay.event import Confirmed, Rejected, Unavailable
from relay.send import send
from relay.sinks import SinkContext, SinkUnavailable, nats_link, open_sink
from tests.sinks.broker_rigs import NatsRig
from tests.sinks.events import SOURCE, attempt
from tests.sinks.ordeal import endure, network_faults, restart
from tests.waiting import eventually

LATER = float("inf")


def test_a_message_carries_the_attributes_as_headers(nats_rig: NatsRig) -> None:
    nats_rig.sink.publish([nats_rig.event('order "7" é', '{"id": 7}')])
    (message,) = nats_rig.messages()
    assert message.subject == f"{nats_rig.name}.order.placed"
    assert message.data == b'{"id": 7}'
    assert message.headers == {
        "Nats-Msg-Id": "outbox:1",
        "Nats-Expected-Stream": nats_rig.name,
        "content-type": "application/json",
        "ce-specversion": "1.0",
        "ce-id": "outbox:1",
        "ce-source": SOURCE,
        "ce-type": "order.placed",
        "ce-time": "2030-01-02T03:04:05.000000Z",
        "ce-subject": "order/order%20%227%22%20%C3%A9",
        "ce-partitionkey": "order%20%227%22%20%C3%A9",
        "ce-sequence": "0000000000000000001",
        "ce-traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }


@pytest.mark.parametrize(
    ("event_type", "aggregate", "subject"),
    [
        ("order.placed", "order-1", "order.placed.order-1"),
        ("order placed", "a.b", "order%20placed.a%2Eb"),
        (".order.", "*", "%2Eorder%2E.%2A"),
        ("é", None, "%C3%A9.-"),
        ("a>", "", "a%3E.-"),
    ],
)
def test_what_a_subject_may_not_hold_is_written_in_percents(
    nats_rig: NatsRig, event_type: str, aggregate: str | None, subject: str
) -> None:
    sink = sink_at(nats_rig, f"{nats_rig.name}.{{event_type}}.{{aggregate_id}}")
    assert sink.publish([nats_rig.event(aggregate, event_type=event_type)]) == [Confirmed()]
    (message,) = nats_rig.messages()
    assert message.subject == f"{nats_rig.name}.{subject}"
    sink.close()


def test_a_repetition_within_the_window_counts_as_confirmed_and_is_not_stored(nats_rig: NatsRig) -> None:
    event = nats_rig.event()
    assert [nats_rig.sink.publish([event]) for _ in range(3)] == [[Confirmed()]] * 3
    assert len(nats_rig.messages()) == 1


def test_the_same_number_from_another_outbox_is_no_repetition(nats_rig: NatsRig) -> None:
    other = nats_rig.open(source="/outbox/other shop")
    event = nats_rig.event()
    assert nats_rig.sink.publish([event]) == [Confirmed()]
    assert other.publish([event]) == [Confirmed()]
    assert other.publish([event]) == [Confirmed()]
    assert [m.headers["ce-source"] for m in nats_rig.messages()] == [SOURCE, "/outbox/other%20shop"]
    assert {m.headers["ce-id"] for m in nats_rig.messages()} == {"outbox:1"}
    other.close()


def test_a_repetition_that_cannot_be_looked_at_is_stored_rather_than_lost(nats_rig: NatsRig) -> None:
    event = nats_rig.event()
    nats_rig.sink.publish([event])

    async def consume(js: Any) -> None:
        await js.purge_stream(nats_rig.name)

    nats_rig.ask(consume)
    assert nats_rig.sink.publish([event]) == [Confirmed()]
    assert [m.headers["Nats-Msg-Id"] for m in nats_rig.messages()] == [f"outbox:1@{SOURCE}"]


def test_a_subject_without_a_stream_is_an_error_that_says_what_to_do(nats_rig: NatsRig) -> None:
    sink = sink_at(nats_rig, "nobody.{event_type}")
    (receipt,) = sink.publish([nats_rig.event()])
    assert isinstance(receipt, Unavailable)
    assert "no stream takes the subject nobody.order.placed: create one" in receipt.reason
    sink.close()


def test_a_message_for_another_stream_than_expected_is_not_stored(nats_rig: NatsRig) -> None:
    sink = sink_at(nats_rig, f"{nats_rig.name}.x?stream=another")
    (receipt,) = sink.publish([nats_rig.event()])
    assert isinstance(receipt, Unavailable)
    assert "expected stream" in receipt.reason
    assert not nats_rig.messages()
    sink.close()


def test_a_message_over_the_servers_limit_is_refused_before_it_is_sent(nats_rig: NatsRig) -> None:
    sent = send(nats_rig.sink, [nats_rig.event("a", bad=True), nats_rig.event("b")], deadline=LATER)
    assert "max_payload" in sent.rejected[1]
    assert sent.confirmed == [2]


def test_headers_count_for_the_servers_limit(nats_rig: NatsRig) -> None:
    event = nats_rig.event("a" * 2000, '"' + "x" * (1_048_576 - 2500) + '"')
    (receipt,) = nats_rig.sink.publish([event])
    assert isinstance(receipt, Rejected)
    assert nats_rig.sink.publish([nats_rig.event()]) == [Confirmed()]


def test_a_message_over_the_streams_limit_is_refused(nats_rig: NatsRig) -> None:
    change(nats_rig, max_msg_size=1000)
    big, small = nats_rig.event("a", '"' + "x" * 2000 + '"'), nats_rig.event("b")
    refused, stored = nats_rig.sink.publish([big, small])
    assert isinstance(refused, Rejected)
    assert "message size exceeds maximum allowed" in refused.reason
    assert stored == Confirmed()


def test_a_full_stream_spends_no_attempt(nats_rig: NatsRig) -> None:
    change(nats_rig, max_msgs=1, discard="new")
    stored, waits = nats_rig.sink.publish([nats_rig.event("a"), nats_rig.event("b")])
    assert stored == Confirmed()
    assert isinstance(waits, Unavailable)
    assert "maximum messages exceeded" in waits.reason


def test_a_subject_too_long_for_the_protocol_is_refused_and_the_connection_stays(nats_rig: NatsRig) -> None:
    sink = sink_at(nats_rig, f"{nats_rig.name}.{{aggregate_id}}")
    refused, stored = sink.publish([nats_rig.event("x" * 5000), nats_rig.event("b")])
    assert isinstance(refused, Rejected)
    assert stored == Confirmed()
    sink.close()


def test_more_than_a_window_of_events_is_confirmed(nats_rig: NatsRig) -> None:
    events = [nats_rig.event(str(i)) for i in range(2500)]
    assert nats_rig.sink.publish(events) == [Confirmed()] * 2500
    assert len(nats_rig.messages()) == 2500


def test_a_frozen_server_is_given_up_within_the_send_timeout(nats_rig: NatsRig) -> None:
    sink = nats_rig.open(send_timeout=0.5)
    before, event = nats_rig.event(), nats_rig.event()
    eventually(lambda: attempt(sink, before) == Confirmed())
    nats_rig.proxy.freeze()
    assert isinstance(attempt(sink, event), Unavailable)
    sink.close()
    with pytest.raises(SinkUnavailable, match="no connection"):
        sink.publish([event])
    nats_rig.proxy.heal()
    eventually(lambda: attempt(sink, event) == Confirmed())
    sink.close()


def test_no_thread_is_left_behind_by_a_closed_sink(nats_rig: NatsRig) -> None:
    import threading

    before = set(threading.enumerate())
    sink = nats_rig.open(direct=True)
    sink.publish([nats_rig.event()])
    assert len(set(threading.enumerate()) - before) == 1
    sink.close()
    eventually(lambda: not set(threading.enumerate()) - before)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nats://h", "no subject"),
        ("nats://h/s.{kind}", "{kind}"),
        ("nats://h/s?streem=x", "streem"),
        ("nats://h/s?tls=perhaps", "tls=perhaps"),
        ("nats://h:port/s", "host:port"),
        ("nats://a..b/s", "host:port"),
        ("nats", "^sink nats: has no host; write nats://host/"),
        ("nats://h/shop.*", "no subject to publish to"),
        ("nats://h/shop.>", "no subject to publish to"),
        ("nats://h/*.{event_type}", "no subject to publish to"),
        ("nats://h/.a", "no subject to publish to"),
        ("nats://h/a..{part}", "no subject to publish to"),
        ("nats://h/a.", "no subject to publish to"),
    ],
)
def test_a_url_that_says_too_little_or_too_much_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_sink(url, SinkContext(source=SOURCE))


def test_nothing_is_lost_or_inverted_under_network_faults_and_a_killed_server(
    nats_rig: NatsRig, dsn: str
) -> None:
    endure(nats_rig, dsn, [*network_faults(nats_rig), restart(nats_rig)])


def sink_at(rig: NatsRig, place: str) -> Any:
    """Return a sink for another subject of the same server."""
    return open_sink(f"nats://127.0.0.1:{rig.broker.port}/{place}", SinkContext(source=SOURCE))


def change(rig: NatsRig, **settings: Any) -> None:
    """Change the settings of the stream."""
    from nats.js.api import DiscardPolicy

    if "discard" in settings:
        settings["discard"] = DiscardPolicy(settings["discard"])

    async def update(js: Any) -> None:
        info = await js.stream_info(rig.name)
        await js.update_stream(info.config.evolve(**settings))

    rig.ask(update)


def test_a_thread_that_does_not_answer_keeps_nobody_from_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_link, "CLOSE_S", 0.05)
    thread, held = nats_link.LoopThread(), threading.Event()
    thread._loop.call_soon_threadsafe(held.wait)
    thread.stop(None)
    held.set()
    eventually(lambda: not thread._thread.is_alive())
    thread._loop.close()
