"""`outbox-relay`: the service, and what an operator does with events that were set aside.

outbox-relay --sink https://example.org/events
outbox-relay shop.jobs:app --sink queue:
outbox-relay status | parked | retry ID .. | skip ID ..
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from pgqueue.cli import Command, Commands, database, dsn_option, option
from pgqueue.connection import execute
from pgqueue.dsn import connect
from pgqueue.errors import BadOption, ConfigError
from pgqueue.events import Bus
from pgqueue.schema_version import require_schema
from relay import config, park
from relay.health import keep_file, serve
from relay.lag import lag
from relay.publish import RejectionPolicy
from relay.report import Report
from relay.service import Relay
from relay.sinks import SinkContext, open_sink

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)?")
_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Duration(click.ParamType):
    """A length of time: 90, 90s, 15m, 12h, 7d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        found = _DURATION.fullmatch(str(value).strip())
        if found is None:
            self.fail(f"{value!r} is not a duration; write 90s, 15m, 12h or 7d", param, ctx)
        return timedelta(seconds=float(found[1]) * _UNIT[found[2] or "s"])


class RelayCommands(Commands):
    """The group; what does not begin with a subcommand starts the service."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(name for name, command in self.commands.items() if not command.hidden)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self.commands.get(cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {"-h", "--help", "--version"}
        if not args or (args[0] not in self.commands and args[0] not in own):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [row for param in self.commands["run"].get_params(ctx) if (row := param.get_help_record(ctx))]
        with formatter.section("Options of the service"):
            formatter.write_dl([row for row in rows if not row[0].startswith("-h")])
        super().format_options(ctx, formatter)


@click.group(
    cls=RelayCommands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    options_metavar="[APP] [OPTIONS]",
    subcommand_metavar="| COMMAND",
)
@click.version_option(package_name="pgqueue-relay", prog_name="outbox-relay")
def main() -> None:
    """Publish the events of the outbox to a sink, in order per aggregate, at least once.

    APP (module:name) is needed only by the sink queue:, whose subscribers it holds.
    """


@main.command("run", cls=Command, hidden=True)
@click.argument("app", required=False)
@dsn_option
@option(
    "--sink",
    env="OUTBOX_SINK",
    required=True,
    metavar="URL",
    help="Where events go: stdout:, https://.., queue: ..",
)
@option(
    "--source",
    env="OUTBOX_SOURCE",
    metavar="TEXT",
    help="CloudEvents source; keep it stable.  [default: /outbox/DATABASE]",
)
@option(
    "--name",
    env="OUTBOX_NAME",
    metavar="TEXT",
    help="Name of this relay in tables and logs.  [default: outbox-relay@HOST]",
)
@option("--batch", env="OUTBOX_BATCH", type=int, default=200, show_default=True, help="Events a batch.")
@option(
    "--lease",
    env="OUTBOX_LEASE",
    type=Duration(),
    default="10s",
    show_default=True,
    help="Partitions of a dead relay are free after this.",
)
@option(
    "--wait",
    env="OUTBOX_WAIT",
    type=float,
    default=2.0,
    show_default=True,
    help="Milliseconds to wait after a batch of fewer than 10 events.",
)
@option(
    "--send-timeout",
    env="OUTBOX_SEND_TIMEOUT",
    type=Duration(),
    default="30s",
    show_default=True,
    help="No event of a batch is sent later than this.",
)
@option(
    "--parallel",
    env="OUTBOX_PARALLEL",
    type=int,
    default=16,
    show_default=True,
    help="Requests at a time (https:).",
)
@option(
    "--retention",
    env="OUTBOX_RETENTION",
    type=Duration(),
    default="7d",
    show_default=True,
    help="How long published events stay; 0 deletes at once.",
)
@option(
    "--inbox-retention",
    env="OUTBOX_INBOX_RETENTION",
    type=Duration(),
    default="7d",
    show_default=True,
    help="How long the inbox remembers a key.",
)
@option(
    "--max-attempts",
    env="OUTBOX_MAX_ATTEMPTS",
    type=int,
    default=5,
    show_default=True,
    help="Rejections until an event is parked.",
)
@option(
    "--on-rejected",
    env="OUTBOX_ON_REJECTED",
    type=click.Choice([config.BLOCK_AGGREGATE, config.PARK_EVENT]),
    default=config.BLOCK_AGGREGATE,
    show_default=True,
    help="What a parked event does to the later ones of its aggregate.",
)
@option(
    "--webhook-secret",
    env="OUTBOX_WEBHOOK_SECRET",
    multiple=True,
    metavar="WHSEC",
    help="Signs webhooks; two during a rotation, separated by a space.",
)
@option(
    "--health-port",
    env="OUTBOX_HEALTH_PORT",
    type=int,
    help="Answer 200 here while the loops make progress, else 503.",
)
@option(
    "--health-host",
    env="OUTBOX_HEALTH_HOST",
    default="0.0.0.0",
    show_default=True,
    help="Address of the health port.",
)  # noqa: S104  probes come from outside
@option(
    "--health-file",
    env="OUTBOX_HEALTH_FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A file that is there while the loops make progress.",
)
@option(
    "--sample",
    env="OUTBOX_SAMPLE",
    type=Duration(),
    default="15s",
    show_default=True,
    help="How often the depth line is written.",
)
@option(
    "--grace",
    env="OUTBOX_GRACE",
    type=Duration(),
    default="30s",
    show_default=True,
    help="How long a stop may take.",
)
@option("--log-level", env="OUTBOX_LOG_LEVEL", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True)  # fmt: skip
def run(dsn: str | None, sink: str, app: str | None, **options: Any) -> None:
    """Run the service until SIGTERM or SIGINT; a second signal ends it at once."""
    logging.basicConfig(
        level=options["log_level"].upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    subscribers = _app(app).subscribers if app else None
    with ExitStack() as stack:
        url = stack.enter_context(database(dsn))
        with connect(url) as conn:
            require_schema(conn)
            dbname = conn.info.dbname
        settings = _settings(url, dbname, options)
        target = open_sink(
            sink,
            SinkContext(
                source=settings.source,
                send_timeout=settings.send_timeout,
                dsn=url,
                parallel=options["parallel"],
                keep=settings.keep,
                subscribers=subscribers,
                secrets=options["webhook_secret"],
            ),
        )
        bus = Bus()
        Report(bus)
        relay = Relay(settings, target, bus)
        told = _stop_on_signals()
        if options["health_port"] is not None:
            server = serve(options["health_host"], options["health_port"], relay.stalled)
            stack.callback(server.shutdown)
        if options["health_file"] is not None:
            over = threading.Event()
            thread = keep_file(options["health_file"], relay.stalled, over)
            stack.callback(thread.join)
            stack.callback(over.set)
        relay.start()
        told.wait()
        if not relay.stop(options["grace"].total_seconds()):
            logging.getLogger("relay").error(
                "still publishing at the end of the grace; what is not marked is published again"
            )
            logging.shutdown()
            os._exit(1)


@main.command("status", cls=Command)
@dsn_option
def status(dsn: str | None) -> None:
    """Show the depth of the outbox and who publishes it."""
    with database(dsn) as url, connect(url) as conn:
        require_schema(conn)
        seen = execute(conn, lag())
    click.echo(f"pending             {seen.pending}")
    click.echo(f"oldest pending      {seen.oldest_pending_s:.1f} s")
    click.echo(f"parked              {seen.parked}")
    click.echo(f"blocked aggregates  {seen.blocked_aggregates}")
    click.echo(f"relays              {seen.relays}")
    click.echo(f"orphan partitions   {seen.orphan_partitions}")


@main.command("parked", cls=Command)
@dsn_option
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Rows at most.")
@click.option("--after", type=int, default=0, show_default=True, help="Only ids above this one.")
def parked(dsn: str | None, limit: int, after: int) -> None:
    """List events that are parked or wait, oldest first."""
    with database(dsn) as url, connect(url) as conn:
        require_schema(conn)
        rows = execute(conn, park.parked(after=after, limit=limit))
    for row in rows:
        what = "blocks" if row.blocks and row.parked_at else "waits" if row.blocks else "parked"
        click.echo(
            f"{row.id}\t{what}\t{row.event_type}\t{row.aggregate_id or '-'}\tattempts={row.attempts}\t{_line(row.last_error)}"
        )
    if len(rows) == limit:
        click.echo(f"more: outbox-relay parked --after {rows[-1].id}", err=True)


@main.command("retry", cls=Command)
@dsn_option
@click.argument("ids", type=int, nargs=-1, required=True)
def retry(dsn: str | None, ids: tuple[int, ...]) -> None:
    """Make parked or waiting events due again."""
    _change(dsn, ids, park.retry, "due again")


@main.command("skip", cls=Command)
@dsn_option
@click.argument("ids", type=int, nargs=-1, required=True)
def skip(dsn: str | None, ids: tuple[int, ...]) -> None:
    """Set events aside for good, so that the later ones of their aggregates go on."""
    _change(dsn, ids, park.skip, "skipped")


def _change(dsn: str | None, ids: Sequence[int], verb: Callable[[Sequence[int]], Any], what: str) -> None:
    with database(dsn) as url, connect(url) as conn:
        require_schema(conn)
        done = set(execute(conn, verb(ids)))
    for id_ in ids:
        click.echo(f"{id_}\t{what if id_ in done else 'unchanged: no such unpublished event in trouble'}")
    if not done:
        raise click.exceptions.Exit(1)


def _line(text: str) -> str:
    return " ".join(text.split())[:200]


def _settings(url: str, dbname: str, options: dict[str, Any]) -> config.RelayConfig:
    policy = RejectionPolicy(
        max_attempts=options["max_attempts"], block=options["on_rejected"] == config.BLOCK_AGGREGATE
    )
    return config.RelayConfig(
        dsn=url,
        name=options["name"] or f"outbox-relay@{socket.gethostname()}",
        source=options["source"] or f"/outbox/{dbname}",
        batch=options["batch"],
        lease=options["lease"].total_seconds(),
        pause=options["wait"] / 1000,
        send_timeout=options["send_timeout"].total_seconds(),
        retention=options["retention"],
        inbox_retention=options["inbox_retention"],
        sample_every=options["sample"].total_seconds(),
        rejection=policy,
    )


def _app(path: str) -> Any:
    """Import `module:name` from the current folder or the installed packages."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise BadOption("APP", f"{path!r} is not module:name, for example shop.jobs:app")
    sys.path.insert(0, str(Path.cwd()))
    try:
        app = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load the app {path}: {error}") from error
    if not callable(getattr(app, "subscribers", None)):
        raise ConfigError(f"{path} is {type(app).__name__}, not an App")
    return app


def _stop_on_signals() -> threading.Event:
    told = threading.Event()

    def stop(number: int, _: object) -> None:
        if told.is_set():
            os._exit(128 + number)
        told.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return told
