"""How much a process claims: as much as its slots can start, and a little work ahead of short jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import pytest

from pgqueue.config import WorkerSettings
from pgqueue.hand import Hand
from pgqueue.loop import Wake
from pgqueue.quota import Quota
from pgqueue.shelf import LaneHold
from tests.factories import claimed

LEVELS = [("", 0), ("critical", 5), ("bulk", 5)]
QUEUES = ("critical", "bulk")


def made(**settings: object) -> tuple[Quota, Hand]:
    """Make a quota and the hand it watches."""
    hand = Hand(Wake())
    return Quota(WorkerSettings(**({"queues": QUEUES} | settings)), hand, LEVELS), hand  # type: ignore[arg-type]


def ran(quota: Quota, hand: Hand, jobs: int, seconds_each: float) -> None:
    """Let jobs have run so long each."""
    hand.attempts += jobs
    hand.busy_s += jobs * seconds_each
    quota.learn()


def hold(hand: Hand, numbers: Iterable[int], level: int = 2) -> None:
    """Put jobs in hand."""
    for job_id in numbers:
        hand.held[job_id] = claimed(job_id, level=level)


def hold_lane(hand: Hand, numbers: list[int], key: str = "k") -> None:
    """Put a lane in hand with its jobs."""
    hold(hand, numbers)
    hand.lanes["bulk", key, numbers[0]] = LaneHold(
        "bulk", key, 7, 2, 1, deque(hand.held[i] for i in numbers), tuple(numbers)
    )


def test_the_first_claim_is_no_larger_than_the_slots() -> None:
    quota, _ = made(concurrency=8)
    assert quota.claims() == [(QUEUES, 8)]


@pytest.mark.parametrize(
    ("seconds", "ahead"), [(600, 0), (1.0, 0), (0.5, 0), (0.1, 4), (0.01, 40), (0.001, 400), (0.00001, 1500)]
)
def test_short_jobs_are_claimed_ahead_and_long_ones_are_not(seconds: float, ahead: int) -> None:
    quota, hand = made(concurrency=8)
    ran(quota, hand, 100, seconds)
    assert quota.prefetch() == ahead


def test_jobs_asked_for_and_not_here_yet_count_as_held() -> None:
    quota, hand = made(concurrency=8)
    ran(quota, hand, 1000, 0.00001)
    quota.coming = 1000
    assert quota.claims() == [(QUEUES, 500)]
    quota.coming = 1009
    assert quota.claims() == []


def test_the_next_claim_is_due_when_there_is_room_for_a_whole_one() -> None:
    quota, hand = made(concurrency=8)
    assert quota.low_water() == 0
    ran(quota, hand, 1000, 0.001)
    assert (quota.prefetch(), quota.low_water()) == (400, 200)
    ran(quota, hand, 1000, 0.00001)
    ran(quota, hand, 1000, 0.00001)
    ran(quota, hand, 1000, 0.00001)
    assert quota.low_water() == quota.prefetch() - 500 > 500


def test_a_claim_is_never_larger_than_500() -> None:
    quota, hand = made(concurrency=1000)
    ran(quota, hand, 100, 0.0)
    ((_, n),) = quota.claims()
    assert n == 500


def test_the_prefetch_that_was_asked_for_is_kept() -> None:
    quota, hand = made(concurrency=8, prefetch=3)
    assert quota.prefetch() == 3
    ran(quota, hand, 100, 60.0)
    assert quota.claims() == [(QUEUES, 11)]


def test_nothing_is_claimed_ahead_while_what_waits_does_not_move() -> None:
    for settings in ({}, {"prefetch": 100}):
        quota, hand = made(concurrency=8, **settings)
        ran(quota, hand, 100, 0.001)
        quota.stalled = True
        assert quota.prefetch() == 0


def test_a_full_hand_claims_nothing_and_every_end_makes_room() -> None:
    quota, hand = made(concurrency=8)
    ran(quota, hand, 10, 5.0)
    hold(hand, range(8))
    assert quota.claims() == []
    del hand.held[3]
    assert quota.claims() == [(QUEUES, 1)]
    hold(hand, [3])
    quota.leave(
        [hand.held[i] for i in list(hand.held)[:2]]
    )  # done, and written by the very round that claims
    assert quota.claims() == [(QUEUES, 2)]


def test_short_jobs_are_refilled_in_batches_not_one_by_one() -> None:
    quota, hand = made(concurrency=8)
    ran(quota, hand, 1000, 0.001)
    hold(hand, range(300))
    assert quota.claims() == []
    for job_id in range(150):
        del hand.held[job_id]
    assert quota.claims() == [(QUEUES, 258)]


def test_one_slow_job_among_many_does_not_turn_the_estimate_over() -> None:
    quota, hand = made(concurrency=8)
    ran(quota, hand, 1000, 0.001)
    before = quota.prefetch()
    ran(quota, hand, 1, 0.05)
    assert before / 5 < quota.prefetch() < before
    for _ in range(200):
        ran(quota, hand, 1, 0.05)
    assert quota.prefetch() == 8


def test_learning_without_news_changes_nothing() -> None:
    quota, hand = made()
    quota.learn()
    assert quota.per_job is None
    ran(quota, hand, 4, 2.0)
    quota.learn()
    assert quota.per_job == 2.0


def test_a_hand_full_of_bulk_jobs_still_claims_for_the_reserved_slots() -> None:
    quota, hand = made(concurrency=8, reserved={"critical": 2})
    ran(quota, hand, 10, 5.0)
    hold(hand, range(6), level=2)
    assert quota.claims() == [(("critical",), 2)]
    hold(hand, [100], level=1)
    assert quota.claims() == [(("critical",), 1)]
    hold(hand, [101], level=1)
    assert quota.claims() == []


def test_reserved_slots_are_not_given_to_other_queues() -> None:
    quota, _ = made(concurrency=8, reserved={"critical": 2})
    assert quota.claims() == [(("critical",), 2), (QUEUES, 6)]


def test_a_reserved_slot_is_claimed_for_by_the_round_that_writes_its_last_job() -> None:
    """Else each job of the queue waits for a flush of its own, and the slot runs fifty a second."""
    quota, hand = made(concurrency=8, reserved={"critical": 1})
    ran(quota, hand, 10, 5.0)
    hold(hand, range(7), level=2)
    hold(hand, [100], level=1)
    assert quota.claims() == []
    quota.leave([hand.held[100]])
    assert quota.claims() == [(("critical",), 1)]
    quota.leave([hand.held[0]])
    assert quota.claims() == [(QUEUES, 1)]


def test_a_hand_full_of_bulk_jobs_still_takes_keys_for_the_reserved_slots() -> None:
    quota, hand = made(concurrency=8, reserved={"critical": 2})
    ran(quota, hand, 10, 5.0)
    hold(hand, range(6), level=2)
    assert quota.lanes() == (("critical",), 2, 1, 2)
    hold(hand, [100, 101], level=1)
    assert quota.lanes()[1] == 0


def test_critical_jobs_beyond_the_reserved_slots_take_general_ones() -> None:
    quota, hand = made(concurrency=8, reserved={"critical": 2})
    ran(quota, hand, 10, 5.0)
    hold(hand, range(5), level=1)
    assert quota.claims() == [(QUEUES, 3)]


def test_a_lane_takes_one_slot_whatever_it_holds() -> None:
    quota, hand = made(concurrency=8)
    ran(quota, hand, 10, 5.0)
    hold_lane(hand, [1, 2, 3, 4, 5])
    assert quota.claims() == [(QUEUES, 7)]


def test_lanes_are_taken_one_job_deep_until_durations_are_known_and_for_long_jobs() -> None:
    quota, hand = made(concurrency=8)
    queues, lanes, depth, _ = quota.lanes()
    assert (queues, lanes, depth) == (QUEUES, 8, 1)
    ran(quota, hand, 10, 5.0)
    assert quota.lanes()[2] == 1


def test_lanes_of_short_jobs_are_taken_as_deep_as_they_are_held_briefly() -> None:
    quota, hand = made(concurrency=8)
    ran(quota, hand, 1000, 0.001)
    _, lanes, depth, total = quota.lanes()
    assert depth == 20
    assert 0 < lanes <= total <= 500


def test_a_full_hand_takes_no_lane() -> None:
    quota, hand = made(concurrency=4)
    ran(quota, hand, 10, 5.0)
    hold(hand, range(6))
    assert quota.lanes()[1] == 0
    assert quota.lanes()[3] == 0


def test_jobs_too_short_for_a_slot_each_wake_fewer_slots() -> None:
    quota, hand = made(concurrency=8)
    assert quota.slots_for(6) == 6
    ran(quota, hand, 1000, 0.00001)
    assert quota.slots_for(10) == 1
    assert quota.slots_for(500) == 6
    assert quota.slots_for(1) == 1


def test_jobs_behind_the_first_of_a_lane_count_as_far_as_jobs_are_held_ahead() -> None:
    quota, hand = made(concurrency=8)
    ran(quota, hand, 1000, 0.001)
    assert quota.prefetch() == 400
    hold_lane(hand, list(range(1, 101)))
    assert quota.free() == 8 + 400 - 1 - 99
    hold_lane(hand, list(range(1001, 2001)), key="long")
    assert quota.free() == 8 - 2


def test_as_many_lanes_are_taken_as_their_jobs_are_worth() -> None:
    quota, hand = made(concurrency=8)
    ran(quota, hand, 1000, 0.001)
    assert quota.lanes()[1] == quota.lanes()[3] == 408
    quota.learn_lanes(10, 150)
    assert quota.lanes()[1] == 1 + 408 // 15
    quota.learn_lanes(1, 400)
    assert quota.lanes()[1] == 1 + 408 // 20  # a lane hands out 20 at most
    quota.learn_lanes(0, 0)
    assert quota.lanes()[1] == 1 + 408 // 20
    ran(quota, hand, 1_000_000, 5.0)
    assert quota.lanes()[1] == 8


def claim(quota: Quota, jobs: int, characters: int) -> None:
    """Let a claim have come with payloads so long."""
    quota.learn_payloads([claimed(n, payload="x" * characters) for n in range(jobs)])


MB = 1 << 20


@pytest.mark.parametrize(
    ("characters", "ahead"),
    [(150, 1500), (20_000, 1500), (MB // 10, 312), (MB, 24), (4 * MB, 0), (40 * MB, 0)],
)
def test_large_payloads_are_claimed_ahead_as_far_as_32_mib_go(characters: int, ahead: int) -> None:
    quota, hand = made(concurrency=8)
    ran(quota, hand, 100, 0.00001)
    claim(quota, 1, characters)
    assert quota.prefetch() == ahead
    ((_, n),) = quota.claims()
    assert n == min(500, 8 + ahead)


def test_a_claim_of_large_payloads_tells_at_once_and_a_single_one_only_a_little() -> None:
    quota, hand = made(concurrency=8)
    ran(quota, hand, 100, 0.00001)
    claim(quota, 500, 150)
    claim(quota, 20, MB)
    assert quota.prefetch() == 24
    claim(quota, 20, 150)
    claim(quota, 1, MB // 10)
    assert quota.prefetch() == 1500
    claim(quota, 0, 0)
    assert quota.prefetch() == 1500


def test_lanes_of_large_payloads_are_taken_as_deep_as_every_slot_has_its_share() -> None:
    quota, hand = made(concurrency=8)
    ran(quota, hand, 1000, 0.0001)
    assert quota.lanes()[2] == 200
    claim(quota, 20, MB)
    assert quota.lanes()[2:] == (4, 32)
    claim(quota, 20, 40 * MB)
    assert quota.lanes()[2:] == (1, 8)


def test_the_prefetch_that_was_asked_for_is_kept_whatever_the_payloads() -> None:
    quota, _ = made(concurrency=8, prefetch=100)
    claim(quota, 20, MB)
    assert quota.prefetch() == 100
