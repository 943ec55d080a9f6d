"""The jobs of our side of the comparison: what an application would import."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from benchmarks.program import IO_S, QUEUE
from pgqueue import App, Job


class Payload(msgspec.Struct):
    """What every benchmark job carries."""

    n: int
    text: str


def _nothing(_: int) -> None:
    """Record nothing."""


#: What handlers call first; a worker process puts its recorder here before it starts.
note: Callable[[int], None] = _nothing

threads, tasks, sleepers, mixed = App(), App(), App(), App()

#: The queue whose jobs are slow work, and the one whose jobs must not wait for it.
BULK, CRITICAL = "bulk", "critical"
#: How long a job of slow work takes.
SLOW_S = 1.0


@threads.job("bench", queue=QUEUE)
def bench(payload: Payload) -> None:
    """Do nothing, in a thread."""
    note(payload.n)


@tasks.job("bench", queue=QUEUE)
async def bench_async(payload: Payload) -> None:
    """Do nothing, on the event loop."""
    note(payload.n)


@sleepers.job("bench", queue=QUEUE)
async def bench_io(payload: Payload) -> None:
    """Await 10 ms, as a call to another service does."""
    note(payload.n)
    await asyncio.sleep(IO_S)


@mixed.job("bench", queue=BULK)
def bench_mixed(payload: Payload, job: Job) -> None:
    """Do nothing in the critical queue, slow work in the other."""
    if job.queue == CRITICAL:
        note(payload.n)
    else:
        time.sleep(SLOW_S)
