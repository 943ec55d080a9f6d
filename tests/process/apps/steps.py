"""Long work in steps: handlers of every kind that keep their place, and a chain of three."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec

from pgqueue import App, Backoff, Job
from tests.process.apps.effects import note

app = App()
AT_ONCE = Backoff(base=0.001, cap=0.01)
PAGES = 6


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Which job, at which page its first attempt fails, at which it dies, which file it waits for at the end."""

    n: int = 0
    fails_at: int = -1
    dies_at: int = -1
    gate: str = ""


def _page(work: Work, job: Job, page: int) -> None:
    """Work on one page; the first attempt fails, or is killed, where the work says so."""
    note("page", work.n, job.attempt, str(page))
    if job.attempt == 1 and page == work.dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if job.attempt == 1 and page == work.fails_at:
        raise RuntimeError(f"page {page} was to fail")


def _wait(work: Work) -> None:
    while work.gate and not Path(work.gate).exists():
        time.sleep(0.005)


@app.job("paged", backoff=AT_ONCE)
def paged(work: Work, job: Job) -> None:
    for page in range(job.state or 0, PAGES):
        job.progress(page / PAGES, f"page {page}")
        _page(work, job, page)
        job.checkpoint(page + 1)
    _wait(work)
    note("end", work.n, job.attempt)


@app.job("paged-async", backoff=AT_ONCE)
async def paged_async(work: Work, job: Job) -> None:
    for page in range(await job.astate() or 0, PAGES):
        job.progress(page / PAGES, f"page {page}")
        _page(work, job, page)
        await job.acheckpoint(page + 1)
    note("end", work.n, job.attempt)


@app.job("paged-process", process=True, backoff=AT_ONCE)
def paged_process(work: Work, job: Job) -> None:
    for page in range(job.state or 0, PAGES):
        job.progress(page / PAGES, f"page {page}")
        _page(work, job, page)
        job.checkpoint(page + 1)
    note("end", work.n, job.attempt)


@app.job("computes", process=True, result=True)
def computes(work: Work, job: Job) -> int:
    job.then(load.with_payload(work))
    return work.n * work.n


@app.job("extract", backoff=AT_ONCE)
def extract(work: Work, job: Job) -> None:
    note("extract", work.n, job.attempt)


@app.job("transform", backoff=AT_ONCE)
def transform(work: Work, job: Job) -> None:
    paged.handler(work, job)
    note("transform", work.n, job.attempt)


@app.job("load", backoff=AT_ONCE)
def load(work: Work, job: Job) -> None:
    note("load", work.n, job.attempt, str(job.parent))
