"""Wait for what a test expects, never for a length of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(predicate: Callable[[], T | None], timeout: float = 10.0, *, look: float = 0.02) -> T:
    """Call the predicate until it returns something true, and return that; fail when the time is over."""
    deadline = time.monotonic() + timeout
    while True:
        seen = predicate()
        if seen:
            return seen
        if time.monotonic() >= deadline:
            name = getattr(predicate, "__name__", repr(predicate))
            raise AssertionError(f"not within {timeout} s: {name} (last value: {seen!r})")
        time.sleep(look)
