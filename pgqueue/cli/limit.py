"""`pgqueue limit list | job | queue`"""

from __future__ import annotations

from typing import Any

import click

from pgqueue import control
from pgqueue.cli import Group, dsn_option
from pgqueue.cli._payload import undeclared
from pgqueue.cli._session import opened
from pgqueue.cli._table import clean, print_json, print_table
from pgqueue.connection import execute
from pgqueue.errors import BadOption
from pgqueue.limits import Limits, as_declared, limit_job, limit_queue, limits
from pgqueue.policy import per_second


class Rate(click.ParamType[float]):
    """A rate per second: 100/min, 5/s, 1000/h, 0 for none."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        if text == "0":
            return 0.0
        try:
            return per_second("rate", text)
        except BadOption:
            self.fail(f"{text[:40]!r} is not a rate; write 100/min, 5/s or 1000/h, or 0 for none", param, ctx)


@click.group("limit", cls=Group)
def command() -> None:
    """Limit how many jobs run at once and how many begin in a time; workers see it within a second."""


@command.command("list")
@dsn_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def list_(dsn: str | None, *, as_json: bool) -> None:
    """List the job types and queues that have limits, and how many of their jobs run."""
    with opened(dsn) as conn:
        found = execute(conn, limits())
    if as_json:
        print_json(found)
        return
    print_table(
        ("KIND", "NAME", "LIMIT", "RATE", "BURST", "KEY LIMIT", "KEY RATE", "RUNNING", "SET"),
        [
            (
                f.kind, f.name, f.limit, rate(f.rate), f.burst, f.key_limit, rate(f.key_rate), f.held,
                "by hand" if f.changed or f.kind == "queue" else "in code",
            )
            for f in found
        ],
        empty="no limits",
    )  # fmt: skip


@command.command()
@dsn_option
@click.argument("name")
@click.option("--limit", type=int, metavar="N", help="So many at once; 0: no limit.")
@click.option("--rate", "per_s", type=Rate(), help="So many begin in that time; 0: no rate.")
@click.option("--key-limit", type=int, metavar="N", help="So many of each key at once; 0: no limit.")
@click.option("--key-rate", type=Rate(), help="So many of each key begin in that time; 0: no rate.")
@click.option("--as-declared", "reset", is_flag=True, help="What the code declares decides again.")
def job(
    dsn: str | None, *, name: str, limit: int | None, per_s: float | None, key_limit: int | None,
    key_rate: float | None, reset: bool,
) -> None:  # fmt: skip
    """Limit the jobs of a name, or of each of their keys, in each queue over all its workers.

    What is set here holds, whatever workers declare when they start, until --as-declared.
    """
    given = any(value is not None for value in (limit, per_s, key_limit, key_rate))
    if given == reset:
        raise BadOption(
            "limit job", "give --limit, --rate, --key-limit or --key-rate, or --as-declared alone"
        )
    statement = (
        as_declared(name)
        if reset
        else limit_job(name, limit=limit, rate=per_s, key_limit=key_limit, key_rate=key_rate)
    )
    with opened(dsn) as conn:
        if not execute(conn, statement):
            known = execute(conn, control.names())
            raise undeclared(name, known, "")
        found = [f for f in execute(conn, limits()) if f.kind == "job" and f.name == name]
    if reset:
        click.echo(
            f"jobs {clean(name)}: the next start of a worker, or pgqueue sync, sets what the code says"
        )
    else:
        click.echo(f"jobs {clean(name)}: {said(found)}")


@command.command()
@dsn_option
@click.argument("queue")
@click.option("--limit", type=int, metavar="N", help="So many at once over all workers; 0: no limit.")
@click.option("--rate", "per_s", type=Rate(), help="So many begin in that time; 0: no rate.")
@click.option("--burst", type=float, metavar="N", help="So many may begin at once after a rest.")
def queue(
    dsn: str | None, *, queue: str, limit: int | None, per_s: float | None, burst: float | None
) -> None:  # fmt: skip
    """Limit the jobs of a queue over all workers."""
    if limit is None and per_s is None and burst is None:
        raise BadOption("limit queue", "give --limit, --rate or --burst")
    with opened(dsn) as conn:
        execute(conn, limit_queue(queue, limit=limit, rate=per_s, burst=burst))
        found = [f for f in execute(conn, limits()) if f.kind == "queue" and f.name == queue]
    click.echo(f"queue {clean(queue)}: {said(found)}")


def said(found: list[Limits]) -> str:
    """Say the limits of one name or queue in words."""
    if not found:
        return "no limits"
    (f,) = found
    parts = [f"limit {f.limit}"] if f.limit else []
    parts += [f"rate {rate(f.rate)}"] if f.rate else []
    parts += [f"burst {f.burst:g}"] if f.burst else []
    parts += [f"key limit {f.key_limit}"] if f.key_limit else []
    parts += [f"key rate {rate(f.key_rate)}"] if f.key_rate else []
    return ", ".join(parts)


def rate(per_s: float | None) -> str | None:
    """Say a rate in the largest unit that is not longer than an hour and gives at least one."""
    if per_s is None:
        return None
    for unit, seconds in (("s", 1), ("min", 60), ("h", 3600)):
        if per_s * seconds >= 1 or unit == "h":
            return f"{per_s * seconds:.6g}/{unit}"
    return None
