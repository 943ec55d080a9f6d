"""Cut a batch into windows that a broker can hold at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def windows(items: Sequence[T], size: Callable[[T], int], *, most: int, most_bytes: int) -> list[list[T]]:
    """Cut items in their order by number and by bytes; one that is larger than a window stands alone."""
    cut: list[list[T]] = []
    filled = 0
    for item in items:
        length = size(item)
        if not cut or len(cut[-1]) >= most or filled + length > most_bytes:
            cut.append([])
            filled = 0
        cut[-1].append(item)
        filled += length
    return cut
