"""Wait for what a test expects, never for a length of time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: How much slower than the machine on which the tests' timeouts were chosen a machine may be.
PATIENCE = 4


def chaos(short: int, long: int) -> int:
    """Return how much of a random test to run: the short part in the suite, the long one under `make chaos`."""
    return long if os.environ.get("PGQUEUE_CHAOS") else short


def eventually(predicate: Callable[[], T | None], timeout: float = 20.0, *, look: float = 0.02) -> T:
    """Call the predicate until it returns something true, and return that; fail after PATIENCE times the timeout."""
    deadline = time.monotonic() + PATIENCE * timeout
    while True:
        seen = predicate()
        if seen:
            return seen
        if time.monotonic() >= deadline:
            name = getattr(predicate, "__name__", repr(predicate))
            raise AssertionError(f"not within {PATIENCE * timeout} s: {name} (last value: {seen!r})")
        time.sleep(look)
