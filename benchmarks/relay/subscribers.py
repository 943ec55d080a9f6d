"""The subscriber of `queue:`: what an application would import."""

from __future__ import annotations

from typing import Any

from benchmarks.relay.peers import EVENT_TYPE
from pgqueue import App

QUEUE = "subscribed"

app = App()


@app.on_event(EVENT_TYPE, queue=QUEUE)
def take_note(event: dict[str, Any]) -> None:
    """Do nothing: the jobs are counted, not run."""
