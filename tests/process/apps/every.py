"""An app with a handler of every kind; what a job does stands in its payload."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import time
from contextvars import ContextVar
from pathlib import Path

import msgspec
import psycopg

from pgqueue import App, Backoff, Job, Permanent, Retry, Snooze
from tests.process.apps.effects import note

app = App()
AT_ONCE = Backoff(base=0.001, cap=0.01)
MARK: ContextVar[str] = ContextVar("MARK", default="clean")


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What to do: work so many seconds, wait for a file, fail the first attempts, die."""

    n: int = 0
    seconds: float = 0.0
    gate: str = ""
    fails: int = 0
    dies: int = 0


def work_on(work: Work, job: Job) -> None:
    """Do it, and leave a note at the start and at the end."""
    note("start", work.n, job.attempt)
    if job.attempt <= work.dies:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(work.seconds)
    while work.gate and not Path(work.gate).exists():
        time.sleep(0.005)
    if job.attempt <= work.fails:
        raise RuntimeError(f"attempt {job.attempt} was to fail")
    note("end", work.n, job.attempt)


@app.job("work", backoff=AT_ONCE)
def work(order: Work, job: Job) -> None:
    work_on(order, job)


@app.job("endless", timeout=math.inf)
def endless(order: Work, job: Job) -> None:
    work_on(order, job)


@app.job("short", timeout=0.3, max_attempts=1)
def short(order: Work, job: Job) -> None:
    work_on(order, job)


@app.job("bare")
def bare() -> None:
    note("end", 0)


@app.job("payload-only")
def payload_only(order: Work) -> None:
    note("end", order.n)


@app.job("job-only")
def job_only(job: Job) -> None:
    note("end", 0, job.attempt, note=f"{job.name} {job.queue} {job.attempt}/{job.max_attempts}")


def _is_open(gate: str) -> bool:
    return Path(gate).exists()


@app.job("awaits", backoff=AT_ONCE)
async def awaits(order: Work, job: Job) -> None:
    note("start", order.n, job.attempt, note=MARK.get())
    MARK.set(f"job {order.n}")
    try:
        await asyncio.sleep(order.seconds)
        while order.gate and not _is_open(order.gate):  # noqa: ASYNC110  another process opens the gate
            await asyncio.sleep(0.005)
    except asyncio.CancelledError:
        note("cancelled", order.n, job.attempt)
        raise
    if job.attempt <= order.fails:
        raise RuntimeError(f"attempt {job.attempt} was to fail")
    note("end", order.n, job.attempt, note=MARK.get())


@app.job("awaits-short", timeout=0.3, max_attempts=1)
async def awaits_short(order: Work, job: Job) -> None:
    await awaits.handler(order, job)


@app.job("blocks-loop")
async def blocks_loop(order: Work, job: Job) -> None:
    work_on(order, job)  # blocks: the fault under test


@app.job("computes", process=True, backoff=AT_ONCE)
def computes(order: Work, job: Job) -> None:
    work_on(order, job)


@app.job("books", transactional=True, backoff=AT_ONCE)
def books(order: Work, conn: psycopg.Connection, job: Job) -> None:
    conn.execute("INSERT INTO public.booked VALUES (%s)", [order.n])
    work_on(order, job)


@app.job("computes-short", process=True, timeout=0.5, max_attempts=1)
def computes_short(order: Work, job: Job) -> None:
    work_on(order, job)


@app.job("holds-gil", process=True)
def holds_gil(order: Work, job: Job) -> None:
    note("start", order.n, job.attempt)
    ctypes.PyDLL(None).open(order.gate.encode(), os.O_RDONLY)  # keeps the interpreter lock
    note("end", order.n, job.attempt)


@app.job("exits")
def exits(order: Work, job: Job) -> None:
    note("start", order.n, job.attempt)
    raise SystemExit(3)


@app.job("asks")
def asks(answer: str, job: Job) -> None:
    note("start", 0, job.attempt, note=answer)
    match answer:
        case "retry":
            raise Retry("once more", after=0.01)
        case "snooze":
            if not job.headers.get("snoozed") and not _snoozed(job):
                raise Snooze(0.01)
        case "permanent":
            raise Permanent("it never can")
    note("end", 0, job.attempt)


def _snoozed(job: Job) -> bool:
    """Tell whether this job was snoozed before: only the effect log knows, the attempt does not count."""
    log = Path(os.environ["EFFECTS"]).read_text()
    return log.count('"start"') > 1
