"""Run: one claimed job becomes one Outcome. Knows no database, no thread, no clock.

    decode -> handler -> Done
       |         |
       |         +-- Retry / any exception -> Retried, or Buried when it was the last attempt
       |         +-- Permanent -> Buried      Snooze -> Snoozed      Cancelled -> Dropped
       +-- payload does not fit -> Buried (undecodable)

A handler's error never escapes: it becomes part of the outcome, with its texts made safe to store.
"""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Coroutine, Generator
from contextvars import Context
from dataclasses import replace
from typing import Any

from pgqueue.app import JobType
from pgqueue.backoff import Backoff
from pgqueue.errors import BadOption, BadPayload, Cancelled, Permanent, Retry, Snooze
from pgqueue.job import (
    Buried,
    Claimed,
    Completed,
    Done,
    Dropped,
    Failure,
    Job,
    Line,
    Outcome,
    Retried,
    Snoozed,
)
from pgqueue.payload import Codec, misfit
from pgqueue.step import MARK, steps_json

MESSAGE_LIMIT = 4_000
TRACEBACK_LIMIT = 16_000
RESULT_LIMIT = 256 * 1024
DONE = Done()
_RESULT = Codec("result")


class Runner:
    """Runs the jobs of one job type."""

    __slots__ = ("_decode", "_handler", "_job_parameter", "_rng", "keeps", "kind", "limit", "line", "plain")

    def __init__(self, kind: JobType[Any], rng: random.Random | None = None) -> None:
        self.kind = kind
        self._handler = kind.handler
        self._decode = kind.codec.decode
        self._job_parameter = kind.job_parameter
        self._rng = rng or random.Random()
        #: A handler that takes the payload and nothing else: the shortest way through.
        self.plain = kind.payload_parameter and kind.job_parameter is None
        #: Seconds an attempt may take, unless the job says otherwise; math.inf = no limit.
        self.limit = kind.timeout
        #: Whether finished jobs of this type go to the history.
        self.keeps = kind.policy.keep is not None
        #: The way of progress and checkpoints to the database; the worker sets it.
        self.line: Line | None = None

    def call(self, claimed: Claimed, job: Job | None) -> Outcome:
        """Run a `def` handler to its end, in a context of its own."""
        try:
            if self.plain:
                try:
                    payload = self._decode(claimed.payload)
                except (ValueError, RecursionError) as error:
                    raise Undecodable(error) from error
                value = Context().run(self._handler, payload)
                if claimed.extra is None and not self.keeps:
                    return DONE
            else:
                arguments, named = self.arguments(claimed, job)
                value = Context().run(self._handler, *arguments, **named)
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything; it becomes the outcome
            return self.failed(claimed, error)
        return self.ended(claimed, job, value)

    async def acall(self, claimed: Claimed, job: Job | None) -> Outcome:
        """Run an `async def` handler to its end, in a context of its own; what it raises is the caller's."""
        arguments, named = self.arguments(claimed, job)
        return self.ended(claimed, job, await Isolated(self.kind.handler(*arguments, **named)))

    def ended(self, claimed: Claimed, job: Job | None, value: Any = None) -> Outcome:
        """Decide what there is to write about a job whose handler returned `value`: mostly nothing but that."""
        steps = job.steps if job is not None else ()
        marked = claimed.extra is not None and f'"{MARK}"' in claimed.extra  # most headers are only headers
        mark = (own_policy(claimed).get("headers") or {}).get(MARK) if marked else None
        if not (self.keeps or steps or mark):
            return DONE
        result, problem = _result(value) if self.kind.policy.result else (None, None)
        return Completed(
            result=result,
            problem=problem,
            steps=steps_json(steps) if steps else None,
            batched=isinstance(mark, dict) and "batch" in mark,
        )

    def skipped(self, claimed: Claimed, by: int) -> Outcome:
        """Decide what there is to write about a job whose idempotency key job `by` has applied: nothing follows."""
        end = self.ended(claimed, None)
        if not isinstance(end, Completed):
            return end
        return replace(end, result=None, problem=f"already applied by job {by}", skipped=True)

    def arguments(self, claimed: Claimed, job: Job | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Decode the payload; return the handler's arguments. Raises Undecodable."""
        named = {self._job_parameter: job} if self._job_parameter else {}
        if not self.kind.payload_parameter:
            return (), named
        try:
            return (self._decode(claimed.payload),), named
        except (ValueError, RecursionError) as error:
            raise Undecodable(error) from error

    def context(self, claimed: Claimed, queue: str, priority: int) -> Job:
        """Build the context of an attempt."""
        return Job(
            claimed, queue=queue, priority=priority, max_attempts=self.max_attempts(claimed), line=self.line
        )

    def max_attempts(self, claimed: Claimed) -> int:
        """Return how many executions this job has in all."""
        own = own_policy(claimed).get("max_attempts")
        return own if own is not None else self.kind.max_attempts

    def timeout(self, claimed: Claimed) -> float:
        """Return the seconds this attempt may take; math.inf = no limit."""
        own = own_policy(claimed).get("timeout_s")
        return float(own) if own is not None else self.limit

    def failed(self, claimed: Claimed, error: BaseException) -> Outcome:
        """Decide what an error of the handler means."""
        match error:
            case Snooze():
                return Snoozed(delay=error.after)
            case Permanent():
                return Buried(reason="permanent", failure=failure_of(error))
            case Undecodable():
                return Buried(reason="undecodable", failure=error.failure())
            case Cancelled():
                return Dropped()
            case Retry(after=after) if after is not None:
                return self._again(claimed, failure_of(error), after)
        return self._again(claimed, failure_of(error), None)

    def timed_out(self, claimed: Claimed, seconds: float) -> Outcome:
        """Decide what an attempt that took too long means."""
        failure = Failure(error_type="Timeout", message=f"the handler ran longer than {seconds:g} s")
        outcome = self._again(claimed, failure, None)
        if isinstance(outcome, Retried):
            return replace(outcome, outcome="timeout")
        return Buried(reason="timeout", failure=failure)

    def put_off(self, claimed: Claimed) -> Outcome:
        """Decide about a retry that the budget had deferred, and that it does not admit now either.

        It counts as an attempt though it does not run: so the calls stay within the budget, and the job ends.
        """
        failure = Failure(error_type="RetryBudget", message="not run: the retry budget of the queue is spent")
        if claimed.attempt >= self.max_attempts(claimed):
            return Buried(reason="exhausted", failure=failure)
        backoff = self._backoff(claimed)
        wait = self._rng.uniform(backoff.cap / 2, backoff.cap)
        return Retried(delay=wait, failure=failure, outcome="put_off", deferred=True)

    def lost(self, claimed: Claimed) -> Outcome | None:
        """Decide whether a job whose worker was lost again may run: only one that was lost alone is buried."""
        lost = own_policy(claimed).get("lost", 0)
        if lost >= 3 and claimed.attempt > self.max_attempts(claimed):
            return Buried(
                reason="worker lost",
                failure=Failure(
                    error_type="WorkerLost", message=f"the worker vanished {lost} times while it ran this job"
                ),
            )
        return None

    def _again(self, claimed: Claimed, failure: Failure, after: float | None) -> Outcome:
        if claimed.attempt >= self.max_attempts(claimed):
            return Buried(reason="exhausted", failure=failure)
        if after is not None:
            return Retried(delay=after, failure=failure)
        backoff = self._backoff(claimed)
        later = self._rng.uniform(backoff.cap / 2, backoff.cap)
        return Retried(delay=backoff.delay(claimed.attempt, self._rng), failure=failure, later=later)

    def _backoff(self, claimed: Claimed) -> Backoff:
        own = own_policy(claimed).get("backoff")
        if own:
            try:
                return Backoff.from_json(json.dumps(own))
            except BadOption:
                pass  # a policy written by hand that makes no sense must not cost the job
        return self.kind.backoff


def idempotency_key(claimed: Claimed) -> str:
    """Return the job's idempotency key; empty if it has none."""
    return own_policy(claimed).get("idempotency_key") or ""


class Isolated:
    """Drives a coroutine inside a context of its own, without a task of its own."""

    __slots__ = ("_coroutine",)

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        context, coroutine = Context(), self._coroutine
        try:
            waiting = context.run(coroutine.send, None)
            while True:
                try:
                    value = yield waiting
                except BaseException as error:  # noqa: BLE001 - cancellation and errors belong to the handler's coroutine
                    waiting = context.run(coroutine.throw, error)
                else:
                    waiting = context.run(coroutine.send, value)
        except StopIteration as returned:
            return returned.value


class Undecodable(Exception):
    """The payload is not what the handler's type says."""

    def __init__(self, problem: Exception) -> None:
        self.problem = problem
        super().__init__(str(problem))

    def failure(self) -> Failure:
        """Describe it without the values of the payload, which may be anybody's secrets."""
        what = misfit(self.problem) if isinstance(self.problem, ValueError) else str(self.problem)
        return Failure(error_type=type(self.problem).__qualname__, message=safe(what)[:MESSAGE_LIMIT])


def own_policy(claimed: Claimed) -> dict[str, Any]:
    """Return what the row says for itself; empty for a plain job, and for one that cannot be read."""
    try:
        return json.loads(claimed.extra) if claimed.extra else {}
    except (ValueError, RecursionError):  # Postgres takes headers that are nested deeper than Python reads
        return {}


def deferred(claimed: Claimed) -> bool:
    """Tell whether the job is a retry that found no budget when its last attempt failed."""
    return (
        claimed.extra is not None
        and '"deferred" : true' in claimed.extra
        and own_policy(claimed).get("deferred") is True
    )


def unreadable(claimed: Claimed) -> bool:
    """Tell whether a job says something for itself that cannot be read."""
    return bool(claimed.extra) and not own_policy(claimed)


def cancelled(claimed: Claimed) -> bool:
    """Tell whether somebody had cancelled the job before it was claimed."""
    return own_policy(claimed).get("cancelled") is True


def expired(claimed: Claimed) -> bool:
    """Tell whether the job's time had run out when it was claimed."""
    return bool(claimed.extra) and own_policy(claimed).get("expired") is True


def failure_of(error: BaseException) -> Failure:
    """Describe an error in texts that Postgres can store: capped, no NUL, no lone surrogate, no local variables."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - __str__ of a foreign error may fail
        message = "(its message could not be read)"
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - as above, for the errors it was raised from
        trace = ""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return Failure(
        error_type=safe(name)[:200],
        message=safe(message)[:MESSAGE_LIMIT],
        traceback=safe(trace)[-TRACEBACK_LIMIT:] or None,
    )


def _result(value: Any) -> tuple[str | None, str | None]:
    """Return the JSON text of what a handler returned, or why there is none: the job is done in either case."""
    try:
        text = _RESULT.encode(value)
    except BadPayload as error:
        return None, safe(f"the result {error.problem}")[:MESSAGE_LIMIT]
    if (size := len(text.encode())) > RESULT_LIMIT:
        return (
            None,
            f"the result has {size} bytes, more than {RESULT_LIMIT}: store it elsewhere and return a reference",
        )
    return text, None


def safe(text: str) -> str:
    """Escape what a text column cannot hold: NUL and lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
