"""What a relay writes to the log: a line per change, a depth line now and then, never one per event."""

from __future__ import annotations

import logging
import math
import time
from threading import Lock
from typing import Final

from pgqueue.events import Bus, LoopFailed, LoopRecovered
from relay.events import (
    EventRejected,
    EventsDeferred,
    EventsPublished,
    OutboxSampled,
    PartitionsChanged,
    PartitionsLost,
    Pruned,
    RelayStarted,
    RelayStopped,
    SinkBack,
    SinkDown,
)

AGAIN_S: Final = 60.0

_log = logging.getLogger("relay")


class Report:
    """Subscribes to a bus. A broker or database that stays away is mentioned once a minute."""

    def __init__(self, bus: Bus) -> None:
        self._lock = Lock()
        self._published = 0
        self._since = time.monotonic()
        self._said: dict[str, float] = {}
        bus.subscribe(RelayStarted, self._started)
        bus.subscribe(RelayStopped, self._stopped)
        bus.subscribe(PartitionsChanged, self._changed)
        bus.subscribe(PartitionsLost, self._lost)
        bus.subscribe(EventsPublished, self._count)
        bus.subscribe(EventRejected, self._rejected)
        bus.subscribe(EventsDeferred, self._deferred)
        bus.subscribe(SinkDown, self._down)
        bus.subscribe(SinkBack, self._back)
        bus.subscribe(OutboxSampled, self._sampled)
        bus.subscribe(Pruned, self._pruned)
        bus.subscribe(LoopFailed, self._failed)
        bus.subscribe(LoopRecovered, self._works)

    def _started(self, event: RelayStarted) -> None:
        _log.info(
            "started %s sink=%s batch=%d lease=%gs connections=%d",
            event.relay, event.sink, event.batch, event.lease_s, event.connections,
        )  # fmt: skip

    def _stopped(self, event: RelayStopped) -> None:
        _log.info("drained, partitions %s", "given back" if event.given else "free when the lease ends")

    def _changed(self, event: PartitionsChanged) -> None:
        _log.info(
            "partitions owned=%d taken=%d given=%d relays=%d",
            event.owned,
            event.taken,
            event.given,
            event.relays,
        )

    def _lost(self, event: PartitionsLost) -> None:
        _log.warning("lease lost on %d partitions; duplicates may follow", len(event.parts))

    def _count(self, event: EventsPublished) -> None:
        with self._lock:
            self._published += event.count

    def _rejected(self, event: EventRejected) -> None:
        what = "parked" if event.parked else "rejected"
        _log.warning("%s outbox:%d attempt=%d: %s", what, event.event_id, event.attempts, event.reason)

    def _deferred(self, event: EventsDeferred) -> None:
        if self._due(f"deferred {event.reason}"):
            _log.warning("%d aggregates wait, no answer: %s", len(event.event_ids), event.reason)

    def _down(self, event: SinkDown) -> None:
        if self._due(f"sink {event.problem}" if event.fault else f"sink {event.sink}"):
            then = "" if math.isinf(event.retry_in) else "; trying again"
            _log.warning("sink %s is away: %s%s", event.sink, event.problem, then)
            if event.fault:
                _log.error("%s", event.fault)

    def _back(self, event: SinkBack) -> None:
        self._said.pop(f"sink {event.sink}", None)
        _log.info("sink %s is back after %.1f s", event.sink, event.seconds)

    def _sampled(self, event: OutboxSampled) -> None:
        now = time.monotonic()
        with self._lock:
            count, self._published = self._published, 0
            seconds, self._since = now - self._since, now
        _log.info(
            "outbox pending=%d oldest=%.1fs parked=%d blocked_aggregates=%d relays=%d orphan_partitions=%d "
            "published=%d rate=%.0f/s",
            event.pending, event.oldest_pending_s, event.parked, event.blocked_aggregates, event.relays,
            event.orphan_partitions, count, count / max(seconds, 0.001),
        )  # fmt: skip

    def _pruned(self, event: Pruned) -> None:
        _log.info("pruned events=%d inbox_keys=%d", event.events, event.inbox_keys)

    def _failed(self, event: LoopFailed) -> None:
        if self._due(f"loop {event.loop}"):
            _log.warning("%s loop: %s; trying again", event.loop, event.error)

    def _works(self, event: LoopRecovered) -> None:
        self._said.pop(f"loop {event.loop}", None)
        _log.info("%s loop works again after %.1f s", event.loop, event.seconds)

    def _due(self, what: str) -> bool:
        """Tell whether `what` was not said during the last minute."""
        now = time.monotonic()
        if now - self._said.get(what, -AGAIN_S) < AGAIN_S:
            return False
        if len(self._said) > 1000:
            self._said.clear()
        self._said[what] = now
        return True
