"""The worker: claims jobs of an app from its queues and runs them, until it is told to stop.

    worker = Worker(app, dsn, WorkerSettings(queues=("mail",)))
    worker.start()
    ...
    worker.stop()

Three threads of its own beside the slots: the engine (claims, results), the pulse (heartbeats, chores), and the
event loop of `async def` handlers if there are any; two connections. A database that is away is waited for, and
jobs in hand are finished and written when it is back.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psycopg

from pgqueue import dsn as dsns
from pgqueue.app import App, JobType
from pgqueue.claim import paused
from pgqueue.config import WorkerSettings
from pgqueue.connection import execute
from pgqueue.declare import declare
from pgqueue.engine import Engine
from pgqueue.errors import ConfigError
from pgqueue.events import Bus, JobSucceeded, WorkerDraining, WorkerStarted, WorkerStopped
from pgqueue.hand import Hand
from pgqueue.heartbeat import register, unregister
from pgqueue.history import days
from pgqueue.intake import Intake
from pgqueue.loop import Wake
from pgqueue.monitor import Monitor
from pgqueue.notebook import Notebook
from pgqueue.processes import Children, ProcessRunner
from pgqueue.pulse import Pulse
from pgqueue.quota import Quota
from pgqueue.retries import Retries
from pgqueue.round import Leases
from pgqueue.run import Runner
from pgqueue.schedule import define
from pgqueue.schema_version import require_schema
from pgqueue.shelf import Shelf
from pgqueue.statement import Statement, load, nothing
from pgqueue.tasks import TaskSlots
from pgqueue.threads import ThreadSlots
from pgqueue.transact import TransactionalRunner, Transactions
from pgqueue.writeoff import WriteOff

_SQL = load("pgqueue", "worker")

PRIORITIES = range(10)
CONNECTIONS = 2
#: A loop that has not come round for a lease is stalled; leases longer than this are not waited for.
PATIENCE = 20.0


class Worker:
    """One worker process (or one of several in a process, for tests)."""

    def __init__(
        self, app: App, dsn: str, settings: WorkerSettings | None = None, bus: Bus | None = None
    ) -> None:
        self._app = app
        self._dsn = dsn
        self.settings = settings or WorkerSettings()
        self.bus = bus or Bus()
        if not app.types:
            raise ConfigError(
                "the app has no jobs: import the modules that define them before the worker starts"
            )
        for kind in app.types.values():
            window = kind.max_attempts * kind.backoff.cap
            if self.settings.ledger < window:
                raise ConfigError(
                    f"ledger: {self.settings.ledger:g} s is shorter than the {window:g} s in which attempts of job "
                    f"{kind.name!r} may be retried, so an effect could be applied again; keep it longer (--ledger)"
                )
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self._threads: list[threading.Thread] = []
        self._draining = threading.Event()
        self._ended: bool | None = None

    def start(self) -> None:
        """Check the schema, declare the job types, start the threads; returns at once.

        Raises SchemaError where the database is not migrated, DatabaseUnreachable where it does not answer.
        """
        settings, hand = self.settings, Hand(Wake())
        levels = [("", 0), *((queue, priority) for queue in settings.queues for priority in PRIORITIES)]
        hand.blocking = frozenset(n for n, kind in self._app.types.items() if kind.policy.on_dead == "block")
        self._nonce = self._register()
        children = Children()
        self._transactions = Transactions(self._dsn, self.name, settings.concurrency)
        runners: dict[str, Runner] = {
            name: self._runner(kind, children, levels) for name, kind in self._app.types.items()
        }
        notebook = Notebook()
        for runner in runners.values():
            runner.line = notebook
        common: dict[str, Any] = {
            "runners": runners,
            "levels": levels,
            "hand": hand,
            "size": settings.concurrency,
            "reserved": settings.reserved,
            "report_all": self.bus.wants(JobSucceeded),
        }
        threads = ThreadSlots(Shelf(settings.queues), **common)
        is_async = any(runner.kind.is_async for runner in runners.values())
        tasks = TaskSlots(Shelf(settings.queues), **common) if is_async else None
        quota = Quota(settings, hand, levels)
        retries = Retries(levels, on=settings.retry_budget)
        intake = Intake(
            settings=settings,
            runners=runners,
            levels=levels,
            hand=hand,
            quota=quota,
            threads=threads,
            tasks=tasks,
            retries=retries,
            bus=self.bus,
        )
        self._write_off = WriteOff(hand, intake, retries, levels, self.bus)
        self._hand, self._children, self._tasks = hand, children, tasks
        self._engine = Engine(
            settings=settings,
            hand=hand,
            quota=quota,
            intake=intake,
            write_off=self._write_off,
            retries=retries,
            slots=[s for s in (threads, tasks) if s is not None],
            leases=Leases(self._nonce),
            connect=self._connect,
            bus=self.bus,
            worker=self.name,
        )
        self._engine.set_paused(self._paused)  # before the first claim, not a second after it
        self._pulse = Pulse(
            settings=settings,
            hand=hand,
            engine=self._engine,
            monitor=Monitor(hand, runners, self.bus),
            notebook=notebook,
            connect=self._connect,
            bus=self.bus,
            nonce=self._nonce,
        )
        self._threads = [
            threading.Thread(target=self._engine.run, name="pgqueue-engine", daemon=True),
            threading.Thread(target=self._pulse.run, name="pgqueue-pulse", daemon=True),
        ]
        self.bus.emit(
            WorkerStarted(
                queues=settings.queues,
                names=tuple(runners),
                concurrency=settings.concurrency,
                connections=CONNECTIONS,
            )
        )
        for thread in self._threads:
            thread.start()

    def drain(self) -> None:
        """Stop claiming and give back what was not started; running jobs go on."""
        if not self._draining.is_set():
            self._draining.set()
            self.bus.emit(WorkerDraining(running=len(self._hand.running)))
            self._engine.draining.set()
            self._hand.wake.set()

    def stop(self, grace: float | None = None) -> bool:
        """Drain; after `grace` seconds cancel what can be cancelled and give back the rest.

        True if every handler ended. False if some still run in threads: their jobs are already given back, so the
        process should end at once (`os._exit`).
        """
        if self._ended is not None:
            return self._ended
        self.drain()
        ended = self._engine.stopped.wait(self.settings.grace if grace is None else grace)
        if not ended:
            still = list(self._hand.running.values())
            stoppable = any(r.cancel is not None or self._app.types[r.claimed.name].is_process for r in still)
            if self._tasks is not None:
                self._tasks.cancel_all()
            self._children.close()
            ended = self._engine.stopped.wait(1.0 if stoppable or not still else 0.0)
            if not ended:
                self._engine.abandoning.set()
                self._hand.wake.set()
                self._engine.stopped.wait(5.0)
        self._children.close()
        self._transactions.close()
        self._pulse.stop()
        self._threads[1].join(5.0)
        if self._tasks is not None:
            self._tasks.close(self._transactions.aclose)
        self._unregister()
        self.bus.emit(WorkerStopped(released=self._write_off.released))
        self._ended = ended
        return ended

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the worker has stopped."""
        return self._engine.stopped.wait(timeout)

    def stalled(self) -> str | None:
        """Return what makes no progress, None while all is well: a database that is away is a stall."""
        now = time.monotonic()
        patience = max(2 * self.settings.sweep, min(PATIENCE, max(3.0, self.settings.visibility)))
        for name, alive_at in (("claim", self._engine.alive_at), ("heartbeat", self._pulse.alive_at)):
            if now - alive_at > patience and not self._engine.stopped.is_set():
                return f"{name}: no progress for {now - alive_at:.0f} s"
        if len(self._hand.given_up) >= self.settings.concurrency:
            return "slots: each one holds a handler that ran over its time"
        return None

    @property
    def in_flight(self) -> int:
        """How many jobs this process holds, running or not."""
        return len(self._hand.held)

    def _runner(self, kind: JobType[Any], children: Children, levels: list[tuple[str, int]]) -> Runner:
        if kind.is_process:
            return ProcessRunner(kind, children, levels)
        return TransactionalRunner(kind, self._transactions) if kind.handle_type else Runner(kind)

    def _connect(self) -> psycopg.Connection[Any]:
        return connect(self._dsn, self.name, silence=min(20.0, self.settings.visibility / 3))

    def _register(self) -> int:
        """Check the schema, write the policies, and enter this process start under a free nonce."""
        with dsns.connect(self._dsn, autocommit=True, target_session_attrs="read-write") as connection:
            require_schema(connection)
            execute(connection, declare(kind.policy for kind in self._app.types.values()))
            if any(kind.policy.keep is not None for kind in self._app.types.values()):
                execute(connection, days())
            execute(connection, define(self._app.schedules.values()))
            self._paused = execute(connection, paused())
            while True:
                nonce = random.SystemRandom().randrange(1, 2**31)
                entry = register(
                    nonce=nonce,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    version=_version(),
                    queues=self.settings.queues,
                    names=list(self._app.types),
                    schedules=list(self._app.schedules),
                    concurrency=self.settings.concurrency,
                )
                if execute(connection, entry) is not None:
                    return nonce

    def _unregister(self) -> None:
        try:
            with connect(self._dsn, self.name, timeout=2) as connection:
                execute(connection, unregister(self._nonce))
        except psycopg.Error:
            pass  # the row is for people; it is pruned after a day


def connect(dsn: str, name: str, timeout: int = 10, silence: float = 20.0) -> psycopg.Connection[Any]:
    """Open a connection of a worker: autocommit, read-write, index plans only.

    A peer that has vanished is noticed after `silence` seconds (1 at least): leases are to be renewed on another
    connection before they run out.
    """
    connection = psycopg.connect(
        dsn,
        autocommit=True,
        prepare_threshold=0,
        application_name=f"pgqueue-worker {name}"[:63],
        connect_timeout=timeout,
        keepalives_idle=max(1, int(silence / 2)),
        keepalives_interval=max(1, int(silence / 6)),
        keepalives_count=3,
        tcp_user_timeout=max(1000, int(silence * 1000)),
        target_session_attrs="read-write",
    )
    try:
        execute(connection, Statement(_SQL["settings"], {}, nothing))
    except psycopg.Error:
        connection.close()
        raise
    return connection


def _version() -> str:
    try:
        return version("pgqueue-relay")
    except PackageNotFoundError:
        return "unknown"
