"""Where the claim of a backlog starts that is sent behind another one."""

from __future__ import annotations

from pgqueue.claim import Scope
from pgqueue.floors import Floors
from pgqueue.job import Claimed
from pgqueue.plan import Wish
from pgqueue.stride import Stride

LEVELS = [("mail", 0), ("mail", 5)]
N = 100


def wish(start: int, *, level: int = 1, backlog: bool = True) -> Wish:
    starts = [start if level == n else 0 for n in range(2)]
    scope = Scope(queues=["mail", "mail"], priorities=[0, 5], names=[])
    return Wish(levels=[0, 1], scope=scope, starts=starts, n=N, backlog=backlog)


def jobs(last: int, *, level: int = 1, first_level: int | None = None, n: int = N) -> list[Claimed]:
    """Make n jobs of a level (counted from 0), the last one at a position."""
    levels = [level if first_level is None else first_level, *[level] * (n - 1)]
    return [
        Claimed(of + 1, last - n + 1 + place, place, 7, "work", None, 1, b"", None, "{}")
        for place, of in enumerate(levels)
    ]


def floors(floor: int) -> Floors:
    """Make floors whose second level is proven so far, with more settled above."""
    made = Floors(LEVELS)
    made.observed(1_000_000, (), 0.0)
    made.floor[1] = floor
    return made


def after(*spans: tuple[int, int]) -> Stride:
    """Take in full claims by (start, last position)."""
    stride = Stride()
    for start, last in spans:
        stride.took(wish(start), jobs(last))
    return stride


def test_a_claim_with_none_under_way_starts_at_the_floor() -> None:
    assert after((0, 100), (100, 200)).starts(floors(200), ()) == [0, 200]


def test_a_claim_behind_another_starts_behind_what_that_one_takes() -> None:
    assert after((0, 100), (100, 200)).starts(floors(200), [wish(200)]) == [0, 300]


def test_where_others_drain_the_level_too_it_starts_behind_what_they_hold() -> None:
    assert after((0, 200), (200, 400)).starts(floors(400), [wish(400)]) == [0, 500 + 100]


def test_one_long_claim_is_no_reason_to_go_further() -> None:
    """Whatever lies in front of the guess waits for a claim more; the number of a first job may be anything."""
    assert after((0, 900_100)).starts(floors(900_100), [wish(900_100)]) == [0, 900_200]
    assert after((0, 100), (100, 2_000)).starts(floors(2_000), [wish(2_000)]) == [0, 2_100]


def test_behind_a_claim_that_began_above_the_floor_the_next_begins_at_the_floor() -> None:
    """Nobody has looked between the two: jobs there would wait until the end of the backlog."""
    assert after((0, 100), (100, 200)).starts(floors(200), [wish(201)]) == [0, 200]


def test_when_the_floor_went_back_the_next_claim_begins_there() -> None:
    made = floors(200)
    made.lower(["mail"])
    assert after((0, 100), (100, 200)).starts(made, [wish(200)]) == [0, 0]


def test_a_claim_that_looks_for_the_end_of_the_backlog_tells_nothing() -> None:
    stride = after((0, 200), (200, 400))
    assert stride.starts(floors(400), [wish(400, backlog=False)]) == [0, 400]
    stride.took(wish(400), jobs(900, n=N - 1))
    stride.took(wish(400), jobs(900, first_level=0))
    stride.took(wish(400, backlog=False), jobs(900))
    assert stride.starts(floors(400), [wish(400)]) == [0, 600]


def test_another_level_begins_anew() -> None:
    stride = after((0, 300), (300, 600))
    stride.took(wish(0, level=0), jobs(200, level=0))
    made = floors(600)
    made.floor[0] = 200
    assert stride.starts(made, [wish(200, level=0)]) == [300, 600]
