"""How an event looks on the wire, and what may be written into the outbox."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from pydantic import BaseModel

from pgqueue.errors import BadOption, BadPayload
from relay import NewEvent, Outbox
from relay.event import Event, attributes, structured


def event(**changed: Any) -> Event:
    """Return an event with some fields changed."""
    values: dict[str, Any] = {
        "id": 12,
        "part": 3,
        "key": "8842",
        "aggregate_id": "8842",
        "version": 7,
        "event_type": "order.placed",
        "payload": '{"b": 1, "a": 1.0}',
        "aggregate_type": "order",
        "headers": {},
        "created_at": datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=timezone(timedelta(hours=3))),
        "attempts": 0,
    }
    return Event(**(values | changed))


def test_attributes_are_those_of_cloudevents_1_0() -> None:
    assert attributes(event(), "/outbox/shop") == {
        "specversion": "1.0",
        "id": "outbox:12",
        "source": "/outbox/shop",
        "type": "order.placed",
        "time": "2030-01-02T00:04:05.000678Z",
        "datacontenttype": "application/json",
        "subject": "order/8842",
        "partitionkey": "8842",
        "sequence": "0000000000000000007",
    }


def test_a_time_always_has_six_digits_behind_the_second() -> None:
    for microsecond, digits in ((0, "000000"), (500_000, "500000"), (1, "000001")):
        at = datetime(2030, 1, 2, 3, 4, 5, microsecond, tzinfo=UTC)
        assert attributes(event(created_at=at), "/s")["time"] == f"2030-01-02T03:04:05.{digits}Z"


def test_an_event_without_aggregate_has_no_subject_and_no_partition_key() -> None:
    seen = attributes(event(aggregate_id=None, key="12", version=None), "/s")
    assert not {"subject", "partitionkey", "sequence"} & seen.keys()


def test_sequences_of_one_aggregate_sort_as_text_like_numbers() -> None:
    versions = [0, 9, 10, 99, 2**63 - 1]
    texts = [attributes(event(version=v), "/s")["sequence"] for v in versions]
    assert texts == sorted(texts)


def test_headers_become_extensions_only_under_names_that_cloudevents_allows() -> None:
    given = {
        "traceparent": "00-a",
        "tracestate": "b",
        "Not-Allowed": "x",
        "id": "forged",
        "n": 3,
        "data": "x",
    }
    seen = attributes(event(headers=given), "/s")
    assert seen["id"] == "outbox:12"
    assert (seen["traceparent"], seen["tracestate"]) == ("00-a", "b")
    assert not {"Not-Allowed", "n", "data"} & seen.keys()


@pytest.mark.parametrize(
    "odd", ["yesterday", "", 5, None, "2030-13-02T03:04:05Z", "2030-01-02", "2030-01-02T03:04:05"]
)
def test_a_copy_keeps_the_time_of_its_event_and_takes_nothing_else_for_one(odd: Any) -> None:
    plain = attributes(event(), "/s")["time"]
    copy = {"replay_of": "outbox:3", "replay_time": "2030-01-02T03:04:05.678901Z"}
    assert attributes(event(headers=copy), "/s")["time"] == "2030-01-02T03:04:05.678901Z"
    assert attributes(event(headers=copy | {"replay_time": odd}), "/s")["time"] == plain


def test_the_structured_form_carries_the_payload_as_it_was_read() -> None:
    line = structured(event(), "/s")
    assert line.endswith(b'"data":{"b": 1, "a": 1.0}}')
    assert json.loads(line)["id"] == "outbox:12"


@dataclass
class Order:
    """A payload."""

    order_id: int
    at: datetime


class Total(msgspec.Struct):
    """A payload."""

    amount: Decimal


class Customer(BaseModel):
    """A payload."""

    name: str


class Nowhere:
    """A handle that must not be reached."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("the handle was used")


def written(payload: Any, **options: Any) -> None:
    """Try to write an event on a handle that must not be reached."""
    Outbox().add(Nowhere(), "order.placed", payload, **options)


@pytest.mark.parametrize(
    "payload",
    [
        "a\0b",
        {"k\0": 1},
        {"text": "\ud800"},
        float("nan"),
        {"x": [float("inf")]},
        {"x": object()},
        {"x": "y" * 1_048_577},
        Order(order_id=1, at="\0"),  # type: ignore[arg-type]
    ],
    ids=[
        "NUL",
        "NUL in a key",
        "lone surrogate",
        "NaN",
        "infinity",
        "no JSON form",
        "too large",
        "NUL in a field",
    ],
)
def test_what_postgres_could_not_store_is_refused_before_the_insert(payload: Any) -> None:
    with pytest.raises(BadPayload, match=r"order\.placed"):
        written(payload)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"aggregate_id": ""}, "aggregate_id"),
        ({"aggregate_id": "a\0"}, "aggregate_id"),
        ({"aggregate_id": "\udfff"}, "aggregate_id"),
        ({"aggregate_id": "x" * 513}, "aggregate_id"),
        ({"aggregate_id": 1.5}, "aggregate_id"),
        ({"aggregate_id": True}, "aggregate_id"),
        ({"aggregate_type": " "}, "aggregate_type"),
        ({"version": -1}, "version"),
        ({"version": 2**63}, "version"),
        ({"version": "7"}, "version"),
        ({"headers": ["a"]}, "headers"),
        ({"headers": {1: "a"}}, "headers"),
        ({"headers": {"replay_of": "outbox:1"}}, "replay_of"),
        ({"headers": {"replay_time": "2030-01-02T03:04:05Z"}}, "replay_time"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(BadOption, match=named):
        written({}, **options)


@pytest.mark.parametrize("event_type", ["", "  ", "x" * 201, None])
def test_an_event_needs_a_type(event_type: Any) -> None:
    with pytest.raises(BadOption, match="event_type"):
        Outbox().add(Nowhere(), event_type, {})


def test_one_bad_event_refuses_the_whole_add_many() -> None:
    good, bad = (NewEvent(event_type="e", payload=value) for value in (1, float("nan")))
    with pytest.raises(BadPayload):
        Outbox().add_many(Nowhere(), [good, bad])


@pytest.mark.parametrize(
    ("payload", "stored"),
    [
        (
            Order(order_id=1, at=datetime(2030, 1, 1, tzinfo=UTC)),
            '{"order_id":1,"at":"2030-01-01T00:00:00Z"}',
        ),
        (Total(amount=Decimal("1.10")), '{"amount":"1.10"}'),
        (Customer(name="é"), '{"name":"é"}'),
        ([None, "\\u0000"], '[null,"\\\\u0000"]'),
    ],
    ids=["dataclass", "msgspec", "pydantic", "an escaped backslash is no NUL"],
)
def test_payloads_may_be_typed(payload: Any, stored: str) -> None:
    from relay.outbox import _columns

    columns = _columns(NewEvent(event_type="e", payload=payload, aggregate_id=UUID(int=5)))
    assert columns["payload"] == stored
    assert columns["aggregate_id"] == "00000000-0000-0000-0000-000000000005"
