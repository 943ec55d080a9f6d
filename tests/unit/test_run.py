"""One attempt becomes one outcome: what a handler raises, and what its job has left, decide."""

from __future__ import annotations

import asyncio
import random
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from pgqueue.app import App
from pgqueue.backoff import Backoff
from pgqueue.errors import Cancelled, Permanent, Retry, Snooze
from pgqueue.job import Buried, Done, Dropped, Job, Outcome, Retried, Snoozed
from pgqueue.run import MESSAGE_LIMIT, TRACEBACK_LIMIT, Runner, cancelled, expired, failure_of, safe
from tests.factories import claimed


@dataclass
class Receipt:
    order_id: int


def raising(error: BaseException, *, max_attempts: int = 5, backoff: Backoff | None = None) -> Runner:
    """Make the runner of a handler that raises."""

    def work() -> None:
        raise error.with_traceback(None)  # one error raised many times would carry all its tracebacks

    return Runner(
        App().job("work", max_attempts=max_attempts, backoff=backoff)(work), random.Random(1)
    )  # fmt: skip


def outcome(error: BaseException, *, attempt: int = 1, **more: Any) -> Outcome:
    return raising(error, **more).call(claimed(attempt=attempt), None)


def test_a_handler_that_returns_is_done() -> None:
    seen: list[Receipt] = []

    def work(receipt: Receipt) -> None:
        seen.append(receipt)

    runner = Runner(App().job("work")(work))
    assert runner.plain
    assert runner.call(claimed(payload='{"order_id": 7}'), None) == Done()
    assert seen == [Receipt(order_id=7)]


def test_a_handler_that_asks_for_its_job_gets_the_context_of_this_attempt() -> None:
    seen: list[Job] = []

    def work(receipt: Receipt, job: Job) -> None:
        seen.append(job)

    runner = Runner(App().job("work", max_attempts=4)(work))
    row = claimed(
        9,
        payload='{"order_id": 7}',
        attempt=2,
        key="k",
        extra={"headers": {"t": "x"}, "idempotency_key": "i"},
    )
    assert runner.call(row, runner.context(row, "mail", 3)) == Done()
    (job,) = seen
    assert (job.id, job.queue, job.priority, job.attempt, job.max_attempts) == (9, "mail", 3, 2, 4)
    assert (job.key, job.idempotency_key, job.headers, job.lease) == ("k", "i", {"t": "x"}, 7)
    assert job.enqueued_at.isoformat() == "2026-01-01T00:00:00+00:00"


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), Retry(), Retry("again"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()],
)
def test_any_error_is_a_failed_attempt_that_runs_again(error: BaseException) -> None:
    found = outcome(error)
    assert isinstance(found, Retried)
    assert found.outcome == "retry"
    assert 0 <= found.delay <= 2
    assert found.failure.error_type.endswith(type(error).__name__)


@pytest.mark.parametrize("error", [ValueError("x"), Retry(), Retry(after=3)])
def test_the_last_attempt_buries(error: Exception) -> None:
    found = outcome(error, attempt=3, max_attempts=3)
    assert isinstance(found, Buried)
    assert found.reason == "exhausted"
    beyond = outcome(error, attempt=9, max_attempts=3)
    assert isinstance(beyond, Buried)


def test_retry_says_when() -> None:
    found = outcome(Retry(after=12.5))
    assert isinstance(found, Retried)
    assert found.delay == 12.5


def test_permanent_buries_at_once() -> None:
    found = outcome(Permanent("no such customer"), attempt=1)
    assert isinstance(found, Buried)
    assert (found.reason, found.failure.message) == ("permanent", "no such customer")


def test_snooze_waits_whatever_the_attempt() -> None:
    for attempt in (1, 5, 99):
        assert outcome(Snooze(30), attempt=attempt) == Snoozed(delay=30)


def test_cancelled_drops_the_job() -> None:
    assert outcome(Cancelled("stop")) == Dropped()


@pytest.mark.parametrize("payload", ["{}", '{"order_id": "x"}', "[]", "not json", '"\\ud800"', "[" * 100_000])
def test_a_payload_that_does_not_fit_is_buried_at_the_first_attempt(payload: str) -> None:
    def work(receipt: Receipt) -> None:
        raise AssertionError("must not run")

    def both(receipt: Receipt, job: Job) -> None:
        raise AssertionError("must not run")

    for handler in (work, both):
        runner = Runner(App().job("work")(handler))
        row = claimed(payload=payload)
        found = runner.call(row, runner.context(row, "q", 5))
        assert isinstance(found, Buried)
        assert found.reason == "undecodable"
        assert found.failure.message


def test_what_is_said_of_an_undecodable_payload_does_not_repeat_its_values() -> None:
    def work(receipt: Receipt) -> None: ...

    found = Runner(App().job("work")(work)).call(claimed(payload='{"order_id": "s3cret"}'), None)
    assert isinstance(found, Buried)
    assert "s3cret" not in repr(found)


def test_a_timeout_retries_and_then_buries_with_its_own_words() -> None:
    runner = raising(ValueError(), max_attempts=2)
    first = runner.timed_out(claimed(attempt=1), 3.0)
    assert isinstance(first, Retried)
    assert (first.outcome, first.failure.message) == ("timeout", "the handler ran longer than 3 s")
    last = runner.timed_out(claimed(attempt=2), 3.0)
    assert isinstance(last, Buried)
    assert last.reason == "timeout"


@pytest.mark.parametrize(
    ("lost", "attempt", "max_attempts", "buried"),
    [
        (1, 2, 1, False), (2, 3, 1, False), (3, 4, 1, True), (3, 4, 5, False), (4, 5, 5, False), (5, 6, 5, True),
        (0, 9, 1, False), (2, 9, 1, False),
    ],
)  # fmt: skip
def test_only_a_job_that_was_lost_alone_and_has_no_attempt_left_is_buried_as_worker_lost(
    lost: int, attempt: int, max_attempts: int, buried: bool
) -> None:
    found = raising(ValueError(), max_attempts=max_attempts).lost(
        claimed(attempt=attempt, extra={"lost": lost})
    )
    assert (found is not None) is buried
    if buried:
        assert isinstance(found, Buried)
        assert found.reason == "worker lost"


@pytest.mark.parametrize(
    ("execution", "bound"),
    [(1, 2), (2, 4), (3, 8), (4, 16), (7, 128), (9, 300), (31, 300), (2_000, 300), (32_766, 300)],
)
def test_after_failed_execution_n_the_delay_is_up_to_two_to_the_n_seconds_and_300_at_most(
    execution: int, bound: float
) -> None:
    runner = raising(ValueError(), max_attempts=32_767)
    delays = []
    for _ in range(400):
        found = runner.call(claimed(attempt=execution), None)
        assert isinstance(found, Retried)
        delays.append(found.delay)
    assert 0 <= min(delays) < bound * 0.1
    assert bound * 0.9 < max(delays) <= bound


def test_the_row_overrides_the_policy_of_its_type() -> None:
    runner = raising(ValueError(), max_attempts=2, backoff=Backoff(base=1, cap=300))
    own = {"max_attempts": 9, "timeout_s": "1.5", "backoff": {"base": 40, "cap": 50, "jitter": "none"}}
    row = claimed(attempt=3, extra=own)
    found = runner.call(row, None)
    assert isinstance(found, Retried)
    assert found.delay == 50
    assert runner.max_attempts(row) == 9
    assert runner.timeout(row) == 1.5
    assert runner.timeout(claimed(extra={"timeout_s": "Infinity"})) == float("inf")
    assert runner.timeout(claimed()) == runner.limit


@pytest.mark.parametrize("nonsense", [{"base": -1}, {"base": "x", "cap": 1}, {"jitter": "wild"}, [1], "x", 5])
def test_a_backoff_written_by_hand_that_makes_no_sense_does_not_cost_the_job(nonsense: object) -> None:
    found = raising(ValueError()).call(claimed(extra={"backoff": nonsense}), None)
    assert isinstance(found, Retried)
    assert 0 <= found.delay <= 2


def test_a_type_without_a_timeout_and_one_with() -> None:
    def work() -> None: ...

    app = App()
    assert Runner(app.job("a", timeout=2)(work)).limit == 2
    assert Runner(app.job("b", timeout=timedelta(minutes=1))(work)).limit == 60
    assert Runner(app.job("c", timeout=None)(work)).limit in (600.0, float("inf"))


def test_the_claim_tells_what_had_expired_and_what_was_cancelled_before_it() -> None:
    assert expired(claimed(extra={"expired": True}))
    assert not expired(claimed(extra={"expired": None}))
    assert not expired(claimed())
    assert cancelled(claimed(extra={"cancelled": True}))
    assert not cancelled(claimed(extra={"cancelled": False}))
    assert not cancelled(claimed())


@pytest.mark.parametrize("text", ["a\x00b", "a\ud800b\udfff", "\x00" * 10_000, "plain", "ünïcödé ☃"])
def test_texts_of_a_failure_can_be_stored_and_are_capped(text: str) -> None:
    failure = failure_of(ValueError(text))
    for found in (failure.message, failure.traceback or "", failure.error_type):
        assert "\0" not in found
        found.encode("utf-8")
    assert len(failure.message) <= MESSAGE_LIMIT
    assert len(failure.traceback or "") <= TRACEBACK_LIMIT


def test_safe_texts_stay_as_they_are_and_others_stay_readable() -> None:
    assert safe("ünïcödé ☃ 𝄞") == "ünïcödé ☃ 𝄞"
    assert safe("a\0b") == "a\\x00b"
    assert safe("a\ud800b") == "a\\ud800b"


def test_the_traceback_keeps_its_end_and_shows_no_local_variable() -> None:
    def deep(n: int) -> None:
        password = "s3cret" + str(n)
        if n:
            deep(n - 1)
        raise ValueError(f"at the bottom, {len(password)} characters")

    try:
        deep(400)
    except ValueError as error:
        failure = failure_of(error)
    assert failure.traceback
    assert failure.traceback.rstrip().endswith("characters")
    assert '"s3cret0"' not in failure.traceback


def test_an_error_that_cannot_be_described_is_described_all_the_same() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    failure = failure_of(Broken())
    assert failure.error_type.endswith("Broken")
    assert failure.message == "(its message could not be read)"
    assert isinstance(outcome(Broken()), Retried)


def test_what_a_handler_leaves_in_a_context_variable_does_not_reach_the_next() -> None:
    tenant: ContextVar[str] = ContextVar("tenant", default="none")
    seen = []

    def work() -> None:
        seen.append(tenant.get())
        tenant.set("one")

    runner = Runner(App().job("work")(work))
    for _ in range(2):
        runner.call(claimed(), None)
    assert seen == ["none", "none"]
    assert tenant.get() == "none"
