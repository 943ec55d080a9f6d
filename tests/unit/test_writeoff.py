"""What becomes of results between the slots and the database."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pytest

from pgqueue.events import Bus
from pgqueue.hand import Hand
from pgqueue.job import Claimed, Done, Outcome, Retried
from pgqueue.loop import Wake
from pgqueue.plan import Outcomes
from pgqueue.results import Results
from pgqueue.retries import Retries
from pgqueue.shelf import LaneHold
from pgqueue.writeoff import WriteOff
from tests.factories import BROKEN, claimed, retried

LEVELS = [("", 0), ("default", 5)]


def made() -> tuple[Hand, WriteOff]:
    hand, none = Hand(Wake()), Retries(LEVELS, on=True)
    nobody: Any = None
    return hand, WriteOff(hand, nobody, none, LEVELS, Bus())


def test_a_lane_waits_as_long_as_its_head_also_when_it_is_given_back_a_moment_later() -> None:
    """The budget puts the retry off after the slot has read its backoff, and maybe before it has closed the lane."""
    hand, write_off = made()
    job = claimed(1, key="k")
    lane = LaneHold("default", "k", job.lease, 1, 1, deque([job]), (1,))
    hand.held[1], hand.lanes["default", "k", 1] = job, lane
    outcome = Retried(delay=1.0, failure=BROKEN, later=100.0)
    hand.finish(job, outcome, time.monotonic())
    first = write_off.collect()
    assert [o.delay for _, o in first.ended if isinstance(o, Retried)] == [100.0]
    write_off.settle(first, Outcomes(finished={1}))
    assert not hand.advance(lane, outcome)
    hand.lane_over(lane)
    (back,) = write_off.collect().lanes
    assert back.wait == 100.0


def report(hand: Hand, job: Claimed, outcome: Outcome) -> None:
    """End an attempt as a slot does."""
    hand.held[job.id] = job
    if isinstance(outcome, Done):
        hand.done.append(job)
    else:
        hand.finish(job, outcome, time.monotonic())


@pytest.mark.parametrize("first", [Done(), retried()])
@pytest.mark.parametrize("second", [Done(), retried()])
def test_what_comes_of_a_job_while_an_earlier_attempt_of_it_is_written_stays_to_be_written(
    first: Outcome, second: Outcome
) -> None:
    hand, write_off = made()
    early, late = claimed(1, lease=7), claimed(1, lease=8)
    report(hand, early, first)
    results = write_off.collect()
    write_off.depart(results)
    report(hand, late, second)
    assert list(write_off.collect().claims()) == [late]
    write_off.landed(results, Outcomes(finished={1}))
    assert list(write_off.collect().claims()) == [late]


def test_a_job_that_was_claimed_anew_is_still_held_when_its_earlier_attempt_is_written_off() -> None:
    hand, write_off = made()
    early, late = claimed(1, lease=7), claimed(1, lease=8)
    report(hand, early, Done())
    results = write_off.collect()
    write_off.depart(results)
    hand.held[1] = late
    hand.keyed.add(1)
    write_off.landed(results, Outcomes(finished={1}))
    assert (hand.held, hand.keyed) == ({1: late}, {1})


def test_a_lane_that_was_claimed_anew_is_still_in_hand_when_its_earlier_hold_is_given_back() -> None:
    hand, write_off = made()
    early, late = (LaneHold("default", "k", lease, 1, 1) for lease in (7, 8))
    hand.lanes["default", "k", 1] = late
    write_off.settle(Results(lanes=[early]), Outcomes(lanes_back=[early]))
    assert hand.lanes["default", "k", 1] is late
    write_off.settle(Results(lanes=[late]), Outcomes(lanes_back=[late]))
    assert not hand.lanes
