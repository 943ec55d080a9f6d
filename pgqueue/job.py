"""A job as the runtime sees it: the claimed row, the context of a handler, and what became of an attempt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from pgqueue.errors import Cancelled


class JobRef(NamedTuple):
    """The answer to an enqueue: the job's id, and whether this call created it (no: dedup key taken, or shed)."""

    id: int
    created: bool

    @property
    def shed(self) -> bool:
        """Whether the job was dropped because its type is sheddable and its queue full; its id is 0."""
        return self.id == 0


class Claim(NamedTuple):
    """The token that whoever finishes or extends a job must show."""

    id: int
    lease: int


class Claimed(NamedTuple):
    """One row of a claim, in the column order of the claim statements.

    `level` numbers the (queue, priority) pair of the claim from 1; `extra` is the JSON text of whatever a
    plain job lacks (policy of its own, headers), None for a plain job.
    """

    level: int
    pos: int
    id: int
    lease: int
    name: str
    key: str | None
    attempt: int
    enqueued_at: str
    extra: str | None
    payload: str


class Job:
    """The context of one attempt, handed to handlers that ask for it with a parameter annotated `Job`."""

    def __init__(self, claimed: Claimed, *, queue: str, priority: int, max_attempts: int) -> None:
        self._enqueued_at = claimed.enqueued_at
        self._cancelled = False
        extra: dict[str, Any] = json.loads(claimed.extra) if claimed.extra else {}
        #: The row's id; the same in the dead letters and after a replay.
        self.id: int = claimed.id
        #: The name of the job type.
        self.name: str = claimed.name
        self.queue: str = queue
        self.priority: int = priority
        #: Executions so far, this one included.
        self.attempt: int = claimed.attempt
        #: Executions in all.
        self.max_attempts: int = max_attempts
        #: The fence of this attempt; pass it on where a downstream system can refuse stale writers.
        self.lease: int = claimed.lease
        #: The ordering key.
        self.key: str | None = claimed.key
        #: Pass it on to external APIs that take an idempotency key.
        self.idempotency_key: str | None = extra.get("idempotency_key")
        self.headers: dict[str, Any] = extra.get("headers") or {}

    @cached_property
    def enqueued_at(self) -> datetime:
        """When the enqueuing transaction began."""
        return datetime.fromisoformat(self._enqueued_at)

    @property
    def cancelled(self) -> bool:
        """Whether this attempt should stop: the job was cancelled, timed out, or its lease was lost."""
        return self._cancelled

    def ask_to_stop(self) -> None:
        """Set `cancelled`; what the worker does when the attempt should end."""
        self._cancelled = True

    def raise_if_cancelled(self) -> None:
        """Raise Cancelled if this attempt should stop; call it between the steps of a long handler."""
        if self._cancelled:
            raise Cancelled("the attempt was asked to stop")

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.name} attempt {self.attempt}/{self.max_attempts}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong in an attempt; texts are safe to store (no NUL, no lone surrogates, capped)."""

    error_type: str
    message: str
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The handler returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """The attempt failed; run again after `delay` seconds. `outcome` is retry or timeout.

    `later` is the delay where the queue's retry budget is spent, None where the handler named the delay itself.
    `deferred` tells that it took that one.
    """

    delay: float
    failure: Failure
    outcome: str = "retry"
    later: float | None = None
    deferred: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Buried:
    """No further attempt: the job becomes a dead letter."""

    reason: str
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Snoozed:
    """Run again after `delay` seconds; the attempt does not count."""

    delay: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """The job was cancelled: its row goes, it never runs again."""


@dataclass(frozen=True, slots=True)
class Written:
    """Done, and the handler's own transaction has written it."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """The lease was lost while the handler ran; its transaction was rolled back."""


@dataclass(frozen=True, slots=True)
class Released:
    """Give the job back at once; the attempt does not count."""


Outcome = Done | Written | Fenced | Retried | Buried | Snoozed | Dropped | Released
