"""Wait: run a statement again until its answer is the one waited for, soon at first and then less often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from pgqueue.connection import execute, execute_async, require_transaction, require_transaction_async
from pgqueue.errors import ConfigError, NotInTransaction
from pgqueue.statement import Statement

T = TypeVar("T")

FIRST: Final = 0.02
LONGEST: Final = 0.5


def until(handle: Any, statement: Statement[T], over: Callable[[T], bool], timeout: float) -> T:
    """Return the first answer that is `over`, or the last one before `timeout` seconds have passed.

    Raises ConfigError for a handle whose transaction would stay open meanwhile.
    """
    try:
        require_transaction(handle)
    except NotInTransaction:
        pass
    else:
        raise _held()
    pauses = _pauses(timeout)
    while not over(found := execute(handle, statement)):
        if (pause := next(pauses, None)) is None:
            break
        time.sleep(pause)
    return found


async def until_async(
    handle: Any, statement: Statement[T], over: Callable[[T], bool], timeout: float  # noqa: ASYNC109 - the twin of until
) -> T:  # fmt: skip
    """Wait as `until` does, on an asynchronous handle."""
    try:
        await require_transaction_async(handle)
    except NotInTransaction:
        pass
    else:
        raise _held()
    pauses = _pauses(timeout)
    while not over(found := await execute_async(handle, statement)):
        if (pause := next(pauses, None)) is None:
            break
        await asyncio.sleep(pause)
    return found


def _pauses(timeout: float) -> Iterator[float]:
    """Yield how long to wait before the next look, as long as there is time left."""
    end, pause = time.monotonic() + timeout, FIRST
    while (left := end - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(LONGEST, pause * 1.5)


def _held() -> ConfigError:
    return ConfigError(
        "waiting would keep a transaction open, and never see a job that is enqueued in it; commit, and wait on a "
        "connection in autocommit mode"
    )
