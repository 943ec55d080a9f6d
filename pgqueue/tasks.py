"""Task slots: where `async def` handlers run, on one event loop in its own thread.

The tasks are the slots: each takes jobs from the shelf, one after the other, so that a handler that never waits
costs no task of its own. What a handler leaves in context variables stays in its own context: each coroutine is
driven step by step inside one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, cast

from pgqueue.errors import Cancelled
from pgqueue.hand import Hand, Running
from pgqueue.job import Claimed, Job, Outcome, Released
from pgqueue.run import DONE, Runner
from pgqueue.shelf import Item, LaneHold, Shelf, take


class TaskSlots:
    """Up to `size` tasks over one shelf; `reserved` slots of them serve only one queue each."""

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
        self._abandon = False
        self._last: Callable[[], Coroutine[Any, Any, None]] | None = None
        #: Which attempt each task is at, and the attempts that were cancelled from outside.
        self._at: dict[asyncio.Task[None], object] = {}
        self._struck: set[object] = set()
        self._plan: list[str | None] = [q for q, n in reserved.items() for _ in range(n)]
        self._plan += [None] * (size - len(self._plan))
        self._plan.reverse()
        self._idle: deque[tuple[asyncio.Future[None], str | None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="pgqueue-tasks", daemon=True)
        self._thread.start()

    def set_low_water(self, jobs: int) -> None:
        """Wake the claiming loop when the shelf falls to so many jobs."""
        self._low = jobs

    def wake(self, count: int) -> None:
        """Put up to `count` idle slots to work; callable from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, count)

    def wake_all(self) -> None:
        """Put every idle slot to work, the reserved ones too."""
        self.wake(len(self._idle) + len(self._plan))

    @property
    def has_idle(self) -> bool:
        """Tell whether a slot has nothing to do though it may run what is on the shelf."""
        return self.shelf.suits(queue for _, queue in list(self._idle)) or self.shelf.suits(list(self._plan))

    def stop(self) -> None:
        """Let idle tasks end; busy ones end after their handler."""
        self._stopping = True
        self.wake_all()

    def cancel_all(self) -> None:
        """Cancel the handlers that still run: at the end of the grace period."""
        self._abandon = True
        for task, at in list(self._at.items()):
            self._cancel(task, at)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End the event loop, and with it whatever tasks the handlers left behind; `last` is what it runs last."""
        self._last = last
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)

    def _main(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            if left := asyncio.all_tasks(loop):
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(left, timeout=0.5))
            loop.run_until_complete(loop.shutdown_asyncgens())
            if self._last is not None:
                loop.run_until_complete(asyncio.wait_for(self._last(), 0.5))
        finally:
            loop.close()

    def _wake(self, count: int) -> None:
        while count > 0 and self._idle:
            future, _ = self._idle.pop()
            if not future.done():
                future.set_result(None)
                count -= 1
        while count > 0 and self._plan and not self._stopping:
            queue = self._plan.pop()
            shelves = self.shelf.general if queue is None else self.shelf.of(queue)
            task = self._loop.create_task(self._serve(shelves, queue))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            count -= 1

    async def _serve(self, shelves: tuple[deque[Item], ...], queue: str | None) -> None:
        hand, size = self._hand, self.shelf.size
        streak = 0
        while not self._stopping:
            item = take(shelves)
            if item is None:
                hand.wake.set()
                gate = self._loop.create_future()
                # What is put from here on schedules its wake-up behind this step: nothing can slip by.
                self._idle.append((gate, queue))
                await gate
                streak = 0
                continue
            if size() == self._low:
                hand.wake.set()
            if type(item) is Claimed:
                await self._run(item)
            elif isinstance(item, LaneHold):
                await self._walk(item)
            streak += 1
            if streak % 64 == 0:
                await asyncio.sleep(0)  # handlers that never wait must not starve those that do

    async def _walk(self, lane: LaneHold) -> None:
        while True:
            claimed = lane.jobs[0]
            if not self._runners[claimed.name].kind.is_async:
                self._hand.handed_on.append(lane)
                self._hand.wake.set()
                return
            outcome = await self._run(claimed)
            if outcome is None:
                return
            if not self._hand.advance(lane, outcome) or self._stopping:
                self._hand.lane_over(lane)
                return

    async def _run(self, claimed: Claimed) -> Outcome | None:
        hand = self._hand
        if (hand.cancelled or hand.lost) and (barred := hand.barred(claimed)) is not None:
            return barred
        runner = self._runners[claimed.name]
        plain = claimed.extra is None
        job = None if runner.plain else runner.context(claimed, *self._levels[claimed.level])
        task = cast("asyncio.Task[None]", asyncio.current_task())
        started = time.monotonic()
        at = self._at[task] = object()
        hand.running[claimed.id, claimed.lease] = Running(
            claimed, job, started, runner.limit if plain else runner.timeout(claimed),
            lambda: self._cancel(task, at),
        )  # fmt: skip
        outcome = await self._call(runner, claimed, job, at)
        del self._at[task]
        self._struck.discard(at)
        while task.cancelling():
            task.uncancel()
        if not hand.own(claimed):
            return None
        if outcome is DONE and not self._report_all:
            hand.busy_s += time.monotonic() - started
            hand.attempts += 1
            hand.done.append(claimed)
        else:
            hand.finish(claimed, outcome, started)
        return outcome

    async def _call(self, runner: Runner, claimed: Claimed, job: Job | None, at: object) -> Outcome:
        try:
            outcome = await runner.acall(claimed, job)
        except asyncio.CancelledError as error:
            if at not in self._struck:  # the handler's own doing: a failure like any other
                return runner.failed(claimed, error)
            if self._abandon or claimed.id not in self._hand.cancelled:
                return Released()
            return runner.failed(claimed, Cancelled("the job was cancelled"))
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - becomes the outcome
            # The last two would end the event loop.
            return runner.failed(claimed, error)
        return outcome

    def _cancel(self, task: asyncio.Task[None], at: object) -> None:
        """Cancel one attempt from another thread, unless it has ended and the task is at the next one."""
        self._loop.call_soon_threadsafe(self._strike, task, at)

    def _strike(self, task: asyncio.Task[None], at: object) -> None:
        if self._at.get(task) is at:
            self._struck.add(at)
            task.cancel()
