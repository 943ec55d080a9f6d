"""`pgqueue migrate`: create the schema, move it up or down, or say where it is."""

from __future__ import annotations

import sys

import click

from pgqueue import migrate
from pgqueue.cli import Command, database, dsn_option, option
from pgqueue.errors import BadOption
from pgqueue.migrate import Grant, Patience

_DEFAULT = Patience()


class _GrantType(click.ParamType[Grant]):
    name = "KIND=ROLE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Grant:
        kind, equals, role = str(value).partition("=")
        if kind not in migrate.KINDS or not equals or not role:
            self.fail(f"{value!r} is not KIND=ROLE with KIND one of {', '.join(migrate.KINDS)}", param, ctx)
        return Grant(kind=kind, role=role)


@click.command("migrate", cls=Command)
@click.argument("target", default="up", metavar="[up|down|REVISION|current|check]")
@dsn_option
@option(
    "--sql",
    "script",
    is_flag=True,
    env="PGQUEUE_MIGRATE_SQL",
    help="Print the script for a DBA and run nothing; needs no database.",
)
@option(
    "--from",
    "start",
    metavar="REVISION",
    env="PGQUEUE_MIGRATE_FROM",
    help="With --sql: where the database is.  [default: base; for down: head]",
)
@option(
    "--lock-timeout",
    type=float,
    metavar="SECONDS",
    default=_DEFAULT.lock_timeout,
    show_default=True,
    env="PGQUEUE_MIGRATE_LOCK_TIMEOUT",
    help="Wait this long for a lock, then step back and try again.",
)
@option(
    "--tries",
    type=int,
    metavar="N",
    default=_DEFAULT.tries,
    show_default=True,
    env="PGQUEUE_MIGRATE_TRIES",
    help="Try this often in all.",
)
@option(
    "--wait",
    type=float,
    metavar="SECONDS",
    default=_DEFAULT.wait,
    show_default=True,
    env="PGQUEUE_MIGRATE_WAIT",
    help="Wait this long for a migration that runs already.",
)
@option(
    "--grant",
    "grants",
    type=_GrantType(),
    multiple=True,
    env="PGQUEUE_MIGRATE_GRANT",
    help="Give a database role the rights of a producer, worker, relay or reader; may be repeated.",
)
@option(
    "--yes",
    is_flag=True,
    env="PGQUEUE_MIGRATE_YES",
    help="Go down without asking: tables of the revision go with all they hold.",
)
def command(
    *,
    target: str,
    dsn: str | None,
    script: bool,
    start: str | None,
    lock_timeout: float,
    tries: int,
    wait: float,
    grants: tuple[Grant, ...],
    yes: bool,
) -> None:
    """Bring schema pgqueue of a database to the revision this version needs.

    \b
    up        to the newest revision (the default)
    down      one revision back
    REVISION  up or down to it: head, base, pgqueue_0001 or just 1
    current   print the revision of the database
    check     exit 0 if this version can work on the database, 1 if not

    Safe to start from many processes at once: one works, the others wait for it.
    """
    patience = Patience(lock_timeout=lock_timeout, tries=tries, wait=wait)
    if start is not None and not script:
        raise BadOption("--from", "goes with --sql; otherwise the database says where it is")
    if grants and target in ("down", "current", "check", "base"):
        raise BadOption("--grant", f"goes with up, not with {target}")
    if script:
        click.echo(_script(target, start, patience) + migrate.grant_sql(grants), nl=False)
        return
    with database(dsn) as url:
        if target == "current":
            click.echo(migrate.current(url) or "none")
        elif target == "check":
            migrate.check(url)
            click.echo(f"the schema is at {migrate.current(url)}: fit for this version")
        else:
            _move(url, target, patience, yes=yes)
            if grants:
                migrate.grant(url, grants)
            for given in grants:
                click.echo(f"{given.role}: has the rights of a {given.kind}")


def _script(target: str, start: str | None, patience: Patience) -> str:
    if target in ("current", "check"):
        raise BadOption("--sql", f"goes with up, down or a revision, not with {target}")
    if target == "down":
        newest = start or migrate.heads()[0]
        return migrate.sql(newest, migrate.previous(newest), patience=patience)
    return migrate.sql(start or "base", "head" if target == "up" else target, patience=patience)


def _move(url: str, target: str, patience: Patience, *, yes: bool) -> None:
    before = migrate.current(url)
    if target == "down":
        if before is None:
            click.echo("the database has no pgqueue tables: nothing to do")
            return
        target = migrate.previous(before)
    goal = "head" if target == "up" else target
    if migrate.is_below(goal, before):
        if not yes:
            _ask(f"Going down from {before} to {goal} drops tables with all they hold. Go on?")
        migrate.downgrade(url, goal, patience=patience)
    else:
        migrate.upgrade(url, goal, patience=patience)
    after = migrate.current(url)
    if after == before:
        click.echo(f"the schema is at {after or 'none'}: nothing to do")
    else:
        click.echo(f"the schema went from {before or 'none'} to {after or 'none'}")


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise BadOption(
            "--yes", "going down drops tables with all they hold; say --yes where nobody can answer"
        )
    click.confirm(question, abort=True)
