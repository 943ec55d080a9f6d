"""An app with a schedule for every second, and the same without it."""

from __future__ import annotations

from datetime import datetime

from pgqueue import App, Job
from tests.process.apps.effects import note

app = App()


@app.schedule("* * * * * *", missed="all", cap=1000)
@app.job("beat")
def beat(job: Job) -> None:
    note("beat", int(datetime.fromisoformat(job.headers["tick"]).timestamp()))


forgetful = App()


@forgetful.job("beat")
def beat_alone(job: Job) -> None:
    beat.handler(job)
