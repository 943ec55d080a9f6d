"""What the relay tells; `pgqueue.events` has the root of these and the bus that carries them."""

from __future__ import annotations

from dataclasses import dataclass

from pgqueue.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStarted(Event):
    """The relay is about to publish."""

    relay: str
    sink: str
    batch: int
    lease_s: float
    connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStopped(Event):
    """The relay has marked what was confirmed; `given` tells whether its partitions are free again."""

    relay: str
    given: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsChanged(Event):
    """Partitions were taken or given between two batches; `owned` are left."""

    taken: int = 0
    given: int = 0
    owned: int
    relays: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsLost(Event):
    """Another relay took these partitions: our lease had run out. Duplicates may follow, no inversion."""

    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsPublished(Event):
    """The sink confirmed `count` events in `seconds`; the oldest was written `oldest_s` ago."""

    count: int
    seconds: float
    oldest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRejected(Event):
    """The sink refused an event: it is tried again, or parked until somebody looks at it."""

    event_id: int
    attempts: int
    parked: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsDeferred(Event):
    """The sink answered for others but not for these events; their aggregates wait."""

    event_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkDown(Event):
    """The sink is away and is tried again after `retry_in` seconds, infinity = not before the relay is started again.

    `fault`: traceback of a broken one.
    """

    sink: str
    problem: str
    retry_in: float
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkBack(Event):
    """The sink answers again after `seconds`."""

    sink: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSampled(Event):
    """The depth of the outbox, as the view outbox_lag shows it."""

    pending: int
    parked: int
    blocked_aggregates: int
    oldest_pending_s: float
    relays: int
    orphan_partitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned(Event):
    """Old published events and inbox keys were deleted."""

    events: int
    inbox_keys: int
