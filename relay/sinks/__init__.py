"""Where events go. One file per broker; a URL picks one, its scheme names it.

A stranger's sink is an entry point of the group `relay.sinks`: name = scheme, object = a function that takes
(url, SinkContext) and returns a Sink. tests/sinks holds the conformance suite that every sink passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import Final, Protocol

from pgqueue.errors import ConfigError, PgqueueError
from relay.event import Event, Receipt


class SinkUnavailable(PgqueueError):
    """The broker is away: nothing is known of the events given. They are sent again, no attempt is spent.

    `retry_after`: seconds that it asks for; infinity: nothing is sent until the relay is started again.
    """

    def __init__(self, sink: str, problem: str, *, retry_after: float | None = None) -> None:
        self.sink = sink
        self.problem = problem
        self.retry_after = retry_after
        super().__init__(f"sink {sink}: {problem}; the relay keeps trying")


class Sink(Protocol):
    """One broker.

    `name` is for people and never shows a secret.
    `ordered`: publish takes several events of one aggregate at once and keeps their order itself, also in
    failure: after an event that is not confirmed none of its aggregate is confirmed in that call. If False,
    publish never gets two events of one aggregate.
    `marks`: publish marks its confirmed events as published in the same transaction.
    """

    @property
    def name(self) -> str: ...
    @property
    def ordered(self) -> bool: ...
    @property
    def marks(self) -> bool: ...

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Send events and wait for the answers, at most the send timeout; return one receipt per event.

        Raises SinkUnavailable where nothing is known of any of them.
        """

    def close(self) -> None:
        """Drop connections; the next publish opens them again. Never waits for a broker that is away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkContext:
    """What a sink may need to know; seconds. `allow_private`: webhooks may go to addresses outside the internet."""

    source: str
    send_timeout: float = 30.0
    dsn: str = field(default="", repr=False)
    parallel: int = 16
    keep: bool = True
    subscribers: Callable[[str], Sequence[str]] | None = None
    secrets: Sequence[str] = field(default=(), repr=False)
    allow_private: bool = False


class UnknownSink(ConfigError):
    """No sink of that scheme is there."""

    def __init__(self, url: str, known: Sequence[str]) -> None:
        self.scheme = url.partition(":")[0]
        super().__init__(f"no sink for {self.scheme!r}: known are {', '.join(known)}; give --sink SCHEME:...")


_HERE: Final[Mapping[str, str]] = {
    "stdout": "relay.sinks.stdout",
    "http": "relay.sinks.webhook",
    "https": "relay.sinks.webhook",
    "queue": "relay.sinks.queue",
    "kafka": "relay.sinks.kafka",
    "amqp": "relay.sinks.amqp",
    "amqps": "relay.sinks.amqp",
    "nats": "relay.sinks.nats",
    "redis": "relay.sinks.redis",
    "rediss": "relay.sinks.redis",
    "sqs": "relay.sinks.sqs",
    "sns": "relay.sinks.sns",
    "kinesis": "relay.sinks.kinesis",
    "pulsar": "relay.sinks.pulsar",
    "pulsar+ssl": "relay.sinks.pulsar",
}


def open_sink(url: str, context: SinkContext) -> Sink:
    """Return the sink that a URL names; its module is imported now, connections open at the first publish.

    Raises UnknownSink, or ConfigError for a URL the sink cannot use or an extra that is not installed.
    """
    scheme = url.partition(":")[0].lower()
    strangers = {point.name: point for point in entry_points(group="relay.sinks")}
    if scheme in _HERE:
        make: Callable[[str, SinkContext], Sink] = import_module(_HERE[scheme]).open_sink
    elif scheme in strangers:
        make = strangers[scheme].load()
    else:
        raise UnknownSink(url, sorted({*_HERE, *strangers}))
    return make(url, context)
