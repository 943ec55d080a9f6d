"""An outbox event, before it is written and after it is read, and what a sink answers.

An event travels as a CloudEvents 1.0 event (https://github.com/cloudevents/spec): `attributes` gives its
context attributes for brokers that carry headers, `structured` the JSON envelope for those that do not. The
key `outbox:<id>` is the same in every delivery: consumers drop repetitions by (source, key).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

#: Sequence numbers are compared as text, so they have one width: that of the largest bigint.
SEQUENCE_DIGITS: Final = 19

#: Headers of a copy that a replay made: the key of the event, and when it happened.
REPLAY_HEADERS: Final = frozenset({"replay_of", "replay_time"})

_encode = msgspec.json.Encoder().encode
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)
_EXTENSION = re.compile(r"[a-z0-9]{1,20}")
_RESERVED = frozenset(
    {
        "specversion",
        "id",
        "source",
        "type",
        "subject",
        "partitionkey",
        "sequence",
        "time",
        "datacontenttype",
        "data",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """An event to write; None as aggregate means that it has no order."""

    event_type: str
    payload: Any
    aggregate_id: object = None
    aggregate_type: str | None = None
    version: int | None = None
    headers: Mapping[str, Any] | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event as read from the outbox. `payload` is JSON text, exactly as the broker is to get it.

    `key` is what orders it: the aggregate, or its own id where there is none. `attempts` counts rejections.
    """

    id: int
    part: int
    key: str
    aggregate_id: str | None
    version: int | None
    event_type: str
    payload: str
    aggregate_type: str | None
    headers: Mapping[str, Any]
    created_at: datetime
    attempts: int

    @property
    def idempotency_key(self) -> str:
        """Return the key that every delivery of this event carries."""
        return f"outbox:{self.id}"


class Confirmed(msgspec.Struct, frozen=True):
    """The sink has the event for good."""


class Rejected(msgspec.Struct, frozen=True):
    """The sink will not take this event as it is; another event may pass. Spends an attempt."""

    reason: str


class Unavailable(msgspec.Struct, frozen=True):
    """No answer, or one that says "later": nobody knows whether the sink has the event. Spends no attempt.

    `retry_after` as that of `SinkUnavailable`.
    """

    reason: str
    retry_after: float | None = None


class Held(msgspec.Struct, frozen=True):
    """Not sent: an earlier event of its aggregate was not confirmed, or the time of the batch was over."""


Receipt = Confirmed | Rejected | Unavailable | Held

CONFIRMED: Final = Confirmed()
HELD: Final = Held()


def attributes(event: Event, source: str) -> dict[str, str]:
    """Return the CloudEvents context attributes of an event, in the order in which they are written.

    Headers of the event whose name CloudEvents allows and whose value is text follow as extensions
    (traceparent and tracestate are such).
    """
    context = {
        "specversion": "1.0",
        "id": event.idempotency_key,
        "source": source,
        "type": event.event_type,
        "time": _time(event.created_at),
        "datacontenttype": "application/json",
    }
    if event.aggregate_id:
        typed = event.aggregate_type
        context["subject"] = f"{typed}/{event.aggregate_id}" if typed else event.aggregate_id
        context["partitionkey"] = event.aggregate_id
    if event.version is not None and event.version >= 0:
        context["sequence"] = f"{event.version:0{SEQUENCE_DIGITS}}"
    if not event.headers:
        return context
    extensions = {
        name: value
        for name, value in event.headers.items()
        if isinstance(value, str) and name not in _RESERVED and _EXTENSION.fullmatch(name)
    }
    if isinstance(replayed := event.headers.get("replay_of"), str):
        # A copy of history: `time` stays that of the event. CloudEvents allows no underscore in a name.
        extensions["replayof"] = replayed
        if _is_time(happened := event.headers.get("replay_time")):
            context["time"] = str(happened)
    return context | extensions


def _is_time(value: Any) -> bool:
    """Tell whether a value is a time as CloudEvents writes it (RFC 3339); plain SQL may write any header."""
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


def _time(at: datetime) -> str:
    """Return a time in UTC, always with six digits behind the second."""
    if at.microsecond:  # the encoder leaves out zeros, and takes a hundredth of the time
        return _encode(at.astimezone(UTC))[1:-1].decode()
    return at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def structured(event: Event, source: str) -> bytes:
    """Return the event as one CloudEvents JSON object; the payload stands in it as it was read."""
    return _encode(attributes(event, source) | {"data": msgspec.Raw(event.payload.encode())})
