"""Who publishes which partition.

`relay_partition` is the only authority: a partition belongs to the relay that stands in it as long as that
relay's lease runs (one lease per relay, by the clock of the database). A relay takes and gives only between
its batches, so (partition, owner) is the fence. Order does not rest on the leases; they bound duplicates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from pgqueue.statement import Row, Statement, column, load, nothing

_SQL = load("relay", "partitions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How many relays share how many partitions."""

    relays: int
    partitions: int

    @property
    def fair(self) -> int:
        """Return how many partitions one relay may own."""
        return math.ceil(self.partitions / max(1, self.relays))


def beat(me: UUID, name: str, lease: timedelta) -> Statement[None]:
    """Renew the lease of this relay, or announce it: one row."""
    return Statement(_SQL["beat"], {"me": me, "name": name, "lease": lease}, nothing)


def share() -> Statement[Share]:
    """Count live relays and partitions."""
    return Statement(_SQL["share"], {}, _share)


def take(me: UUID, n: int) -> Statement[list[int]]:
    """Take at most `n` partitions that nobody alive owns; skips those another relay is taking."""
    return Statement(_SQL["take"], {"me": me, "n": n}, column)


def give(me: UUID, parts: Collection[int]) -> Statement[None]:
    """Give partitions back. Everything confirmed in them must be marked before."""
    return Statement(_SQL["give"], {"me": me, "parts": list(parts)}, nothing)


def leave(me: UUID) -> Statement[None]:
    """Give everything back and end the lease: the last thing a relay does."""
    return Statement(_SQL["leave"], {"me": me}, nothing)


def forget() -> Statement[None]:
    """Delete the rows of relays whose lease ended over an hour ago."""
    return Statement(_SQL["forget"], {}, nothing)


def _share(rows: Sequence[Row]) -> Share:
    relays, partitions = rows[0]
    return Share(relays=relays, partitions=partitions)
