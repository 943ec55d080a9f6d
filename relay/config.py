"""The settings of one relay, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from pgqueue.errors import BadOption
from relay.publish import RejectionPolicy

BLOCK_AGGREGATE = "block-aggregate"
PARK_EVENT = "park-event"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """What a relay is told. Durations of its own are seconds; what reaches the database is a timedelta.

    `wal`: hear of events by logical decoding instead of reading the table again and again.

    `pause` follows a batch of fewer than ten events: 2 ms cost 1.5 ms of latency and save a quarter of a
    core.
    """

    dsn: str = field(repr=False)
    name: str
    source: str
    batch: int = 1000
    lease: float = 10.0
    pause: float = 0.002
    longest_poll: float = 1.0
    send_timeout: float = 30.0
    retention: timedelta = timedelta(days=7)
    inbox_retention: timedelta = timedelta(days=7)
    sample_every: float = 15.0
    wal: bool = False
    rejection: RejectionPolicy = field(default_factory=RejectionPolicy)

    def __post_init__(self) -> None:
        _range("batch", self.batch, 1, 10_000)
        _range("lease", self.lease, 1, 600)
        _range("wait", self.pause, 0, 1)
        _range("send-timeout", self.send_timeout, 0.1, 600)
        _range("max-attempts", self.rejection.max_attempts, 1, 32_767)
        if self.retention < timedelta(0):
            raise BadOption(
                "retention", f"{self.retention} is negative; 0 deletes an event when it is published"
            )
        longest = timedelta(seconds=self.rejection.max_attempts * self.rejection.cap)
        if self.inbox_retention <= longest:
            raise BadOption(
                "inbox-retention",
                f"{self.inbox_retention} is not longer than max-attempts x the longest delay ({longest}): "
                "a late repetition would be applied twice",
            )
        if not self.source.strip():
            raise BadOption("source", "is empty; name this outbox, for example /outbox/shop")

    @property
    def keep(self) -> bool:
        """Tell whether a published event stays for a while."""
        return self.retention > timedelta(0)

    @property
    def patience(self) -> float:
        """Seconds without progress after which the publishing loop counts as stalled."""
        return 2 * self.send_timeout + self.lease


def _range(option: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        raise BadOption(option, f"{value:g} is not between {lowest:g} and {highest:g}")
