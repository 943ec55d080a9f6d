"""What every sink does, whatever stands behind it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from datetime import datetime

import msgspec
import pytest

from relay.event import Confirmed, Event, Held, Receipt, Rejected, Unavailable, attributes
from relay.send import send
from relay.sinks import SinkUnavailable
from tests.sinks.conftest import Rig
from tests.sinks.events import SOURCE
from tests.waiting import eventually

LATER = float("inf")


def publish_once(rig: Rig, events: Sequence[Event]) -> Sequence[Receipt]:
    """Publish as the relay would: whole batches only to a sink that keeps the order itself."""
    if rig.sink.ordered:
        return rig.sink.publish(events)
    return [receipt for event in events for receipt in rig.sink.publish([event])]


def publish(rig: Rig, events: Sequence[Event]) -> Sequence[Receipt]:
    """Publish, again where a broker that stalls gave no connection, as the relay does; nothing was sent then."""

    def sent() -> Sequence[Receipt] | None:
        try:
            return publish_once(rig, events)
        except SinkUnavailable as away:
            if "no connection" not in away.problem:
                raise
            return None

    return eventually(sent)


def test_an_event_arrives_with_its_key_type_aggregate_and_payload(rig: Rig) -> None:
    event = rig.event(
        "order-7", '{"id": 7, "total": 12.5, "lines": [null, true, "é"]}', event_type="order.placed"
    )
    assert publish(rig, [event]) == [Confirmed()]
    (arrived,) = rig.arrived()
    assert arrived.key == event.idempotency_key
    assert (arrived.event_type, arrived.aggregate) == ("order.placed", "order-7")
    assert arrived.payload == {"id": 7, "total": 12.5, "lines": [None, True, "é"]}


def test_every_attribute_of_cloudevents_arrives(rig: Rig) -> None:
    event = rig.event("order-é 1")
    assert rig.sink.publish([event]) == [Confirmed()]
    (one,) = rig.arrived()
    assert one.context == attributes(event, SOURCE)
    assert one.context["source"] == SOURCE
    assert one.context["subject"] == "order/order-é 1"
    assert one.context["partitionkey"] == "order-é 1"
    assert one.context["sequence"] == f"{event.version:019}"
    assert one.context["traceparent"] == event.headers["traceparent"]


def test_there_is_one_receipt_for_each_event_in_the_order_given(rig: Rig) -> None:
    events = [rig.event(f"order-{i}") for i in range(20)]
    assert publish(rig, events) == [Confirmed()] * 20
    assert {a.key for a in rig.arrived()} == {e.idempotency_key for e in events}


def test_an_empty_batch_is_no_trouble(rig: Rig) -> None:
    assert list(rig.sink.publish([])) == []


def test_the_events_of_one_aggregate_arrive_in_order(rig: Rig) -> None:
    events = [rig.event(f"order-{i % 3}", json.dumps({"i": i})) for i in range(60)]
    assert not send(rig.sink, events, deadline=LATER).unconfirmed
    arrived = rig.arrived()
    for aggregate in ("order-0", "order-1", "order-2"):
        places = [a.payload["i"] for a in arrived if a.aggregate == aggregate]
        assert places == sorted(places)
        assert len(places) == 20


def test_an_event_without_an_aggregate_is_published(rig: Rig) -> None:
    assert publish(rig, [rig.event(None)]) == [Confirmed()]
    assert rig.arrived()[0].aggregate is None


@pytest.mark.parametrize(
    "payload",
    ["null", "0", '""', "[]", '{"a": 123456789012345678901234567890}', '{"é😀": "\\" \\\\ \\n \\u2028"}'],
)
def test_any_json_payload_arrives_as_it_was(rig: Rig, payload: str) -> None:
    assert publish(rig, [rig.event("order-1", payload)]) == [Confirmed()]
    assert rig.arrived()[0].payload == json.loads(payload)


@pytest.mark.parametrize(
    "aggregate", ["a b", "é😀", 'quote " percent % slash / colon :', "line\nbreak\r\n x: y", "x" * 500]
)
def test_any_aggregate_id_arrives_as_it_was(rig: Rig, aggregate: str) -> None:
    assert publish(rig, [rig.event(aggregate)]) == [Confirmed()]
    assert rig.arrived()[0].aggregate == aggregate


@pytest.mark.parametrize("at", ["0001-01-03T00:00:00", "1969-12-31T23:00:00", "9999-12-29T00:00:00"])
def test_an_event_of_any_time_that_the_relay_reads_arrives_with_it(rig: Rig, at: str) -> None:
    odd = msgspec.structs.replace(rig.event("order-1"), created_at=datetime.fromisoformat(f"{at}Z"))
    assert publish(rig, [odd, rig.event("order-2")]) == [Confirmed()] * 2
    times = [a.context["time"] for a in rig.arrived() if a.key == odd.idempotency_key]
    assert times == [f"{at}.000000Z"]


def test_a_megabyte_arrives_or_what_the_broker_takes_at_most(rig: Rig) -> None:
    payload = json.dumps({"text": "x" * rig.large})
    assert publish(rig, [rig.event("order-1", payload)]) == [Confirmed()]
    assert rig.arrived()[0].payload == json.loads(payload)


def test_a_rejected_event_stops_its_aggregate_and_no_other(rig: Rig) -> None:
    if not rig.rejects:
        pytest.skip("this sink refuses nothing")
    bad = rig.event("order-1", bad=True)
    behind = rig.event(bad.aggregate_id)
    other = rig.event("order-2")
    sent = send(rig.sink, [bad, behind, other], deadline=LATER)
    assert sent.confirmed == [other.id]
    assert list(sent.rejected) == [bad.id]
    assert sent.rejected[bad.id]
    assert [e.id for e in sorted(sent.unconfirmed, key=lambda e: e.id)] == [bad.id, behind.id]
    assert [a.key for a in rig.arrived()] == [other.idempotency_key]


def test_a_broker_that_is_away_is_not_a_rejection(rig: Rig) -> None:
    events = [rig.event("order-1"), rig.event("order-1"), rig.event("order-2")]
    rig.go_away()
    receipts: Sequence[Receipt] = [Held()]
    with contextlib.suppress(SinkUnavailable):
        receipts = publish_once(rig, events)
    assert all(isinstance(r, Unavailable | Held) for r in receipts)
    assert not any(isinstance(r, Confirmed | Rejected) for r in receipts)
    if rig.goes_away:
        rig.sink.close()
        rig.come_back()
        assert not rig.arrived()
        eventually(lambda: not send(rig.sink, events, deadline=LATER).unconfirmed)
        assert [a.key for a in rig.arrived() if a.aggregate == "order-1"] == [
            e.idempotency_key for e in events[:2]
        ]


def test_a_closed_sink_opens_again_at_the_next_publish(rig: Rig) -> None:
    publish(rig, [rig.event("order-1")])
    rig.sink.close()
    rig.sink.close()
    assert publish(rig, [rig.event("order-2")]) == [Confirmed()]
    assert len(rig.arrived()) == 2


def test_a_repetition_carries_the_same_key_or_is_dropped(rig: Rig) -> None:
    event = rig.event("order-1")
    assert publish(rig, [event]) == [Confirmed()]
    assert publish(rig, [event]) == [Confirmed()]
    assert {a.key for a in rig.arrived()} == {event.idempotency_key}
    assert len(rig.arrived()) == (1 if rig.deduplicates else 2)
