"""Give a batch to a sink so that no aggregate is ever ahead of itself.

An ordered sink gets the whole batch. Any other gets it in waves: the k-th event of every aggregate in wave k,
and an aggregate leaves the batch at its first answer that is not "confirmed". Either way the order of first
occurrences holds with any number of relays at work on the same rows, stale ones included.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relay.event import HELD, Confirmed, Event, Receipt, Rejected, Unavailable
from relay.sinks import Sink, SinkUnavailable


@dataclass(slots=True, kw_only=True)
class Sent:
    """What became of a batch. `down` is why nothing more can be sent now, None while the sink answers.

    `fault` is the traceback of a sink that broke.
    """

    confirmed: list[int] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)
    unanswered: dict[int, Unavailable] = field(default_factory=dict)
    unconfirmed: list[Event] = field(default_factory=list)
    down: str | None = None
    fault: str | None = None
    retry_after: float | None = None

    @property
    def answered(self) -> bool:
        """Tell whether the sink said yes or no to anything."""
        return bool(self.confirmed or self.rejected)


def send(sink: Sink, events: Sequence[Event], *, deadline: float) -> Sent:
    """Publish events that stand in id order; no new wave begins after `deadline` (monotonic seconds).

    What a broken sink raises is SinkUnavailable to the caller: nothing is known, nothing is spent.
    """
    sent = Sent()
    if sink.ordered:
        wave(sink, events, sent)
        return sent
    chains: dict[str, list[Event]] = {}
    for event in events:
        chains.setdefault(event.key, []).append(event)
    place = 0
    while chains:
        if sent.down is not None or time.monotonic() >= deadline:
            for chain in chains.values():
                sent.unconfirmed.extend(chain[place:])
            break
        heads = [chain[place] for chain in chains.values()]
        receipts = wave(sink, heads, sent)
        place += 1
        going: dict[str, list[Event]] = {}
        for (key, chain), receipt in zip(chains.items(), receipts, strict=True):
            if not isinstance(receipt, Confirmed):
                sent.unconfirmed.extend(chain[place:])
            elif place < len(chain):
                going[key] = chain
        chains = going
    return sent


def wave(sink: Sink, events: Sequence[Event], sent: Sent) -> Sequence[Receipt]:
    """Give events to a sink in one call and note the answers in `sent`; return one receipt for each."""
    try:
        receipts = sink.publish(events)
    except SinkUnavailable as error:
        sent.down, sent.retry_after = error.problem, error.retry_after
        receipts = [HELD] * len(events)
    except Exception as error:  # noqa: BLE001 - a broken sink must not stop the relay, nor one event all others
        sent.fault = "".join(traceback.format_exception(error))
        receipts = _one_by_one(sink, events, sent) if len(events) > 1 else [_broken(sink, error)]
    if len(receipts) != len(events):
        sent.down = f"a fault of {sink.name}: {len(receipts)} receipts for {len(events)} events"
        receipts = [HELD] * len(events)
    for event, receipt in zip(events, receipts, strict=True):
        if isinstance(receipt, Confirmed):
            sent.confirmed.append(event.id)
            continue
        sent.unconfirmed.append(event)
        if isinstance(receipt, Rejected):
            sent.rejected[event.id] = receipt.reason
        elif isinstance(receipt, Unavailable):
            sent.unanswered[event.id] = receipt
    return receipts


def _one_by_one(sink: Sink, events: Sequence[Event], sent: Sent) -> Sequence[Receipt]:
    """Find the event that breaks the sink: each alone, an aggregate up to the first not confirmed."""
    receipts: list[Receipt] = []
    stopped: set[str] = set()
    for event in events:
        receipt: Receipt = HELD
        if event.key not in stopped and sent.down is None:
            try:
                (receipt,) = sink.publish([event])
            except SinkUnavailable as error:
                sent.down, sent.retry_after = error.problem, error.retry_after
            except Exception as error:  # noqa: BLE001 - this is the one, or one of them
                receipt = _broken(sink, error)
        if not isinstance(receipt, Confirmed):
            stopped.add(event.key)
        receipts.append(receipt)
    return receipts


def _broken(sink: Sink, error: Exception) -> Unavailable:
    return Unavailable(f"sink {sink.name} broke: {type(error).__name__}: {error}")


def no_answer(unanswered: Mapping[int, Unavailable]) -> tuple[str, float | None]:
    """Return why a sink that answered nothing is down, and the longest wait it asked for."""
    waits = [u.retry_after for u in unanswered.values() if u.retry_after is not None]
    return next(iter(unanswered.values())).reason, max(waits, default=None)
