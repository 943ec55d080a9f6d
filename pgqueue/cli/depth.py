"""`pgqueue depth`"""

from __future__ import annotations

from shlex import quote

import click

from pgqueue.cli import Command, dsn_option, option
from pgqueue.cli._session import opened
from pgqueue.cli._table import clean, print_json, print_table
from pgqueue.connection import execute
from pgqueue.control import unsampled
from pgqueue.depth import depth, gauge, unknown

OLD_S = 30.0


@click.command("depth", cls=Command)
@dsn_option
@option(
    "--exact", is_flag=True, env="PGQUEUE_DEPTH_EXACT", help="Count now; up to a second per million jobs."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def command(dsn: str | None, *, exact: bool, as_json: bool) -> None:
    """Show how much waits in each queue.

    As the workers sampled it some seconds ago; counted now where a queue has jobs and no fresh sample.
    """
    with opened(dsn) as conn:
        if not exact and (stale := execute(conn, unsampled())):
            click.echo(f"counted now: no worker samples {', '.join(map(repr, stale[:5]))}", err=True)
            exact = True
        # A queue with an old sample that needs no count has no jobs: its last sample says what was, not what is.
        found = execute(conn, depth()) if exact else [d for d in execute(conn, gauge()) if d.age <= OLD_S]
        strange = execute(conn, unknown())
    for one in strange:
        what = f"--name {quote(clean(one.name))} --queue {quote(clean(one.queue))}"
        click.echo(
            f"{one.jobs} jobs {clean(one.name)!r} in queue {clean(one.queue)!r} wait for a worker that knows them: "
            f"start one, or pgqueue jobs move {what} --to QUEUE, or pgqueue jobs cancel {what}",
            err=True,
        )
    if as_json:
        print_json(found)
        return
    print_table(
        ("QUEUE", "READY", "DELAYED", "IN FLIGHT", "BLOCKED", "OLDEST READY S", "SAMPLED S AGO"),
        [
            (
                d.queue,
                _count(d.ready, capped=d.capped),
                d.delayed,
                d.in_flight,
                d.blocked,
                d.oldest_ready_s,
                d.age,
            )
            for d in found
        ],
        empty="no jobs",
    )


def _count(ready: int, *, capped: bool) -> int | str:
    return f"{ready}+" if capped else ready
