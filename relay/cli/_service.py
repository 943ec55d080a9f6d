"""The service: read the options, start the relay, stop it at a signal."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pgqueue.cli import Command, database, dsn_option, option
from pgqueue.cli._app import Duration, declare_types, load_app, stop_on_signals
from pgqueue.dsn import connect
from pgqueue.events import Bus
from pgqueue.health import keep_file, pages, serve
from pgqueue.schema_version import require_schema
from relay import config
from relay.publish import RejectionPolicy
from relay.report import Report
from relay.routes import Routes, routes
from relay.service import Relay
from relay.sinks import SinkContext, open_sink
from relay.wal import prepare

#: Where a relay hears of new events.
READ_FROM = ("table", "wal")


class _Unnamed(click.Context):
    """A context that shows the service under the group's own name: nobody types a command to start it."""

    @property
    def command_path(self) -> str:
        return super().command_path if self.parent is None else self.parent.command_path


class Service(Command):
    """The command that runs when none is named."""

    context_class = _Unnamed


@click.command("outbox-relay", cls=Service)
@click.argument("app", required=False, envvar="OUTBOX_APP")
@dsn_option
@option(
    "--sink",
    env="OUTBOX_SINK",
    metavar="URL",
    help="Where events go: kafka://.., https://.., queue:, stdout: ..",
)
@option(
    "--route",
    env="OUTBOX_ROUTE",
    multiple=True,
    metavar="PATTERN=URL",
    help="Where events of a type (order.placed) or prefix (order.*) go instead; repeatable.",
)
@option(
    "--routes",
    env="OUTBOX_ROUTES",
    type=click.Path(dir_okay=False, path_type=Path),
    help='The same in a TOML file: table [routes], "PATTERN" = "URL".',
)
@option(
    "--source",
    env="OUTBOX_SOURCE",
    metavar="TEXT",
    help="CloudEvents source; keep it stable. The words table and wal mean --read-from.  [default: /outbox/DATABASE]",
)
@option(
    "--source-epoch",
    env="OUTBOX_SOURCE_EPOCH",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Raise it after a restore: N > 0 is added to the source as /N.",
)
@option(
    "--name",
    env="OUTBOX_NAME",
    metavar="TEXT",
    help="Name of this relay in tables and logs.  [default: outbox-relay@HOST]",
)
@option(
    "--read-from",
    env="OUTBOX_READ_FROM",
    type=click.Choice(READ_FROM),
    default="table",
    show_default=True,
    help="wal: follow the write-ahead log (wal_level = logical), one relay at a time.",
)
@option("--batch", env="OUTBOX_BATCH", type=int, default=1000, show_default=True, help="Events a batch.")
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
    help="Requests at a time (https:, sqs:, sns:, kinesis:).",
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
    "--allow-private",
    env="OUTBOX_ALLOW_PRIVATE",
    is_flag=True,
    help="Let https: and http: go to private and loopback addresses.",
)
@option(
    "--health-port",
    env="OUTBOX_HEALTH_PORT",
    type=int,
    help="Answer 200 here while the loops make progress, else 503; and /metrics (extra metrics).",
)
@option(
    "--health-host",
    env="OUTBOX_HEALTH_HOST",
    default="0.0.0.0",  # noqa: S104 - probes come from outside
    show_default=True,
    help="Address of the health port.",
)
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
@option(
    "--log-level",
    env="OUTBOX_LOG_LEVEL",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged, to stderr.",
)
def command(dsn: str | None, sink: str | None, app: str | None, **options: Any) -> None:
    """Run the service until SIGTERM or SIGINT; a second signal ends it at once."""
    if sink is None and not options["route"] and options["routes"] is None:
        raise click.UsageError(
            "Missing option '--sink': where events go, for example https://warehouse.example/events or stdout:"
        )
    logging.basicConfig(
        level=options["log_level"].upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if click.get_current_context().get_parameter_source("webhook_secret") is ParameterSource.COMMANDLINE:
        click.echo(
            "warning: everybody on this machine can see a secret in --webhook-secret; put it in OUTBOX_WEBHOOK_SECRET",
            err=True,
        )
    if options["source"] in READ_FROM:
        options["read_from"], options["source"] = options["source"], None
    loaded = load_app(app) if app else None
    table = routes(sink, options["route"], options["routes"])
    with ExitStack() as stack:
        url = stack.enter_context(database(dsn))
        with connect(url, autocommit=True) as conn:
            require_schema(conn)
            dbname = conn.info.dbname
            if options["read_from"] == "wal":
                prepare(conn)
            if loaded is not None and "queue" in {
                to.partition(":")[0].lower() for to in table.table.values()
            }:
                declare_types(conn, loaded)
        settings = _settings(url, dbname, options)
        context = SinkContext(
            source=settings.source,
            send_timeout=settings.send_timeout,
            dsn=url,
            parallel=options["parallel"],
            keep=settings.keep,
            subscribers=loaded.subscribers if loaded is not None else None,
            secrets=options["webhook_secret"],
            allow_private=options["allow_private"],
        )
        sinks = {to: open_sink(to, context) for to in dict.fromkeys(table.table.values())}
        bus = Bus()
        Report(bus)
        relay = Relay(settings, Routes({pattern: sinks[to] for pattern, to in table.table.items()}), bus)
        told = stop_on_signals()
        if options["health_port"] is not None:
            server = serve(options["health_host"], options["health_port"], relay.stalled, pages(bus, url))
            stack.callback(server.shutdown)
        if options["health_file"] is not None:
            over = threading.Event()
            thread = keep_file(options["health_file"], relay.stalled, over)
            stack.callback(thread.join)
            stack.callback(over.set)
        relay.start()
        while not told.wait(0.5):
            pass  # a signal that comes just before an endless wait begins would not interrupt it
        if not relay.stop(options["grace"].total_seconds()):
            logging.getLogger("relay").error(
                "still publishing at the end of the grace; what is not marked is published again"
            )
            logging.shutdown()
            os._exit(1)


def _settings(url: str, dbname: str, options: dict[str, Any]) -> config.RelayConfig:
    policy = RejectionPolicy(
        max_attempts=options["max_attempts"], block=options["on_rejected"] == config.BLOCK_AGGREGATE
    )
    return config.RelayConfig(
        dsn=url,
        name=options["name"] or f"outbox-relay@{socket.gethostname()}",
        source=_source(options["source"] or f"/outbox/{dbname}", options["source_epoch"]),
        batch=options["batch"],
        lease=options["lease"].total_seconds(),
        pause=options["wait"] / 1000,
        send_timeout=options["send_timeout"].total_seconds(),
        retention=options["retention"],
        inbox_retention=options["inbox_retention"],
        sample_every=options["sample"].total_seconds(),
        wal=options["read_from"] == "wal",
        rejection=policy,
    )


def _source(name: str, epoch: int) -> str:
    """Return the CloudEvents source: with another epoch the ids of a restored outbox are no repetitions."""
    return f"{name.rstrip('/')}/{epoch}" if epoch else name
