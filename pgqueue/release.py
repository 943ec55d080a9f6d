"""Release: what this process has claimed and will not start soon goes back to the queue, its attempt not counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pgqueue.hand import Hand
from pgqueue.job import Claimed
from pgqueue.quota import Quota
from pgqueue.shelf import LaneHold, Shelf
from pgqueue.writeoff import WriteOff

#: Shelved jobs that nobody has started for so many seconds go back to the queue: others may have a free slot.
STALL = 2.0


class Releases:
    """Gives back for one engine, in its thread."""

    def __init__(self, hand: Hand, quota: Quota, write_off: WriteOff, slots: Sequence[Any]) -> None:
        self._hand = hand
        self._quota = quota
        self._write_off = write_off
        self._slots = slots
        self._moved = (0, 0.0)
        self._unloaded = False

    def unstall(self) -> None:
        """Wake slots that missed work; give back shelved jobs that nobody here will start soon."""
        now = time.monotonic()
        waiting = [s for s in self._slots if len(s.shelf)]
        if not waiting:
            self._moved = (self._hand.attempts, now)
            return
        if self._hand.attempts != self._moved[0]:
            self._moved = (self._hand.attempts, now)
            self._quota.stalled = False
        for slots in waiting:
            if slots.has_idle:
                slots.wake_all()
            elif now - self._moved[1] > STALL:
                self._quota.stalled = True
                self._give_back(slots.shelf)

    def unload(self, *, running: bool) -> None:
        """Give back what was not started, and what still runs if `running`; no slot starts anything any more."""
        if not self._unloaded:
            self._unloaded = True
            for slots in self._slots:
                slots.stop()
        for slots in self._slots:
            self._give_back(slots.shelf)
        if running:
            for attempt in list(self._hand.running):
                if (ours := self._hand.running.pop(attempt, None)) is not None:
                    self._write_off.give_back(ours.claimed)
            self._write_off.give_back_lanes()

    def _give_back(self, shelf: Shelf) -> None:
        for item in shelf.clear():
            if isinstance(item, LaneHold):
                self._hand.lane_over(item)
            elif isinstance(item, Claimed):
                self._write_off.give_back(item)
