"""What the programs of the relay's peers share; they run under their own interpreters: standard library alone."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.program import setting

AGGREGATES = 10_000
EVENT_BYTES = 300
EVENT_TYPE = "bench.happened"
#: The destination at the broker.
NAME = "events"


def event(number: int) -> dict[str, Any]:
    """Return the payload of an event: EVENT_BYTES of JSON."""
    bare = {"n": number, "text": ""}
    return {"n": number, "text": "x" * (EVENT_BYTES - len(json.dumps(bare)))}


def aggregate(number: int, aggregates: int | None = None) -> str:
    """Return the aggregate that an event belongs to; how many there are is a setting of the program."""
    return f"aggregate-{number % (aggregates or int(setting('AGGREGATES', str(AGGREGATES))))}"


def place() -> str:
    """Return host and port of the broker."""
    return setting("PLACE")
