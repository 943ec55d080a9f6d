"""The jobs of our side of the comparison: what an application would import."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from benchmarks.program import IO_S, QUEUE
from pgqueue import App


class Payload(msgspec.Struct):
    """What every benchmark job carries."""

    n: int
    text: str


def _nothing(_: int) -> None:
    """Record nothing."""


#: What handlers call first; a worker process puts its recorder here before it starts.
note: Callable[[int], None] = _nothing

threads, tasks, sleepers = App(), App(), App()


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
