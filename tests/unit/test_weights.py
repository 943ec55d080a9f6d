"""Queues that share a worker by weight get their shares, and rest earns nothing."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue.config import WorkerSettings, parse_weights
from pgqueue.errors import ConfigError
from pgqueue.weights import Weights


def claim(weights: Weights, waiting: Counter[str], n: int) -> list[str]:
    """Take n jobs as a claim does: from each queue all it has, in order."""
    jobs: list[str] = []
    for queue in weights.order():
        took = min(waiting[queue], n - len(jobs))
        waiting[queue] -= took
        jobs += [queue] * took
    weights.took(jobs, exhausted=len(jobs) < n)
    return jobs


@pytest.mark.parametrize("n", [1, 3, 50])
def test_two_queues_that_always_have_jobs_get_their_shares(n: int) -> None:
    weights, waiting = Weights({"critical": 8, "bulk": 2}), Counter(critical=10**6, bulk=10**6)
    got = Counter[str]()
    while got.total() < 5_000:
        got.update(claim(weights, waiting, n))
    assert abs(got["bulk"] / got.total() - 0.2) < 0.02


@given(
    shares=st.dictionaries(st.sampled_from("abcde"), st.integers(1, 100), min_size=1),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=40),
)
def test_no_queue_is_ever_more_than_a_claim_behind_its_share(
    shares: dict[str, int], sizes: list[int]
) -> None:
    weights, waiting = Weights(shares), Counter(dict.fromkeys(shares, 10**9))
    got = Counter[str]()
    for n in sizes:
        got.update(claim(weights, waiting, n))
    most = max(sizes)
    for queue, share in shares.items():
        due = got.total() * share / sum(shares.values())
        assert got[queue] >= due - most * len(shares)


def test_a_queue_that_rested_has_no_credit() -> None:
    weights, waiting = Weights({"critical": 5, "bulk": 5}), Counter(bulk=10**6, critical=0)
    for _ in range(1_000):
        claim(weights, waiting, 10)
    waiting["critical"] = 10**6
    got = Counter[str]()
    for _ in range(20):
        got.update(claim(weights, waiting, 10))
    assert got == {"critical": 100, "bulk": 100}


def test_a_queue_that_trickles_is_served_at_once_and_saves_nothing_up() -> None:
    weights, waiting = Weights({"critical": 5, "bulk": 5}), Counter(bulk=10**6)
    for _ in range(1_000):
        waiting["critical"] += 1
        claim(weights, waiting, 10)
    assert waiting["critical"] <= 2
    waiting["critical"] = 10**6
    got = Counter[str]()
    for _ in range(20):
        got.update(claim(weights, waiting, 10))
    assert abs(got["critical"] - got["bulk"]) <= 20


def test_no_work_is_left_while_there_is_room() -> None:
    weights, waiting = Weights({"critical": 8, "bulk": 1}), Counter(bulk=7, critical=0)
    assert claim(weights, waiting, 5) == ["bulk"] * 5
    assert claim(weights, waiting, 5) == ["bulk"] * 2


def test_weights_are_read_in_the_order_written() -> None:
    assert parse_weights(" critical=8, bulk = 2") == {"critical": 8, "bulk": 2}
    assert Weights({}) or not Weights({}).order()


@pytest.mark.parametrize(
    "text", ["", "critical", "critical=", "critical=x", "a=1,a=2", "a=-1", "a=1,,b=1", "a=1,", "a=²"]
)
def test_weights_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="weights"):
        parse_weights(text)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"queues": ("a", "b"), "weights": {"a": 1, "b": 1}, "reserved": {"a": 1}}, "reserved"),
        ({"queues": ("a", "b"), "weights": {"a": 1}}, "a,b"),
        ({"queues": ("a",), "weights": {"a": 0}}, "between 1 and 1000"),
        ({"queues": ("a",), "weights": {"a": 1001}}, "between 1 and 1000"),
    ],
)
def test_weights_that_do_not_fit_the_queues_are_refused(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        WorkerSettings(**settings)  # type: ignore[arg-type]
