"""The shelf: claimed jobs in the order they are to start, whoever takes them."""

from __future__ import annotations

import threading
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from pgqueue.job import Claimed
from pgqueue.shelf import Item, LaneHold, Shelf, take
from tests.factories import claimed


def job(level: int, pos: int) -> Claimed:
    return claimed(level * 1000 + pos, level=level, pos=pos)


def drained(shelf: Shelf) -> list[tuple[int, int]]:
    """Take everything as a general slot does."""
    found = []
    while (item := take(shelf.general)) is not None:
        found.append((item.level, item.pos))
    return found


def test_what_is_put_in_order_comes_in_order() -> None:
    shelf = Shelf(["q"])
    shelf.put("q", [job(1, 5), job(1, 6)])
    shelf.put("q", [job(1, 7), job(2, 1)])
    assert len(shelf) == shelf.size() == 4
    assert drained(shelf) == [(1, 5), (1, 6), (1, 7), (2, 1)]
    assert take(shelf.general) is None


def test_an_urgent_job_that_comes_later_goes_to_the_front() -> None:
    shelf = Shelf(["q"])
    shelf.put("q", [job(5, n) for n in range(10)])
    shelf.put("q", [job(1, 900)])
    assert drained(shelf)[0] == (1, 900)


def test_a_lane_stands_at_the_place_of_its_key() -> None:
    shelf = Shelf(["q"])
    lane = LaneHold("q", "k", 7, 1, 50, deque([job(1, 50)]), (1050,))
    shelf.put("q", [job(1, 40), job(1, 60)])
    shelf.put("q", [lane])
    assert drained(shelf) == [(1, 40), (1, 50), (1, 60)]


def test_queues_are_emptied_in_their_order_and_a_reserved_slot_takes_only_its_own() -> None:
    shelf = Shelf(["critical", "bulk"])
    shelf.put("bulk", [job(2, 1)])
    shelf.put("critical", [job(1, 9)])
    assert len(shelf) == shelf.size() == 2
    assert take(shelf.of("critical")) == job(1, 9)
    assert take(shelf.of("critical")) is None
    shelf.put("critical", [job(1, 10)])
    assert drained(shelf) == [(1, 10), (2, 1)]


def test_clearing_takes_everything() -> None:
    shelf = Shelf(["critical", "bulk"])
    shelf.put("bulk", [job(2, 1), job(2, 2)])
    shelf.put("critical", [job(1, 9)])
    assert [(item.level, item.pos) for item in shelf.clear()] == [(1, 9), (2, 1), (2, 2)]
    assert len(shelf) == 0


@given(st.lists(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 50)), max_size=6), max_size=8))
def test_whatever_order_batches_come_in_jobs_are_taken_by_level_and_place(
    batches: list[list[tuple[int, int]]],
) -> None:
    shelf = Shelf(["q"])
    for batch in batches:
        if batch:
            shelf.put("q", [job(level, pos) for level, pos in sorted(batch)])
    assert drained(shelf) == sorted(place for batch in batches for place in batch)


def test_takers_and_the_one_who_puts_lose_nothing_and_take_nothing_twice() -> None:
    shelf = Shelf(["q"])
    total = 5_000
    taken: list[Item] = []
    over = threading.Event()

    def taker() -> None:
        while True:
            last_look = over.is_set()
            item = take(shelf.general)
            if item is not None:
                taken.append(item)
            elif last_look:
                return

    threads = [threading.Thread(target=taker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for start in range(0, total, 10):
        level = 1 if start % 30 == 0 else 2  # every third batch has to be sorted in
        shelf.put("q", [job(level, start + n) for n in range(10)])
    over.set()
    for thread in threads:
        thread.join(30)
    assert sorted(item.pos for item in taken) == list(range(total))
