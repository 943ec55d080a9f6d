"""`pgqueue-worker`: read the options, start the worker (or several), stop at a signal."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pgqueue.app import DEFAULT_QUEUE, App
from pgqueue.cli import Command, database, dsn_option, option
from pgqueue.cli._app import Duration, load_app, stop_on_signals
from pgqueue.cli._processes import stop_with_parent, supervise
from pgqueue.config import WorkerSettings, parse_queues, parse_weights
from pgqueue.events import Bus
from pgqueue.health import keep_file, pages, serve
from pgqueue.report import Report
from pgqueue.worker import Worker


@click.command("pgqueue-worker", cls=Command, context_settings={"max_content_width": 110})
@click.argument("app", envvar="PGQUEUE_APP")
@dsn_option
@option(
    "--queues",
    env="PGQUEUE_QUEUES",
    default="default",
    show_default=True,
    metavar="A[=SLOTS],B,..",
    help="Queues, served strictly in this order. critical=1 keeps a slot for one; with three or more and no "
    "=SLOTS the first keeps one.",
)
@option(
    "--weights", env="PGQUEUE_WEIGHTS", metavar="A=N,B=N,..",
    help="Serve these queues by weight instead of strictly: critical=8,bulk=2 gives bulk two of ten jobs while both "
    "have some. Not together with reserved slots.",
)  # fmt: skip
@option(
    "--concurrency", "-c", env="PGQUEUE_CONCURRENCY", type=int, default=8, show_default=True,
    help="Jobs at once of each kind: threads for def, tasks for async def, child processes.",
)  # fmt: skip
@option(
    "--processes", env="PGQUEUE_PROCESSES", type=click.IntRange(1, 256), default=1, show_default=True,
    help="Worker processes to run and keep running.",
)  # fmt: skip
@option(
    "--prefetch", env="PGQUEUE_PREFETCH", type=int, metavar="N",
    help="Jobs to claim beyond the running ones.  [default: by duration and payload, 0 to 1500]",
)  # fmt: skip
@option(
    "--visibility", env="PGQUEUE_VISIBILITY", type=Duration(), default="30s", show_default=True,
    help="How long a job stays claimed without a heartbeat; grows with its age to 5m.",
)  # fmt: skip
@option(
    "--poll", env="PGQUEUE_POLL", type=Duration(), default="1s", show_default=True,
    help="Longest wait of an idle worker between two looks.",
)  # fmt: skip
@option(
    "--grace", env="PGQUEUE_GRACE", type=Duration(), default="30s", show_default=True,
    help="How long running jobs may take after SIGTERM or SIGINT.",
)  # fmt: skip
@option(
    "--retry-budget/--no-retry-budget",
    env="PGQUEUE_RETRY_BUDGET",
    default=True,
    show_default=True,
    help="Retries beyond 10 % of a queue's executions (or 1 a second) wait longer.",
)
@option(
    "--ledger",
    env="PGQUEUE_LEDGER",
    type=Duration(),
    default="7d",
    show_default=True,
    help="How long idempotency keys are remembered.",
)
@option(
    "--dead-retention",
    env="PGQUEUE_DEAD_RETENTION",
    type=Duration(),
    help="Discard dead letters that died so long ago.  [default: keep them]",
)
@option(
    "--sample",
    env="PGQUEUE_SAMPLE",
    type=Duration(),
    default="15s",
    show_default=True,
    help="How often the depth line is written.",
)
@option(
    "--health-port",
    env="PGQUEUE_HEALTH_PORT",
    type=int,
    help="Answer 200 here while the loops make progress, else 503; and /metrics (extra metrics).",
)
@option(
    "--health-host", env="PGQUEUE_HEALTH_HOST", default="0.0.0.0", show_default=True,  # noqa: S104 - probes come from outside
    help="Address of the health port.",
)  # fmt: skip
@option(
    "--health-file", env="PGQUEUE_HEALTH_FILE", type=click.Path(dir_okay=False, path_type=Path),
    help="A file that is there while the loops make progress.",
)  # fmt: skip
@option(
    "--log-jobs/--no-log-jobs",
    env="PGQUEUE_LOG_JOBS",
    default=False,
    help="Write a line for each job that ends well, too.",
)
@option(
    "--log-level", env="PGQUEUE_LOG_LEVEL", type=click.Choice(["debug", "info", "warning", "error"]), default="info",
    show_default=True, help="What is logged, to stderr.",
)  # fmt: skip
def command(app: str, dsn: str | None, **options: Any) -> None:
    """Run the jobs of APP (module:name) until SIGTERM or SIGINT; a second signal ends it at once.

    A stop claims nothing more, gives back what was not started, and lets running jobs end within the grace.
    """
    logging.basicConfig(
        level=options["log_level"].upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    with ExitStack() as stack:
        url = stack.enter_context(database(dsn))
        settings = _settings(options)
        if options["processes"] > 1:
            sys.exit(supervise(options["processes"], url, options["grace"].total_seconds()))
        bus = Bus()
        Report(bus, every_job=options["log_jobs"])
        loaded = load_app(app)
        _mention_unserved(loaded, settings.queues)
        worker = Worker(loaded, url, settings, bus)
        told = stop_on_signals()
        stop_with_parent(told)
        worker.start()
        if options["health_port"] is not None:
            shown = pages(bus, url)
            server = serve(options["health_host"], options["health_port"], worker.stalled, shown)
            stack.callback(server.shutdown)
        if options["health_file"] is not None:
            over = threading.Event()
            thread = keep_file(options["health_file"], worker.stalled, over)
            stack.callback(thread.join)
            stack.callback(over.set)
        while not told.wait(0.5):
            pass  # a signal that comes just before an endless wait begins would not interrupt it
        if not worker.stop():
            # A thread cannot be stopped, and its job is claimable again already: nothing may come after this.
            logging.getLogger("pgqueue").warning(
                "grace is over: jobs still running were given back, exit now"
            )
            logging.shutdown()
            os._exit(0)


def _mention_unserved(app: App, queues: Sequence[str]) -> None:
    """Warn where jobs of the app would wait for ever, unless other workers serve their queues."""
    used = {kind.queue for kind in app.types.values()}
    unserved = used - set(queues)
    # Queues that were named are a choice; to serve none of the app's is a mistake all the same.
    if unserved and (tuple(queues) == (DEFAULT_QUEUE,) or unserved == used):
        logging.getLogger("pgqueue").warning(
            "jobs of this app go to queues that this worker does not serve: %s; see --queues",
            ",".join(sorted(unserved)),
        )


def _queues(options: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, int], dict[str, int]]:
    """Return the queues, the reserved slots, and the weights."""
    if options["weights"] is None:
        return *parse_queues(options["queues"], options["concurrency"]), {}
    weights = parse_weights(options["weights"])
    if click.get_current_context().get_parameter_source("queues") is ParameterSource.DEFAULT:
        return tuple(weights), {}, weights
    # One slot: none is kept for the first queue that nobody asked to be kept.
    queues, reserved = parse_queues(options["queues"], 1)
    return queues, reserved, weights


def _settings(options: dict[str, Any]) -> WorkerSettings:
    queues, reserved, weights = _queues(options)

    def seconds(name: str) -> float:
        value: timedelta = options[name]
        return value.total_seconds()

    return WorkerSettings(
        queues=queues, reserved=reserved, weights=weights, concurrency=options["concurrency"],
        prefetch=options["prefetch"],
        visibility=seconds("visibility"), poll=seconds("poll"), grace=seconds("grace"), ledger=seconds("ledger"),
        retry_budget=options["retry_budget"],
        dead_retention=None if options["dead_retention"] is None else seconds("dead_retention"),
        depth_every=seconds("sample"),
    )  # fmt: skip
