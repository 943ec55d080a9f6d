"""Waves: no aggregate is ever ahead of itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from relay.event import CONFIRMED, Event, Receipt, Unavailable
from relay.send import send
from relay.sinks import SinkUnavailable
from relay.sinks.memory import MemorySink
from tests.unit.test_relay_event import event

LATER = float("inf")


def events(*keys: str) -> list[Event]:
    """Return one event per key, with rising ids."""
    return [event(id=i, key=key, aggregate_id=key) for i, key in enumerate(keys, 1)]


class Scripted:
    """A sink whose publish is a function."""

    name = "scripted"
    marks = False

    def __init__(
        self, publish: Callable[[Sequence[Event]], Sequence[Receipt]], *, ordered: bool = False
    ) -> None:
        self.ordered = ordered
        self.calls: list[list[int]] = []
        self._publish = publish

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Note the ids, then do as told."""
        self.calls.append([e.id for e in events])
        return self._publish(events)

    def close(self) -> None:
        """Do nothing."""


def test_wave_k_holds_the_kth_event_of_every_aggregate() -> None:
    sink = Scripted(lambda batch: [CONFIRMED] * len(batch))
    sent = send(sink, events("a", "b", "a", "a", "c"), deadline=LATER)
    assert sink.calls == [[1, 2, 5], [3], [4]]
    assert sorted(sent.confirmed) == [1, 2, 3, 4, 5]
    assert not sent.unconfirmed


def test_an_ordered_sink_gets_the_whole_batch() -> None:
    sink = Scripted(lambda batch: [CONFIRMED] * len(batch), ordered=True)
    send(sink, events("a", "a", "b"), deadline=LATER)
    assert sink.calls == [[1, 2, 3]]


def test_an_aggregate_leaves_the_batch_at_its_first_rejection() -> None:
    sink = MemorySink(reject=lambda e: "no" if e.id == 3 else None)
    sent = send(sink, events("a", "b", "a", "b", "a"), deadline=LATER)
    assert sent.rejected == {3: "no"}
    assert [e.id for e in sink.accepted] == [1, 2, 4]
    assert [e.id for e in sent.unconfirmed] == [3, 5]


def test_a_broker_that_goes_away_in_the_second_wave_keeps_what_the_first_confirmed() -> None:
    def publish(batch: Sequence[Event]) -> Sequence[Receipt]:
        if batch[0].id > 2:
            raise SinkUnavailable("scripted", "gone", retry_after=3)
        return [CONFIRMED] * len(batch)

    sent = send(Scripted(publish), events("a", "b", "a", "b", "a"), deadline=LATER)
    assert sent.confirmed == [1, 2]
    assert sorted(e.id for e in sent.unconfirmed) == [3, 4, 5]
    assert (sent.down, sent.retry_after) == ("gone", 3)
    assert not sent.rejected


def test_no_wave_begins_after_the_deadline() -> None:
    sink = MemorySink()
    sent = send(sink, events("a", "a"), deadline=time.monotonic() - 1)
    assert not sink.accepted
    assert [e.id for e in sent.unconfirmed] == [1, 2]


def test_an_event_without_an_answer_stops_only_its_aggregate() -> None:
    sink = Scripted(lambda batch: [Unavailable("late", 5.0) if e.id == 1 else CONFIRMED for e in batch])
    sent = send(sink, events("a", "b", "a", "b"), deadline=LATER)
    assert sent.unanswered == {1: Unavailable("late", 5.0)}
    assert sent.confirmed == [2, 4]
    assert sent.down is None


@pytest.mark.parametrize("ordered", [False, True])
def test_an_event_that_breaks_the_sink_stops_only_its_aggregate(ordered: bool) -> None:
    def publish(batch: Sequence[Event]) -> Sequence[Receipt]:
        if any(e.id == 2 for e in batch):
            raise TypeError("cannot encode")
        return [CONFIRMED] * len(batch)

    sink = Scripted(publish, ordered=ordered)
    sent = send(sink, events("a", "b", "b", "c"), deadline=LATER)
    assert sorted(sent.confirmed) == [1, 4]
    assert list(sent.unanswered) == [2]
    assert sorted(e.id for e in sent.unconfirmed) == [2, 3]
    assert "cannot encode" in (sent.fault or "")


def test_a_sink_that_answers_too_little_confirms_nothing() -> None:
    sent = send(Scripted(lambda _: [CONFIRMED]), events("a", "b"), deadline=LATER)
    assert not sent.confirmed
    assert len(sent.unconfirmed) == 2
    assert sent.down is not None
