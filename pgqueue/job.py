"""A job as the runtime sees it: the claimed row, the context of a handler, and what became of an attempt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from pgqueue.errors import BadOption, Cancelled
from pgqueue.payload import Codec
from pgqueue.step import MARK, Step, steps_of

#: Bytes that the state of a checkpoint may have.
STATE_LIMIT = 256 * 1024
NOTE_LIMIT = 500
#: Where the server's clock counts from.
_ZERO = datetime(2000, 1, 1, tzinfo=UTC)
_STATE = Codec("checkpoint")


def is_limit(key: str, name: str) -> bool:
    """Tell whether the key of a lane is a limit, of the name or of a key, and no ordering key."""
    return f"{key}@".startswith(f"@{name}@")


def given_key(key: str | None, name: str) -> str | None:
    """Return the key a job was enqueued with: that of a limit stands in its row as `@name@key`."""
    return key if key is None or not is_limit(key, name) else key[len(name) + 2 :] or None


class Claim(NamedTuple):
    """The token that whoever finishes or extends a job must show."""

    id: int
    lease: int


class Claimed(NamedTuple):
    """One row of a claim, in the column order of the claim statements.

    `level` numbers the (queue, priority) pair of the claim from 1; `extra` is the JSON text of whatever a
    plain job lacks (policy of its own, headers), None for a plain job. `enqueued_at` is microseconds since 2000, as the
    server sends them: few handlers ask.
    """

    level: int
    pos: int
    id: int
    lease: int
    name: str
    key: str | None
    attempt: int
    enqueued_at: bytes
    extra: str | None
    payload: str


class Line(Protocol):
    """The way from an attempt to the database, through a connection of its worker."""

    def progress(self, claim: Claim, fraction: float, note: str) -> None:
        """Leave word how far the job is; returns at once."""

    def checkpoint(self, claim: Claim, state: str) -> None:
        """Write the job's state; returns when it is committed. Raises LeaseLost, DatabaseUnreachable."""

    async def acheckpoint(self, claim: Claim, state: str) -> None:
        """Write the job's state without holding up the event loop."""

    def state(self, claim: Claim) -> str | None:
        """Read the last checkpoint."""

    async def astate(self, claim: Claim) -> str | None:
        """Read the last checkpoint without holding up the event loop."""


class Job:
    """The context of one attempt, handed to handlers that ask for it with a parameter annotated `Job`."""

    def __init__(
        self, claimed: Claimed, *, queue: str, priority: int, max_attempts: int, line: Line | None = None
    ) -> None:
        self._enqueued_at = claimed.enqueued_at
        self._cancelled = False
        self._claim = Claim(claimed.id, claimed.lease)
        self._line = line
        #: JSON text of the last checkpoint; unread as long as a line leads to it and nobody asked.
        self._state: str | None = None
        self._unread = line is not None
        #: Steps that the handler wants enqueued in the transaction of this job's acknowledgement.
        self.steps: list[Step] = []
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
        #: The key it was enqueued with: an ordering key, or the key of a limit.
        self.key: str | None = given_key(claimed.key, claimed.name)
        #: Pass it on to external APIs that take an idempotency key.
        self.idempotency_key: str | None = extra.get("idempotency_key")
        self.headers: dict[str, Any] = extra.get("headers") or {}
        mark = self.headers.pop(MARK, None)
        mark = mark if isinstance(mark, dict) else {}
        #: The job whose end enqueued this one.
        self.parent: int | None = mark.get("parent")
        #: The batch that this job is a member of.
        self.batch: int | None = mark.get("batch")

    @cached_property
    def enqueued_at(self) -> datetime:
        """When the enqueuing transaction began."""
        return _ZERO + timedelta(microseconds=int.from_bytes(self._enqueued_at, "big", signed=True))

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

    def progress(self, fraction: float, note: str = "") -> None:
        """Say how far this attempt is, 0 to 1, for people who look (`app.status`, `pgqueue jobs show`).

        Returns at once; written at most once a second. Raises BadOption for a number outside of 0 to 1.
        """
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise BadOption("progress", f"{fraction!r} is not a number from 0 to 1")
        if self._line is not None:
            self._line.progress(self._claim, float(fraction), str(note)[:NOTE_LIMIT])

    def checkpoint(self, state: Any) -> None:
        """Keep `state` (anything JSON has, 256 KiB at most) for the next attempt, which finds it in `job.state`.

        Returns when it is committed, apart from any transaction of the handler. Raises BadPayload or BadOption for a
        state that cannot be kept, LeaseLost if somebody else has the job now, DatabaseUnreachable. In an `async def`
        handler use `acheckpoint`.
        """
        text = _state_json(state)
        if self._line is not None:
            self._line.checkpoint(self._claim, text)
        self._state, self._unread = text, False

    async def acheckpoint(self, state: Any) -> None:
        """Keep `state` for the next attempt, without holding up the event loop."""
        text = _state_json(state)
        if self._line is not None:
            await self._line.acheckpoint(self._claim, text)
        self._state, self._unread = text, False

    @property
    def state(self) -> Any:
        """The last checkpoint of this job, by whichever attempt; None if there is none.

        The first look takes a round trip to the database; in an `async def` handler await `astate()` first.
        """
        if self._unread and self._line is not None:
            self._state, self._unread = self._line.state(self._claim), False
        return None if self._state is None else json.loads(self._state)

    async def astate(self) -> Any:
        """Return the last checkpoint without holding up the event loop."""
        if self._unread and self._line is not None:
            self._state, self._unread = await self._line.astate(self._claim), False
        return self.state

    def then(self, *steps: Step) -> None:
        """Enqueue these steps in the transaction that acknowledges this job; if the attempt fails, nothing is."""
        self.steps.extend(steps_of("then", steps))

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
class Completed:
    """The handler returned, and its end has more to write than the acknowledgement.

    `result` is JSON text, `problem` says why there is none; `steps` is JSON text of what the handler wants to follow.
    `skipped`: it was not run, as its idempotency key has been applied, and nothing follows it.
    """

    result: str | None = None
    problem: str | None = None
    steps: str | None = None
    batched: bool = False
    skipped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """The attempt failed; run again after `delay` seconds. `outcome` is retry or timeout.

    `later` is the delay where the queue's retry budget is spent, None where the handler named the delay itself.
    `deferred` tells that it took that one. The outcome put_off is that of a deferred retry that was not run after all.
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
    """Run again after `delay` seconds; the attempt does not count. `failure`: why, where no handler asked for it."""

    delay: float
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The job was cancelled: its row goes, it never runs again. `begun`: its handler was called in this attempt."""

    begun: bool = True


@dataclass(frozen=True, slots=True)
class Written:
    """Done, and the handler's own transaction has written it."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """The lease was lost while the handler ran; its transaction was rolled back."""


@dataclass(frozen=True, slots=True)
class Released:
    """Give the job back at once; the attempt does not count."""


Outcome = Done | Completed | Written | Fenced | Retried | Buried | Snoozed | Dropped | Released


def _state_json(state: Any) -> str:
    text = _STATE.encode(state)
    if (size := len(text.encode())) > STATE_LIMIT:
        raise BadOption(
            "state",
            f"has {size} bytes, more than {STATE_LIMIT}: keep it elsewhere and checkpoint a reference",
        )
    return text
