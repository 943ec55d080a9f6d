"""What the runtime tells: typed events, and the bus that carries them to subscribers.

Verbs neither log nor count. The worker and the relay emit events; log lines and metrics subscribe. Job events come in
batches where the runtime works in batches, so that nobody pays for them per job. Subscribers run in the thread that
emits: they must be quick and must not raise (what they raise is dropped and reported once on the `pgqueue` logger).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Root of all events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(Event):
    """A worker is connected and begins to claim."""

    queues: tuple[str, ...]
    names: tuple[str, ...]
    concurrency: int
    connections: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDraining(Event):
    """The worker stopped claiming; `running` jobs are still at work."""

    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopped(Event):
    """The worker holds no job any more."""

    released: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsClaimed(Event):
    """A claim handed out jobs; `recovered` of them had lost their last worker."""

    count: int
    recovered: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsReleased(Event):
    """Jobs went back to the queue unstarted or unfinished; their attempt does not count."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsAcked(Event):
    """A batch of jobs is done and their rows are gone."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished(Event):
    """One attempt ended: outcome is ok, retry, dead, snooze, cancelled or released; seconds in the handler.

    Attempts that ended well are told only where somebody subscribed to them before the worker started
    (`Bus.subscribe(JobSucceeded, ..)`): the short way of a short job builds no event.
    """

    job_id: int
    name: str
    queue: str
    attempt: int
    outcome: str
    seconds: float
    error: str | None = None
    delay: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSucceeded(JobFinished):
    """An attempt that ended well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOverran(Event):
    """An attempt has timed out and its handler goes on; it keeps its slot, one of `overrun` that are kept so."""

    job_id: int
    name: str
    attempt: int
    limit: float
    overrun: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerReturned(Event):
    """A handler that went on after its timeout has ended after `seconds`: its slot is free."""

    job_id: int
    name: str
    attempt: int
    seconds: float
    overrun: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyApplied(Event):
    """A job was skipped: another one of its name and idempotency key has been applied."""

    job_id: int
    name: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasesLost(Event):
    """Results were dropped because another claim holds these jobs now."""

    job_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFailed(Event):
    """A loop lost its connection or met an error; it goes on after `retry_in` seconds."""

    loop: str
    error: str
    retry_in: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopRecovered(Event):
    """A loop works again after `seconds` of trouble."""

    loop: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthSampled(Event):
    """The depth of one queue, as the gauge shows it."""

    queue: str
    ready: int
    delayed: int
    in_flight: int
    blocked: int
    oldest_ready_s: float


E = TypeVar("E", bound=Event)


class Bus:
    """Carries events from the runtime to its subscribers."""

    def __init__(self) -> None:
        self._subscribers: tuple[tuple[type[Event], Callable[[Any], None]], ...] = ()
        self._broken: set[int] = set()

    def subscribe(self, kind: type[E], hook: Callable[[E], None]) -> None:
        """Call `hook` with every event that is a `kind`."""
        self._subscribers = (*self._subscribers, (kind, hook))

    def wants(self, kind: type[Event]) -> bool:
        """Tell whether anybody subscribed to `kind` itself: events made per job are not built for nobody."""
        return any(wanted is kind for wanted, _ in self._subscribers)

    def emit(self, event: Event) -> None:
        """Hand an event to everyone who listens to its kind."""
        for kind, hook in self._subscribers:
            if isinstance(event, kind):
                try:
                    hook(event)
                except Exception:  # a subscriber's fault must not stop the runtime
                    if id(hook) not in self._broken:
                        self._broken.add(id(hook))
                        logging.getLogger("pgqueue").exception(
                            "subscriber %r failed; its further errors are dropped", hook
                        )
