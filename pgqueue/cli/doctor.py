"""`pgqueue doctor`"""

from __future__ import annotations

from typing import Any

import click

from pgqueue.cli import Command, dsn_option
from pgqueue.cli._session import opened
from pgqueue.cli._table import clean, print_json
from pgqueue.connection import execute
from pgqueue.doctor import checkup, slots


@click.command("doctor", cls=Command)
@dsn_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def command(dsn: str | None, *, as_json: bool) -> None:
    """Say what is wrong with this installation and what to do about it.

    Exit status 1 if there is a problem; a warning is no problem.
    """
    with opened(dsn, check=False) as conn:
        found = checkup(conn)
    problems = sum(one.level == "problem" for one in found)
    if as_json:
        print_json({"ok": not problems, "findings": found})
    else:
        width = max(len(one.check) for one in found)
        for one in found:
            click.echo(f"{one.level:<7}  {one.check:<{width}}  {clean(one.text)}".rstrip())
            if one.remedy:
                click.echo(f"{'':<7}  {'':<{width}}  -> {clean(one.remedy)}")
    if problems:
        raise click.exceptions.Exit(1)


def slot_lines(handle: Any) -> list[str]:
    """Tell of each replication slot of a relay what log it holds, for `outbox-relay status`."""
    return [f"{slot.name}: {slot.text}" for slot in execute(handle, slots())]
