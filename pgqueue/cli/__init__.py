"""The command line of pgqueue: each module of this package is one command, found by its name.

A module holds `command`, a click command; `dead_jobs.py` becomes `pgqueue dead-jobs`. Modules whose name
begins with an underscore are no command of the group. What an operator can get wrong ends as one line
`error: ...` on stderr and exit status 1, without a traceback.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pkgutil import iter_modules
from typing import IO, Any, TypeVar

import click
import psycopg

from pgqueue import dsn as dsns
from pgqueue.errors import DatabaseUnreachable, PgqueueError

#: Files that do not tell an operator where to look: the import system, installed packages.
_INSTALLED = re.compile(r"^<|[/\\](?:site-packages|importlib|pgqueue[/\\]cli|relay[/\\]cli)[/\\]")

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class Failure(click.ClickException):
    """An error shown to the operator as one line."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.message}", file=file, err=file is None)


@contextmanager
def reported() -> Iterator[None]:
    """Show errors of ours and of Postgres as one line and leave with status 1."""
    try:
        yield
    except PgqueueError as error:
        raise Failure(dsns.one_line(error)) from error
    except psycopg.OperationalError as error:
        raise Failure(f"the connection to Postgres was lost: {dsns.one_line(error)}; start again") from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise Failure(
            f"{dsns.one_line(error)}; as the owner of the schema run: pgqueue migrate --grant KIND=ROLE "
            "(producer, worker, relay or reader)"
        ) from error
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction) as error:
        raise Failure(f"{dsns.one_line(error)}; run: pgqueue migrate check") from error
    except psycopg.errors.InvalidParameterValue as error:
        raise Failure(dsns.one_line(error)) from error


def raised(error: BaseException) -> str:
    """Name an error that a module of the operator's raised, and the last line of theirs on its way."""
    text = f"{type(error).__name__}: {dsns.one_line(error)}"
    own = [f for f in traceback.extract_tb(error.__traceback__) if not _INSTALLED.search(f.filename)]
    return f"{text} ({own[-1].filename}, line {own[-1].lineno})" if own else text


class Command(click.Command):
    """A command that shows its errors as one line."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with reported():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with reported():
            return super().invoke(ctx)


class Group(click.Group):
    """A command with commands below it, which end as every command here does."""

    command_class = Command


class Commands(Group):
    """A group whose commands are the modules of a package, each imported when it is asked for."""

    def __init__(self, *args: Any, package: str = __name__, **extra: Any) -> None:
        super().__init__(*args, **extra)
        self.package = package

    def list_commands(self, ctx: click.Context) -> list[str]:
        path = import_module(self.package).__path__
        found = (m.name.replace("_", "-") for m in iter_modules(path) if not m.name.startswith("_"))
        return sorted({*found, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        if (known := super().get_command(ctx, cmd_name)) is not None:
            return known
        command: click.Command = import_module(f"{self.package}.{cmd_name.replace('-', '_')}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        with reported():
            return super().invoke(ctx)


def option(*names: str, env: str, **extra: Any) -> Callable[[Decorated], Decorated]:
    """Add an option that an environment variable can give too; --help shows both."""
    return click.option(*names, envvar=env, show_envvar=True, **extra)


def dsn_option(function: Decorated) -> Decorated:
    """Add --dsn; the command gives its value to `database`."""
    return click.option(
        "--dsn",
        metavar="DSN",
        help="The database: a URL, host=... dbname=..., or embedded:[path].  "
        "[env var: PGQUEUE_DSN, DATABASE_URL, PG*]",
    )(function)


@contextmanager
def database(dsn: str | None) -> Iterator[str]:
    """Yield the libpq DSN that an option and the environment name; run the server if it is embedded."""
    if dsn and dsns.has_password(dsn):
        click.echo(
            "warning: everybody on this machine can see a password in --dsn; put it in PGQUEUE_DSN, "
            "PGPASSWORD or a password file",
            err=True,
        )
    chosen = dsns.resolve(dsn, os.environ)
    if not chosen.startswith(dsns.EMBEDDED):
        yield chosen
        return
    from pgqueue.embedded import open_dsn

    with ExitStack() as stack:
        try:
            running = stack.enter_context(open_dsn(chosen))
        except OSError as error:
            problem = f"{error.strerror}: {error.filename}; name a folder that this account can write"
            raise DatabaseUnreachable(chosen, problem) from error
        yield running


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pgqueue-relay", prog_name="pgqueue")
def main() -> None:
    """Jobs inside the business transaction, on Postgres alone."""


def worker() -> None:
    """Start pgqueue-worker; a signal ends it at once, in order, until it has loops to stop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    import_module("pgqueue.cli._worker").command()


__all__ = [
    "Command",
    "Commands",
    "Failure",
    "database",
    "dsn_option",
    "main",
    "option",
    "raised",
    "reported",
    "worker",
]
