"""Ref: the answer to an enqueue. It names the job, and can wait for its end.

ref = monthly_total.enqueue(conn, [20, 22])
conn.commit()
status = ref.wait(autocommit, timeout=10)
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

from pgqueue.errors import StillRunning
from pgqueue.history import Status, status
from pgqueue.wait import until, until_async


class JobRef(NamedTuple):
    """The answer to an enqueue: the job's id, and whether this call created it (no: dedup key taken, or shed).

    `changed`: the job that has the dedup key waits, and took payload and time of this call (see `dedup_mode`). A job
    whose id came another way, in a request for example, is `JobRef(17)`.
    """

    id: int
    created: bool = False
    changed: bool = False

    @property
    def shed(self) -> bool:
        """Whether the job was dropped because its type is sheddable and its queue full; its id is 0."""
        return self.id == 0

    def wait(self, handle: Any, timeout: float | timedelta) -> Status | None:
        """Wait until the committed job has ended, and return its status; None if it ended without a trace.

        `handle` is in autocommit mode, so that no transaction stays open: ConfigError otherwise. Raises StillRunning
        after `timeout` seconds.
        """
        seconds = _seconds(timeout)
        return self._ended(until(handle, status(self.id), _over, seconds), seconds)

    async def wait_async(self, handle: Any, timeout: float | timedelta) -> Status | None:  # noqa: ASYNC109 - the twin of wait
        """Wait as `wait` does, on an asynchronous handle."""
        seconds = _seconds(timeout)
        return self._ended(await until_async(handle, status(self.id), _over, seconds), seconds)

    def _ended(self, found: Status | None, timeout: float) -> Status | None:
        if found is not None and not found.ended:
            raise StillRunning(self.id, found.state, timeout)
        return found


def _over(found: Status | None) -> bool:
    return found is None or found.ended


def _seconds(timeout: float | timedelta) -> float:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
