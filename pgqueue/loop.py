"""Waiting that can be interrupted, and backing off from trouble: what every loop of a service shares.

A loop waits on a `Wake` (a flag another thread or a notification raises) and never sleeps blindly. `Trouble`
counts consecutive failures of a loop and says how long to wait before the next try: full jitter up to 5 s, so
that a fleet does not return in step after an outage.
"""

from __future__ import annotations

import random
import threading
import time


class Wake:
    """A flag that one loop waits for and any thread raises; raising it twice wakes once."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Wake the loop, now or at its next wait."""
        self._event.set()

    def is_set(self) -> bool:
        """Tell whether the loop would not wait."""
        return self._event.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds; lower the flag and tell whether it was raised."""
        raised = self._event.wait(timeout)
        self._event.clear()
        return raised


class IdlePoll:
    """The poll timer of an idle loop: 10 ms at first, doubling to `longest`, with jitter."""

    __slots__ = ("_longest", "_next")

    def __init__(self, longest: float = 1.0) -> None:
        self._longest = longest
        self._next = 0.01

    def reset(self) -> None:
        """Begin again at 10 ms: there was work."""
        self._next = 0.01

    def delay(self) -> float:
        """Return the next wait in seconds."""
        now, self._next = self._next, min(self._longest, self._next * 2)
        return now * random.uniform(0.75, 1.25)


class Trouble:
    """Consecutive failures of one loop."""

    __slots__ = ("_count", "_since", "longest")

    def __init__(self, longest: float = 5.0) -> None:
        self.longest = longest
        self._count = 0
        self._since = 0.0

    @property
    def active(self) -> bool:
        """Tell whether the last try failed."""
        return self._count > 0

    def failed(self) -> float:
        """Note a failure; return the seconds to wait before the next try."""
        if self._count == 0:
            self._since = time.monotonic()
        self._count += 1
        return random.uniform(0.05, min(self.longest, 0.1 * 2.0 ** min(self._count, 10)))

    def over(self) -> float | None:
        """Note a success; return the seconds the trouble lasted, None if there was none."""
        if self._count == 0:
            return None
        self._count = 0
        return time.monotonic() - self._since
