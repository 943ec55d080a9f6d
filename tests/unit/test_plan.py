"""Which rounds may fly one behind the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pgqueue.claim import Scope
from pgqueue.job import Released
from pgqueue.plan import LaneWish, Plan, Wish
from pgqueue.results import Results
from pgqueue.shelf import LaneHold
from tests.factories import claimed

SCOPE = Scope(queues=["q"], priorities=[5], names=["work"])
BACKLOG = Wish(levels=[0], scope=SCOPE, starts=[0], n=500, backlog=True)
LANES = LaneWish(levels=[0], scope=SCOPE, starts=[0], lanes=26, depth=20, total=500, backlog=True)
NOTHING = Results()


@pytest.mark.parametrize(
    ("plan", "plain"),
    [
        (Plan(results=NOTHING, wishes=[BACKLOG]), True),
        (Plan(results=Results(done=[claimed(1)]), wishes=[BACKLOG]), True),
        (Plan(results=Results(lanes=[LaneHold("q", "k", 7, 1, 1)]), wishes=[BACKLOG], lane_wish=LANES), True),
        (Plan(results=NOTHING, wishes=[replace(BACKLOG, backlog=False)], lane_wish=LANES), True),
        (Plan(results=NOTHING, wishes=[BACKLOG], lane_wish=replace(LANES, backlog=False)), False),
        (Plan(results=NOTHING, wishes=[replace(BACKLOG, backlog=False)]), False),
        (Plan(results=Results(done=[claimed(1)])), False),
        (Plan(results=NOTHING, wishes=[BACKLOG], turn=["q"]), False),
        (Plan(results=NOTHING, wishes=[BACKLOG], arm=["q"]), False),
        (Plan(results=Results(ended=[(claimed(1), Released())]), wishes=[BACKLOG]), False),
        (Plan(results=Results(applied=[claimed(1)]), wishes=[BACKLOG]), False),
        (Plan(results=Results(locked=frozenset({1})), wishes=[BACKLOG]), False),
    ],
)
def test_acknowledgements_lanes_and_claims_of_a_backlog_fly_and_nothing_else(plan: Plan, plain: bool) -> None:
    assert plan.plain is plain


def test_jobs_with_and_without_a_key_share_the_room_that_a_round_fills() -> None:
    assert Plan(results=NOTHING, wishes=[BACKLOG, BACKLOG]).most == 1000
    assert Plan(results=NOTHING, wishes=[replace(BACKLOG, n=8)], lane_wish=LANES).most == 500
    assert Plan(results=NOTHING).most == 0
