"""An app whose handler looks whether it should stop."""

from __future__ import annotations

import time

from pgqueue import App, Job
from tests.process.apps.effects import note
from tests.process.apps.every import AT_ONCE, Work

app = App()


@app.job("heeds", backoff=AT_ONCE)
def heeds(order: Work, job: Job) -> None:
    """Work until told to stop, and fail with an error of its own."""
    note("start", order.n, job.attempt)
    while not job.cancelled:
        time.sleep(0.005)
    note("told", order.n, job.attempt)
    raise RuntimeError("cleaning up went wrong")
