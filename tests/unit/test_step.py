"""Steps and policies of long work are checked when they are defined; what a Job keeps works without a worker."""

from __future__ import annotations

import asyncio
import json
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pgqueue import App, Backoff, BadOption, BadPayload, Job
from pgqueue.batch import batch
from pgqueue.enqueue import Options
from pgqueue.job import STATE_LIMIT, Completed, Done
from pgqueue.run import RESULT_LIMIT, Runner
from pgqueue.step import DEEPEST, Step, steps_json
from tests.factories import claimed

app = App()


@app.job("extract", queue="etl")
def extract(day: str) -> None: ...


@app.job("load")
def load(day: str) -> None: ...


@app.job("clean")
def clean() -> None: ...


def spec(step: Step) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(step.text())
    return found


def context() -> Job:
    return Job(claimed(), queue="default", priority=5, max_attempts=5)


def test_a_step_carries_what_its_caller_set_and_nothing_else() -> None:
    assert spec(extract.with_payload("monday")) == {
        "name": "extract",
        "payloads": ["monday"],
        "else_queue": "etl",
    }
    full = extract.using(
        queue="slow", priority=1, key=str.upper, run_after=timedelta(minutes=1), idempotency_key="k", max_attempts=2,
        timeout=math.inf, backoff=Backoff(base=2, cap=9), expires_at=datetime(2030, 1, 1, tzinfo=UTC),
        headers={"a": {"b": 1}}, then=[load.with_payload("x")],
    ).with_payload("monday")  # fmt: skip
    assert spec(full) == {
        "name": "extract", "payloads": ["monday"], "queue": "slow", "priority": 1, "keys": ["MONDAY"], "delay": 60.0,
        "idempotency_keys": ["k"], "max_attempts": 2, "timeout_s": "Infinity",
        "backoff": {"base": 2, "cap": 9, "jitter": "full"}, "expires_at": "2030-01-01T00:00:00+00:00",
        "headers": {"a": {"b": 1}}, "then": [spec(load.with_payload("x"))], "else_queue": "etl",
    }  # fmt: skip


def test_neighbours_that_differ_in_payload_and_key_alone_are_one_group() -> None:
    keyed = load.using(key=str)
    steps = [load.with_payload("a"), load.with_payload("b"), keyed.with_payload("c"), keyed.with_payload("d")]
    groups = json.loads(steps_json([*steps, load.with_payload("e")]))
    assert [(g["payloads"], g.get("keys")) for g in groups] == [
        (["a", "b"], None),
        (["c", "d"], ["c", "d"]),
        (["e"], None),
    ]


def test_a_chain_cannot_be_made_cyclic() -> None:
    """A step is finished before anything can refer to it, and a list that grows later is not looked at again."""
    with pytest.raises(BadOption, match=r"then: <.*> is not a step"):
        extract.using(then=[load.using(then=[extract])])  # type: ignore[list-item]
    steps: list[Step] = []
    first = extract.using(then=steps).with_payload("a")
    again = load.using(then=steps)
    steps.append(first)
    assert "then" not in spec(first)
    assert "then" not in spec(again.with_payload("b"))
    with pytest.raises(AttributeError):
        first.kind = "{}"  # type: ignore[misc]


@pytest.mark.parametrize("wrong", [load, "load", [load], ["load"], [None], {"load": 1}, 5])
def test_what_is_no_step_is_refused(wrong: Any) -> None:
    with pytest.raises(BadOption, match=r"then: .*with_payload"):
        extract.using(then=wrong)
    with pytest.raises(BadOption, match=r"steps: .*with_payload"):
        batch(wrong, None)
    with pytest.raises(BadOption, match=r"then: .*with_payload"):
        batch([], [] if wrong is None else wrong)  # type: ignore[arg-type]


def test_one_step_needs_no_list() -> None:
    step = load.with_payload("a")
    assert Options(then=step).then == Options(then=[step]).then == (step,)  # type: ignore[arg-type]


def test_the_payload_of_a_step_is_checked_like_any_other() -> None:
    with pytest.raises(BadPayload, match="does not fit"):
        load.with_payload(5)  # type: ignore[arg-type]
    with pytest.raises(BadPayload, match="takes none"):
        clean.with_payload("x")  # type: ignore[arg-type]


def test_a_step_takes_no_dedup_key() -> None:
    with pytest.raises(BadOption, match="dedup_key: a step of job 'load' takes none"):
        load.using(dedup_key="d").with_payload("x")


def test_what_follows_has_a_limit_that_names_the_way_out() -> None:
    with pytest.raises(BadOption, match=r"then: what follows has \d+ bytes .*references"):
        extract.using(then=[load.with_payload("x" * 65_500)])
    extract.using(then=[load.with_payload("x" * 60_000)])


def test_more_steps_than_a_reader_can_follow_are_refused_where_the_chain_is_made() -> None:
    """dbos 546, pgflow 271: what only the worker cannot read is found out by the worker, far from whoever wrote it."""
    step = load.with_payload("last")
    for _ in range(DEEPEST - 1):
        step = load.using(then=[step]).with_payload("x")
    assert step.depth == DEEPEST
    assert spec(step)["then"][0]["name"] == "load"  # and it can be read
    extract.using(then=[step])
    longer = load.using(then=[step, step]).with_payload("x")
    with pytest.raises(BadOption, match=r"then: 201 steps follow each other, more than 200; .*job.then"):
        extract.using(then=[longer])


def test_headers_that_no_worker_could_read_are_refused_where_they_are_given() -> None:
    """dbos 546: one row that cannot be read, found out where nobody can mend it."""
    deep: Any = "x"
    for _ in range(99):
        deep = [deep]
    extract.using(headers={"a": deep})
    with pytest.raises(BadOption, match="headers: are nested more than 100 deep"):
        extract.using(headers={"a": {"b": deep}})


def test_a_header_of_the_queue_s_own_is_refused() -> None:
    with pytest.raises(BadOption, match="headers: 'pgqueue' is the queue's own"):
        extract.using(headers={"pgqueue": {}})


@pytest.mark.parametrize(
    ("keep", "seconds"),
    [("7d", 604_800), ("12h", 43_200), ("90 min", 5_400), (timedelta(days=1), 86_400), (3_600, 3_600)],
)  # fmt: skip
def test_keep_reads_spans(keep: Any, seconds: float) -> None:
    assert App().job("j", keep=keep)(load.handler).policy.keep == seconds


@pytest.mark.parametrize(
    "keep", ["", "7", "7 fortnights", "-1d", "0d", "401d", 0, -1, math.nan, math.inf, timedelta(0)]
)
def test_a_keep_that_makes_no_sense_is_refused(keep: Any) -> None:
    with pytest.raises(BadOption, match="keep"):
        App().job("j", keep=keep)


def test_a_keep_shorter_than_the_retry_window_is_refused() -> None:
    with pytest.raises(BadOption, match="keep: 1200 s is shorter than the 1500 s"):
        App().job("j", keep="20min")
    with pytest.raises(BadOption, match="keep: 3600 s is shorter than the 9000 s"):
        App().job("j", keep="1h", max_attempts=10, backoff=Backoff(cap=900))
    App().job("j", keep="20min", max_attempts=1)


def test_a_result_is_kept_for_a_day_unless_keep_says_otherwise() -> None:
    assert App().job("j", result=True)(load.handler).policy.keep == 86_400
    assert App().job("j", result=True, keep="7d")(load.handler).policy.keep == 604_800


@pytest.mark.parametrize("fraction", [-0.1, 1.1, math.nan, "0.5", None, True])
def test_progress_is_a_number_from_0_to_1(fraction: Any) -> None:
    with pytest.raises(BadOption, match="progress"):
        context().progress(fraction)


def test_a_handler_that_is_called_directly_can_use_its_context() -> None:
    job = context()
    assert not job.state
    job.progress(0.5, "half")
    job.checkpoint({"page": 12})
    assert job.state == {"page": 12}

    async def later() -> Any:
        await job.acheckpoint([1, 2])
        return await job.astate()

    assert asyncio.run(later()) == [1, 2]


def test_a_state_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(BadOption, match=r"state: has \d+ bytes, more than 262144.*reference"):
        context().checkpoint("x" * STATE_LIMIT)
    for wrong in ("\0", math.nan, object(), "\ud800"):
        with pytest.raises(BadPayload):
            context().checkpoint(wrong)


def test_a_plain_job_ends_with_nothing_but_its_acknowledgement() -> None:
    runner = Runner(load)
    assert isinstance(runner.call(claimed(name="load", payload='"x"'), None), Done)
    headed = claimed(name="load", payload='"x"', extra={"headers": {"trace": 1}})
    assert isinstance(runner.call(headed, None), Done)


def test_a_member_of_a_batch_has_its_end_to_write() -> None:
    member = claimed(name="load", payload='"x"', extra={"headers": {"pgqueue": {"batch": 7}}})
    outcome = Runner(load).call(member, None)
    assert outcome == Completed(batched=True)
    job = Runner(load).context(member, "default", 5)
    assert (job.batch, job.parent, job.headers) == (7, None, {})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "has no JSON form"),
        ("\0", "NUL"),
        (math.nan, "nan"),
        ("x" * RESULT_LIMIT, "return a reference"),
    ],
)
def test_a_result_that_cannot_be_kept_is_a_note_and_no_failure(value: Any, says: str) -> None:
    kind = App().job("j", result=True)(lambda: value)
    outcome = Runner(kind).call(claimed(name="j"), None)
    assert isinstance(outcome, Completed)
    assert outcome.result is None
    assert says in str(outcome.problem)


def test_a_type_without_result_keeps_none() -> None:
    def handler() -> object:
        return object()

    kind = App().job("j", keep="1d")(handler)
    assert Runner(kind).call(claimed(name="j"), None) == Completed()
