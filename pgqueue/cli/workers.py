"""`pgqueue workers`"""

from __future__ import annotations

import click

from pgqueue.cli import Command, dsn_option
from pgqueue.cli._session import opened
from pgqueue.cli._table import print_json, print_table
from pgqueue.connection import execute
from pgqueue.jobs import WorkerRow, workers


@click.command("workers", cls=Command)
@dsn_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def command(dsn: str | None, *, as_json: bool) -> None:
    """List the worker processes, what they serve and when they were heard of last.

    OVERRUN: slots kept by handlers that go on after their timeout.
    """
    with opened(dsn) as conn:
        found = execute(conn, workers())
    if as_json:
        print_json(found)
        return
    print_table(
        ("WORKER", "STATE", "QUEUES", "IN FLIGHT", "SLOTS", "OVERRUN", "STARTED", "BEAT S AGO", "VERSION", "NAMES"),
        [
            (
                f"{w.host}:{w.pid}", _state(w), w.queues, w.in_flight, w.concurrency, w.overrun, w.started_at,
                w.beat_s_ago, w.version, w.names,
            )
            for w in found
        ],
        empty="no workers",
    )  # fmt: skip


def _state(worker: WorkerRow) -> str:
    if not worker.alive:
        return "silent"
    return "draining" if worker.draining else "alive"
