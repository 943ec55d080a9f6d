from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue import BadOption
from pgqueue.backoff import Backoff, Jitter


@pytest.mark.parametrize(
    ("execution", "longest"),
    [
        (1, 2.0),
        (2, 4.0),
        (3, 8.0),
        (4, 16.0),
        (7, 128.0),
        (8, 256.0),
        (9, 300.0),
        (31, 300.0),
        (10**6, 300.0),
    ],
)
def test_full_jitter_is_bounded_by_two_to_the_power_of_the_execution_and_by_300_seconds(
    execution: int, longest: float
) -> None:
    assert Backoff().bound(execution) == longest


@pytest.mark.parametrize("jitter", ["full", "equal", "decorrelated", "none"])
@given(execution=st.integers(1, 10**7), seed=st.integers())
def test_a_delay_is_never_longer_than_its_bound(jitter: Jitter, execution: int, seed: int) -> None:
    policy = Backoff(jitter=jitter)
    assert 0 <= policy.delay(execution, random.Random(seed)) <= policy.bound(execution) <= 300


def test_full_jitter_uses_its_whole_range_evenly() -> None:
    rng = random.Random(1)
    drawn = [Backoff().delay(3, rng) for _ in range(4_000)]
    quarters = [sum(1 for d in drawn if 2 * q <= d < 2 * (q + 1)) for q in range(4)]
    assert all(900 < n < 1_100 for n in quarters)


def test_equal_jitter_keeps_the_upper_half() -> None:
    rng = random.Random(1)
    drawn = [Backoff(jitter="equal").delay(3, rng) for _ in range(1_000)]
    assert min(drawn) >= 4
    assert max(drawn) <= 8


def test_decorrelated_jitter_starts_between_base_and_three_times_base_and_spreads_to_the_cap() -> None:
    policy, rng = Backoff(base=2, cap=100, jitter="decorrelated"), random.Random(1)
    first = [policy.delay(1, rng) for _ in range(1_000)]
    late = [policy.delay(40, rng) for _ in range(1_000)]
    assert min(first) >= 2
    assert max(first) <= 6
    assert min(late) >= 2
    assert max(late) == 100


def test_without_jitter_the_delay_is_the_bound() -> None:
    assert Backoff(base=0.5, cap=10, jitter="none").delay(3, random.Random(1)) == 4.0


@given(base=st.floats(1e-6, 3e8), cap=st.floats(1e-6, 3e8), jitter=st.sampled_from(["full", "equal", "none"]))
def test_a_policy_survives_its_json(base: float, cap: float, jitter: Jitter) -> None:
    policy = Backoff(base=base, cap=cap, jitter=jitter)
    assert Backoff.from_json(policy.to_json()) == policy


def test_json_that_leaves_something_out_means_the_default() -> None:
    assert Backoff.from_json('{"cap": 9}') == Backoff(cap=9)


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf, 1e18, True, "1", None])
@pytest.mark.parametrize("field", ["base", "cap"])
def test_a_base_or_cap_that_is_no_time_is_refused_by_name(field: str, wrong: object) -> None:
    with pytest.raises(BadOption, match=rf"Backoff\({field}=\)") as caught:
        Backoff(**{field: wrong})  # type: ignore[arg-type]  # the point of the test
    assert caught.value.option == f"Backoff({field}=)"


def test_an_unknown_jitter_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(BadOption, match="full, equal, decorrelated or none"):
        Backoff(jitter="some")  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize(
    "text", ["", "no json", "[1]", '"base"', "5", "null", '{"base": "x"}', '{"jitter": []}']
)
def test_json_that_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(BadOption):
        Backoff.from_json(text)
