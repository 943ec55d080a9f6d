"""The inside of a benchmark program: what every Python system does alike.

A program runs under the interpreter of its system, so this module needs the standard library alone. The driver
starts it with a verb and speaks to it by its environment and pipes:

    setup             install the system's schema into BENCH_DSN
    fill N            enqueue N jobs through the bulk interface, BENCH_CHUNK a call; prints `filled SECONDS`
    produce N GAP     enqueue N jobs one a transaction, GAP seconds apart; writes when each was sent and committed
    work              run jobs until standard input closes; prints `mark COUNT TIME` at the first job and every
                      BENCH_STEP jobs; at the end writes the numbers of the jobs it ran to BENCH_OUT

Every payload is {"n": number, "text": 120 characters}, about 150 bytes of JSON. All times are those of the one
monotonic clock that the processes of a machine share.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

TEXT = "x" * 120
QUEUE = "bench"
#: What a handler of the I/O workload awaits.
IO_S = 0.01


def payload(number: int) -> dict[str, Any]:
    """Return the payload of one job."""
    return {"n": number, "text": TEXT}


def setting(name: str, default: str = "") -> str:
    """Return what the driver set for this program."""
    return os.environ.get(f"BENCH_{name}", default)


def batches(count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the payloads 0..count-1 in the chunks of the bulk interface."""
    first, chunk = int(setting("FIRST", "0")), int(setting("CHUNK", "1000"))
    for start in range(first, first + count, chunk):
        yield [payload(n) for n in range(start, min(start + chunk, first + count))]


#: Held while a program notes what has already run: it is not to end within.
noting = threading.Lock()


def recorder() -> Callable[[int], None]:
    """Return the function that handlers call with the number of their job, from any thread.

    Standard input closing writes the record and ends the process at once: by then the database says that every
    job is done.
    """
    step, timed = int(setting("STEP", "1000")), setting("TIMED") == "1"
    numbers = array("I")
    times: list[tuple[int, float]] = []
    count = itertools.count(1)

    def mark(done: int) -> None:
        os.write(1, f"mark {done} {time.monotonic():.6f}\n".encode())

    def note(number: int) -> None:
        done = next(count)
        if done == 1 or not done % step:
            mark(done)
        numbers.append(number)

    def note_timed(number: int) -> None:
        times.append((number, time.monotonic()))
        note(number)

    def write_at_the_end() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        out = setting("OUT")
        with noting:
            if out:
                Path(out).write_bytes(numbers.tobytes())
                if timed:
                    Path(f"{out}.times").write_text(json.dumps(times))
            os._exit(0)

    threading.Thread(target=write_at_the_end, daemon=True).start()
    return note_timed if timed else note


def library(name: str) -> Any:
    """Import a module of the system; it is installed in the program's own environment only."""
    return import_module(name)


def run_async(main: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where it is installed."""
    with suppress(ImportError):
        library("uvloop").run(main)
        return
    asyncio.run(main)


class Program:
    """A system's program: subclasses say how to open, enqueue and work; either plainly or with `async def`."""

    def setup(self) -> Any:
        """Install the schema."""
        raise NotImplementedError

    def open(self) -> Any:
        """Open what `many` and `one` enqueue through."""
        raise NotImplementedError

    def many(self, handle: Any, payloads: list[dict[str, Any]]) -> Any:
        """Enqueue payloads in one transaction by the bulk interface."""
        raise NotImplementedError

    def one(self, handle: Any, payload: dict[str, Any]) -> Any:
        """Enqueue one job in a transaction of its own."""
        raise NotImplementedError

    def work(self, note: Callable[[int], None]) -> Any:
        """Run jobs for ever; every handler calls `note` with its number first."""
        raise NotImplementedError


def main(program: Program) -> None:
    """Carry out the verb of the command line."""
    verb, *numbers = sys.argv[1:]
    if verb == "work":
        work = program.work
        if inspect.iscoroutinefunction(work):
            run_async(work(recorder()))
        else:
            work(recorder())
        return
    if verb == "setup":
        steps: Any = _plainly(program.setup)
    elif verb == "fill":
        steps = _fill(program, int(numbers[0]))
    elif verb == "produce":
        steps = _produce(program, int(numbers[0]), float(numbers[1]))
    else:
        raise SystemExit(f"{verb} is not a verb of a benchmark program")
    run_async(steps)


async def _plainly(function: Callable[..., Any], *values: Any) -> Any:
    result = function(*values)
    return await result if inspect.isawaitable(result) else result


async def _fill(program: Program, count: int) -> None:
    handle = await _plainly(program.open)
    began = time.perf_counter()
    for chunk in batches(count):
        await _plainly(program.many, handle, chunk)
    print(f"filled {time.perf_counter() - began:.6f}", flush=True)
    os._exit(0)  # pools and event loops of a system may take seconds to close; the rows are committed


async def _produce(program: Program, count: int, gap: float) -> None:
    handle = await _plainly(program.open)
    first = int(setting("FIRST", "0"))
    sent = []
    due = time.monotonic()
    for number in range(first, first + count):
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        called = time.monotonic()
        await _plainly(program.one, handle, payload(number))
        sent.append((number, called, time.monotonic()))
        due += gap
    Path(setting("OUT")).write_text(json.dumps(sent))  # noqa: ASYNC240 - nothing runs beside it
    os._exit(0)
