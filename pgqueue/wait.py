"""Wait for the end of a job: look at its status, soon at first and then less often, until the time is over."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from pgqueue.connection import execute, execute_async, require_transaction, require_transaction_async
from pgqueue.errors import ConfigError, NotInTransaction, StillRunning
from pgqueue.history import Status, status

FIRST: Final = 0.02
LONGEST: Final = 0.5


def wait(handle: Any, job_id: int, timeout: float) -> Status | None:
    """Return the status of a job once it has ended, None if it ended without a trace.

    Raises StillRunning, and ConfigError for a handle whose transaction would stay open meanwhile.
    """
    try:
        require_transaction(handle)
    except NotInTransaction:
        pass
    else:
        raise _held(job_id)
    until, pause = time.monotonic() + timeout, FIRST
    while (found := execute(handle, status(job_id))) is not None and not found.ended:
        left = until - time.monotonic()
        if left <= 0:
            raise StillRunning(job_id, found.state, timeout)
        time.sleep(min(pause, left))
        pause = min(LONGEST, pause * 1.5)
    return found


async def wait_async(handle: Any, job_id: int, timeout: float) -> Status | None:  # noqa: ASYNC109 - the twin of wait
    """Wait as `wait` does, on an asynchronous handle."""
    try:
        await require_transaction_async(handle)
    except NotInTransaction:
        pass
    else:
        raise _held(job_id)
    until, pause = time.monotonic() + timeout, FIRST
    while (found := await execute_async(handle, status(job_id))) is not None and not found.ended:
        left = until - time.monotonic()
        if left <= 0:
            raise StillRunning(job_id, found.state, timeout)
        await asyncio.sleep(min(pause, left))
        pause = min(LONGEST, pause * 1.5)
    return found


def _held(job_id: int) -> ConfigError:
    return ConfigError(
        f"waiting for job {job_id} would keep a transaction open, and never see a job that is enqueued in it; commit, "
        "and wait on a connection in autocommit mode"
    )
