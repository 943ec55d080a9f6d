"""Thread slots: where `def` handlers run (and where process handlers are waited for).

A slot thread takes from the shelf until it is empty, then waits at its gate. Threads are started as they are
needed, up to the concurrency; the one that went idle last is woken first. An attempt that runs over its time
cannot be stopped: it is given up, its result will be ignored, and its slot is free again when the handler returns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from pgqueue.hand import Hand, Running
from pgqueue.job import Claimed, Outcome
from pgqueue.run import DONE, Runner
from pgqueue.shelf import Item, LaneHold, Shelf, take


class ThreadSlots:
    """Up to `size` threads over one shelf; `reserved` slots of them serve only one queue each."""

    def __init__(
        self,
        shelf: Shelf,
        runners: Mapping[str, Runner],
        levels: Sequence[tuple[str, int]],
        hand: Hand,
        *,
        size: int,
        reserved: Mapping[str, int],
        report_all: bool,
    ) -> None:
        self.shelf = shelf
        self._runners = runners
        self._levels = levels
        self._hand = hand
        self._report_all = report_all
        self._low = 0
        self._stopping = False
        self._idle: deque[tuple[threading.Lock, str | None]] = deque()
        self._plan: list[str | None] = [q for q, n in reserved.items() for _ in range(n)]
        self._plan += [None] * (size - len(self._plan))
        self._plan.reverse()
        self._threads: list[threading.Thread] = []

    def set_low_water(self, jobs: int) -> None:
        """Wake the claiming loop when the shelf falls to so many jobs."""
        self._low = jobs

    def wake(self, count: int) -> None:
        """Put up to `count` idle slots to work, starting threads where none is idle."""
        for _ in range(count):
            try:
                gate, _ = self._idle.pop()
            except IndexError:
                if not self._plan or not self._start():
                    return
            else:
                gate.release()

    def wake_all(self) -> None:
        """Put every idle slot to work, the reserved ones too."""
        self.wake(len(self._idle) + len(self._plan))

    @property
    def has_idle(self) -> bool:
        """Tell whether a slot has nothing to do though it may run what is on the shelf."""
        return self.shelf.suits(queue for _, queue in list(self._idle)) or self.shelf.suits(list(self._plan))

    def stop(self) -> None:
        """Let idle threads end; busy ones end after their handler."""
        self._stopping = True
        self._plan.clear()
        while self._idle:
            self._idle.pop()[0].release()

    def _start(self) -> bool:
        """Start the next thread of the plan; False if the system refuses, which may pass."""
        queue = self._plan[-1]
        shelves = self.shelf.general if queue is None else self.shelf.of(queue)
        name = f"pgqueue-slot-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, args=(shelves, queue), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._threads.append(thread)
        self._plan.pop()
        return True

    def _serve(self, shelves: tuple[deque[Item], ...], queue: str | None) -> None:
        gate = threading.Lock()
        gate.acquire()
        hand, size = self._hand, self.shelf.size
        while not self._stopping:
            item = take(shelves)
            if item is None:
                hand.wake.set()
                self._idle.append((gate, queue))
                if any(shelves):  # something was put in between: do not sleep past it
                    try:
                        self._idle.remove((gate, queue))
                    except ValueError:
                        pass  # already woken: the gate is open
                    else:
                        continue
                gate.acquire()
                continue
            if size() == self._low:
                hand.wake.set()
            if type(item) is Claimed:
                self._run(item)
            elif isinstance(item, LaneHold):
                self._walk(item)

    def _walk(self, lane: LaneHold) -> None:
        """Run the jobs of a lane one after the other."""
        while True:
            claimed = lane.jobs[0]
            if self._runners[claimed.name].kind.is_async:
                self._hand.handed_on.append(lane)
                self._hand.wake.set()
                return
            outcome = self._run(claimed)
            if outcome is None:
                return  # given up meanwhile: whoever did so has closed the lane
            if not self._hand.advance(lane, outcome) or self._stopping:
                self._hand.lane_over(lane)
                return

    def _run(self, claimed: Claimed) -> Outcome | None:
        hand = self._hand
        if (hand.cancelled or hand.lost) and (barred := hand.barred(claimed)) is not None:
            return barred
        runner = self._runners[claimed.name]
        plain = claimed.extra is None
        job = None
        if not runner.plain:
            job = runner.context(claimed, *self._levels[claimed.level])
        started = time.monotonic()
        hand.running[claimed.id, claimed.lease] = Running(
            claimed, job, started, runner.limit if plain else runner.timeout(claimed)
        )
        outcome = runner.call(claimed, job)
        if not hand.own(claimed):
            return None
        if outcome is DONE and not self._report_all:
            hand.busy_s += time.monotonic() - started
            hand.attempts += 1
            hand.done.append(claimed)
        else:
            hand.finish(claimed, outcome, started)
        return outcome
