"""What becomes of results between the slots and the database."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from pgqueue.events import Bus
from pgqueue.hand import Hand
from pgqueue.job import Retried
from pgqueue.loop import Wake
from pgqueue.plan import Outcomes
from pgqueue.retries import Retries
from pgqueue.shelf import LaneHold
from pgqueue.writeoff import WriteOff
from tests.factories import BROKEN, claimed

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
