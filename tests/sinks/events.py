"""Events that no database knows, and what is seen of them at the other end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from relay.event import Event, Receipt, Unavailable
from relay.sinks import Sink, SinkUnavailable

SOURCE = "/outbox/tests"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What stands at the other end."""

    key: str
    event_type: str
    aggregate: str | None
    payload: Any
    #: The context attributes of CloudEvents.
    context: Mapping[str, str] = field(default_factory=dict, compare=False)


def attempt(sink: Sink, event: Event) -> Receipt:
    """Publish one event; that the sink is away is no answer to it."""
    try:
        (receipt,) = sink.publish([event])
    except SinkUnavailable as away:
        return Unavailable(away.problem)
    return receipt


class Made:
    """Makes events that no database knows."""

    deduplicates = False
    #: Characters of the largest text that it has to take.
    large = 1_000_000

    def __init__(self) -> None:
        self.count = 0
        self.bad: set[str] = set()

    def event(
        self,
        aggregate: str | None = "order-1",
        payload: str = "{}",
        *,
        event_type: str = "order.placed",
        bad: bool = False,
    ) -> Event:
        """Return the next event; a bad one will be refused."""
        self.count += 1
        event = Event(
            id=self.count,
            part=0,
            key=aggregate if aggregate is not None else str(self.count),
            aggregate_id=aggregate,
            version=self.count,
            event_type=event_type,
            payload=payload,
            aggregate_type="order",
            headers={"traceparent": TRACEPARENT},
            created_at=datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
            attempts=0,
        )
        if bad:
            self.bad.add(event.idempotency_key)
        return event
