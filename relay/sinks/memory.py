"""An in-process sink for tests: accepts, rejects, is away, stalls, or loses its reply, as told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from relay.event import CONFIRMED, HELD, Event, Receipt, Rejected, Unavailable
from relay.sinks import SinkUnavailable

Rule = Callable[[Event], str | None]


class MemorySink:
    """Keeps what it accepted, in order, repetitions included.

    `reject(event)` returns why it refuses an event, `mute(event)` why it does not answer for one; None lets it pass.
    While `away` is set, nothing is accepted. While `stalled` is
    set, publish blocks. `lose_replies` accepts that many calls and then says that it was away.
    """

    name = "memory"
    marks = False

    def __init__(
        self, *, ordered: bool = False, reject: Rule | None = None, mute: Rule | None = None
    ) -> None:
        self.ordered = ordered
        self.reject = reject
        self.mute = mute
        self.accepted: list[Event] = []
        self.calls = 0
        self.closed = 0
        self.lose_replies = 0
        self.away = threading.Event()
        self.stalled = threading.Event()
        self.in_publish = threading.Event()
        self._go_on = threading.Event()

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Accept the events as told."""
        self.calls += 1
        self.in_publish.set()
        while self.stalled.is_set():
            self._go_on.wait(0.01)
        self.in_publish.clear()
        if self.away.is_set():
            raise SinkUnavailable(self.name, "away")
        receipts: list[Receipt] = []
        stopped: set[str] = set()
        for event in events:
            if event.key in stopped:
                receipts.append(HELD)
            elif self.reject and (reason := self.reject(event)) is not None:
                receipts.append(Rejected(reason))
                stopped.add(event.key)
            elif self.mute and (reason := self.mute(event)) is not None:
                receipts.append(Unavailable(reason))
                stopped.add(event.key)
            else:
                self.accepted.append(event)
                receipts.append(CONFIRMED)
        if self.lose_replies > 0:
            self.lose_replies -= 1
            raise SinkUnavailable(self.name, "the reply was lost")
        return receipts

    def resume(self) -> None:
        """End a stall and an absence."""
        self.away.clear()
        self.stalled.clear()
        self._go_on.set()

    def close(self) -> None:
        """Count the call."""
        self.closed += 1
