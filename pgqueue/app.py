"""The registry of an application: job name -> handler and policy. Building it does no I/O.

    app = App()

    @app.job("send-receipt", queue="mail", max_attempts=5)
    def send_receipt(receipt: Receipt, job: Job) -> None: ...

    send_receipt.enqueue(session, Receipt(order_id=1))

A handler takes the payload as its first parameter (its annotation is the payload's type), and after it the
context as the parameter annotated `Job`; both are optional. A job's name is explicit and stable: it stands in
rows that outlive a deployment, so it is never derived from an import path.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar, Unpack, overload

from pgqueue.backoff import Backoff
from pgqueue.batch import BatchRef, BatchStatus, batch, look
from pgqueue.connection import execute, execute_async, require_transaction, require_transaction_async
from pgqueue.cron import Cron
from pgqueue.declare import OnDead, Policy
from pgqueue.enqueue import (
    Options,
    OptionValues,
    check_name,
    declared,
)
from pgqueue.errors import BadOption, ConfigError, UnknownJob
from pgqueue.handler import check_handler, parameters
from pgqueue.history import Status, status
from pgqueue.job import Job
from pgqueue.payload import Codec
from pgqueue.policy import DEFAULT_BACKOFF, DEFAULT_MAX_ATTEMPTS, policy_of
from pgqueue.prepared import Prepared
from pgqueue.ref import JobRef
from pgqueue.schedule import Missed, Schedule
from pgqueue.step import Step

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)
Duration = float | timedelta

DEFAULT_QUEUE = "default"
DEFAULT_PRIORITY = 5
DEFAULT_TIMEOUT = 600.0
#: A transactional handler holds row versions and delays floor proofs as long as it runs.
TRANSACTION_TIMEOUT = 60.0


class JobType(Prepared[P]):
    """A registered handler with its policy. Calling it calls the handler directly, without any queue."""

    __slots__ = (
        "codec", "handle_parameter", "handle_type", "handler", "is_async", "is_process", "job_parameter",
        "payload_parameter", "policy",
    )  # fmt: skip

    def __init__(
        self, handler: Callable[..., Any], policy: Policy, *, process: bool, transactional: bool
    ) -> None:
        check_handler(policy.name, handler, process=process)
        if process and transactional:
            raise ConfigError(f"job {policy.name!r}: a handler is either process=True or transactional=True")
        takes = parameters(policy.name, handler, transactional=transactional)
        self.codec = Codec(policy.name, takes.payload_type, takes_payload=takes.payload)
        super().__init__(policy.name, self.codec, Options(), (policy.queue, policy.priority))
        self.handler = handler
        self.policy = policy
        self.is_async = inspect.iscoroutinefunction(handler)
        self.is_process = process
        self.payload_parameter = takes.payload
        self.job_parameter = takes.job
        self.handle_parameter = takes.handle
        self.handle_type = takes.handle_type

    def using(self, **options: Unpack[OptionValues]) -> Prepared[P]:
        """Return the job type with options for the jobs to enqueue; raise BadOption at once for a bad one."""
        if self.policy.limit is not None and options.get("key") is not None:
            raise BadOption(
                "key", f"job {self.name!r} has a limit of {self.policy.limit}, so it takes no ordering key"
            )
        return super().using(**options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the handler itself."""
        return self.handler(*args, **kwargs)

    @property
    def queue(self) -> str:
        """The queue that jobs of this type go to by default."""
        return self.policy.queue or DEFAULT_QUEUE

    @property
    def max_attempts(self) -> int:
        """Executions in all, unless the job says otherwise."""
        return self.policy.max_attempts or DEFAULT_MAX_ATTEMPTS

    @property
    def backoff(self) -> Backoff:
        """The delay after a failure, unless the job says otherwise."""
        return self.policy.backoff or DEFAULT_BACKOFF

    @property
    def timeout(self) -> float:
        """Seconds an attempt may take, math.inf = no limit, unless the job says otherwise."""
        return self.policy.timeout or (TRANSACTION_TIMEOUT if self.handle_type else DEFAULT_TIMEOUT)


class _WithKeyword(Protocol[P_contra]):
    def __call__(self, payload: P_contra, /, *, job: Job) -> Any: ...


class _JobAlone(Protocol):
    def __call__(self, *, job: Job) -> Any: ...


class Register:
    """The decorator that `App.job` and `App.on_event` return; its type carries the payload's type along."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[Callable[..., Any]], JobType[Any]]) -> None:
        self._make = make

    @overload
    def __call__(self, handler: Callable[[], Any]) -> JobType[None]: ...
    @overload
    def __call__(self, handler: Callable[[Job], Any]) -> JobType[None]: ...
    @overload
    def __call__(self, handler: _JobAlone) -> JobType[None]: ...
    @overload
    def __call__(self, handler: Callable[[P], Any]) -> JobType[P]: ...
    @overload
    def __call__(self, handler: Callable[[P, Job], Any]) -> JobType[P]: ...
    @overload
    def __call__(self, handler: _WithKeyword[P]) -> JobType[P]: ...
    @overload
    def __call__(self, handler: Callable[[P, Any], Any]) -> JobType[P]: ...
    @overload
    def __call__(self, handler: Callable[[P, Any, Any], Any]) -> JobType[P]: ...
    def __call__(self, handler: Callable[..., Any]) -> JobType[Any]:
        """Register the handler."""
        return self._make(handler)


class App:
    """A set of job types and event subscriptions."""

    def __init__(self) -> None:
        self._types: dict[str, JobType[Any]] = {}
        self._events: dict[str, list[str]] = {}
        self._schedules: dict[str, Schedule] = {}
        self._declared: set[str] = set()
        self._lock = threading.Lock()

    def job(
        self,
        name: str,
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        backoff: Backoff | None = None,
        timeout: Duration | None = None,
        process: bool = False,
        transactional: bool = False,
        limit: int | None = None,
        rate: str | None = None,
        key_limit: int | None = None,
        key_rate: str | None = None,
        sheddable: bool = False,
        on_dead: OnDead | None = None,
        keep: str | Duration | None = None,
        result: bool = False,
    ) -> Register:
        """Register the decorated function as the handler of `name`.

        `priority` 0..9, lower runs first; `max_attempts` counts executions in all; `timeout` in seconds
        (math.inf: none); `process=True` runs the handler in a child process: for CPU-heavy work and for code
        that may crash or hold the interpreter lock. Such a handler is a plain `def` at the top of a module.
        `transactional=True` hands it a session or connection (the parameter annotated with its type) whose
        commit also acknowledges the job: its database effects happen exactly once. The handler does not commit.
        `limit`: how many jobs of this type run at once over all workers of their queue (in each, if they go to
        several); such jobs take no ordering key.
        `rate` ("100/min", "5/s", "1000/h"): how many begin in that time over all workers of their queue, in bursts
        of at most `limit` (1 where only a rate is given).
        `key_limit` and `key_rate` are the same for the jobs of each key: `key` is no ordering key then, and the jobs
        of one key run beside each other, so many at once, in no promised order.
        `sheddable=True`: while its queue is over its limits, its jobs are dropped and counted, not refused.
        `on_dead`: what becomes of an ordering key when its oldest job dies: "continue" (default) with the next one,
        or "block" the key until somebody replays or discards the dead letter.
        `keep` ("7d", "12h", seconds): for how long finished jobs stay in `pgqueue.job_history` and `app.status`
        knows them. `result=True` keeps what the handler returned too (256 KiB of JSON at most), for a day unless
        `keep` says otherwise.
        """
        if callable(name):
            raise ConfigError(
                f'@app.job stands without the name of the job; write @app.job("{getattr(name, "__name__", "name")}")'
            )
        policy = policy_of(
            name, queue, priority, max_attempts, backoff, timeout, limit=limit, rate=rate, sheddable=sheddable,
            key_limit=key_limit, key_rate=key_rate, on_dead=on_dead,
            keep=keep, result=result,
        )  # fmt: skip

        def register(handler: Callable[..., Any]) -> JobType[Any]:
            kind = JobType[Any](handler, policy, process=process, transactional=transactional)
            with self._lock:
                if name in self._types:
                    first = self._types[name].handler
                    raise ConfigError(f"job {name!r} is registered twice: by {first!r} and by {handler!r}")
                self._types[name] = kind
            return kind

        return Register(register)

    def on_event(self, event_type: str, *, name: str | None = None, **policy: Any) -> Register:
        """Subscribe a handler to an outbox event type.

        The relay's `queue:` sink turns an event into one job per subscriber. Takes the keywords of `job`; the
        job's name is `<event type>/<function name>` unless `name` gives one.
        """
        if callable(event_type):
            raise ConfigError(
                '@app.on_event stands without the type of the event; write @app.on_event("order.placed")'
            )
        check_name("event_type", event_type)

        def register(handler: Callable[..., Any]) -> JobType[Any]:
            kind = self.job(name or f"{event_type}/{handler.__name__}", **policy)(handler)
            self._events.setdefault(event_type, []).append(kind.name)
            return kind

        return Register(register)

    def schedule(
        self,
        expr: str,
        *,
        timezone: str = "UTC",
        payload: Any = None,
        jitter: Duration = 0.0,
        missed: Missed = "once",
        cap: int = 10,
        name: str | None = None,
    ) -> Callable[[JobType[P]], JobType[P]]:
        """Enqueue a job of the decorated type at the times of a cron expression; stands above `@app.job`.

        Five fields, or six with the seconds first, in an IANA time zone. `jitter`: seconds up to which each job is
        delayed at random. `missed`: what becomes of ticks that nobody ran in time; see `pgqueue.schedule.Schedule`.
        `name` (the job's name by default) tells several schedules of one job apart. Raises BadOption, BadPayload.
        """
        cron = Cron(expr, timezone)

        def attach(kind: JobType[P]) -> JobType[P]:
            if not isinstance(kind, JobType) or self._types.get(kind.name) is not kind:
                raise ConfigError("@app.schedule stands above the @app.job of the same app")
            made = Schedule(
                name=kind.name if name is None else name, job=kind.name, cron=cron, payload=kind.codec.encode(payload),
                jitter=jitter, missed=missed, cap=cap,
            )  # fmt: skip
            with self._lock:
                if made.name in self._schedules:
                    raise ConfigError(
                        f"schedule {made.name!r} is defined twice; give one another name: @app.schedule(..., name=...)"
                    )
                self._schedules[made.name] = made
            return kind

        return attach

    @property
    def schedules(self) -> Mapping[str, Schedule]:
        """The schedules by name."""
        return dict(self._schedules)

    @property
    def types(self) -> Mapping[str, JobType[Any]]:
        """The registered job types by name."""
        return dict(self._types)

    def subscribers(self, event_type: str) -> Sequence[str]:
        """Return the names of the jobs that an event of this type becomes."""
        return tuple(self._events.get(event_type, ()))

    def enqueue(self, handle: Any, name: str, payload: Any = None, **options: Unpack[OptionValues]) -> JobRef:
        """Enqueue a job by name, for producers that do not import its handler.

        A name that is neither registered here nor declared in the database raises UnknownJob.
        """
        prepared = self._prepare(name, options)
        require_transaction(handle)
        if name not in self._types and name not in self._declared:
            self._note(name, known=execute(handle, declared(name)))
        return prepared.enqueue(handle, payload)

    async def aenqueue(
        self, handle: Any, name: str, payload: Any = None, **options: Unpack[OptionValues]
    ) -> JobRef:
        """Enqueue a job by name in the transaction of an asynchronous handle."""
        prepared = self._prepare(name, options)
        await require_transaction_async(handle)
        if name not in self._types and name not in self._declared:
            self._note(name, known=await execute_async(handle, declared(name)))
        return await prepared.aenqueue(handle, payload)

    def _prepare(self, name: str, options: OptionValues) -> Prepared[Any]:
        check_name("name", name)
        kind = self._types.get(name)
        return kind.using(**options) if kind else Prepared(name, Codec(name), Options().but(**options))

    def _note(self, name: str, *, known: bool) -> None:
        if not known:
            raise UnknownJob(name, tuple(sorted(self._types)))
        self._declared.add(name)

    def batch(self, handle: Any, steps: Sequence[Step], then: Step | None = None) -> BatchRef:
        """Enqueue jobs together, and `then` when all of them are done (see `pgqueue.batch`).

        Everything is one statement in the transaction of `handle`. Without any step, `then` is enqueued at once.
        """
        statement = batch(steps, then)
        require_transaction(handle)
        return execute(handle, statement)

    async def abatch(self, handle: Any, steps: Sequence[Step], then: Step | None = None) -> BatchRef:
        """Enqueue a batch in the transaction of an asynchronous handle."""
        statement = batch(steps, then)
        await require_transaction_async(handle)
        return await execute_async(handle, statement)

    def batch_status(self, handle: Any, batch: BatchRef | int) -> BatchStatus | None:
        """Return how many members of a batch have ended; None if it is unknown, or completed more than 7 days ago."""
        return execute(handle, look(batch.id if isinstance(batch, BatchRef) else batch))

    def status(self, handle: Any, job: JobRef | int) -> Status | None:
        """Return where a job is and how far; None if it left no trace (done, of a type without `keep`) or never was."""
        return execute(handle, status(job.id if isinstance(job, JobRef) else job))

    async def astatus(self, handle: Any, job: JobRef | int) -> Status | None:
        """Return where a job is, on an asynchronous handle."""
        return await execute_async(handle, status(job.id if isinstance(job, JobRef) else job))
