"""Waiting that can be interrupted, and backing off from trouble: what every loop of a service shares.

A loop waits on a `Wake` (a flag another thread or a notification raises) and never sleeps blindly. `Trouble`
counts consecutive failures of a loop and says how long to wait before the next try: full jitter up to 5 s, so
that a fleet does not return in step after an outage.
"""

from __future__ import annotations

import os
import random
import select
import time
from contextlib import suppress


class Wake:
    """A flag that one loop waits for and any thread raises; raising it twice wakes once.

    The loop may wait for sockets beside it: a notification then needs no other thread to take it in. The flag is a
    plain attribute, and a pipe speaks up only while the loop waits. The waiter says that it waits before it looks at
    the flag, the raiser raises it before it looks whether somebody waits: one of the two sees the other.
    """

    __slots__ = ("_raised", "_reader", "_waiting", "_writer")

    def __init__(self) -> None:
        self._raised = self._waiting = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def set(self) -> None:
        """Wake the loop, now or at its next wait."""
        self._raised = True
        if self._waiting:
            self._waiting = False
            with suppress(BlockingIOError):  # full: it will wake
                os.write(self._writer, b"!")

    def is_set(self) -> bool:
        """Tell whether the loop would not wait."""
        return self._raised

    def wait(self, timeout: float, *sockets: int) -> bool:
        """Wait at most `timeout` seconds, or until one of the sockets can be read.

        Lowers the flag and tells whether it was raised.
        """
        poll = select.poll()
        for fd in (self._reader, *sockets):
            poll.register(fd, select.POLLIN)
        end = time.monotonic() + timeout
        self._waiting = True
        while not self._raised:
            ready = {fd for fd, _ in poll.poll(max(0.0, end - time.monotonic()) * 1000)}
            if self._reader in ready:  # perhaps what came too late for the wait before: look at the flag
                os.read(self._reader, 4096)
                self._waiting = True
            if ready - {self._reader} or time.monotonic() >= end:
                break
        self._waiting = False
        raised, self._raised = self._raised, False
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
