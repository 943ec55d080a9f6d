"""The proof of which sequence numbers are settled."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pgqueue.horizon import Horizon


def test_without_writers_everything_handed_out_is_settled() -> None:
    horizon: Horizon[str] = Horizon()
    assert horizon.observe(last=7, holders=(), now=0, floors={}) is None
    assert horizon.settled == 7


def test_numbers_of_an_open_writer_are_not_settled_until_it_is_gone() -> None:
    horizon: Horizon[str] = Horizon()
    horizon.observe(last=7, holders=("a",), now=0, floors={})
    assert horizon.settled == 0
    horizon.observe(last=9, holders=("b",), now=0.1, floors={})
    assert horizon.settled == 7


def test_a_writer_that_came_after_the_noted_one_does_not_delay_the_proof() -> None:
    horizon: Horizon[str] = Horizon()
    horizon.observe(last=7, holders=("a",), now=0, floors={})
    horizon.observe(last=8, holders=("a", "b"), now=0.1, floors={})
    horizon.observe(last=9, holders=("b", "c"), now=0.2, floors={})
    assert horizon.settled == 7
    assert horizon.pending


def test_a_long_writer_becomes_a_guard_and_its_end_brings_the_floors_back() -> None:
    horizon: Horizon[str] = Horizon(patience=1.0)
    horizon.observe(last=7, holders=("long",), now=0, floors={"p": 3})
    assert horizon.observe(last=9, holders=("long",), now=2, floors={"p": 3}) is None
    assert horizon.guarded
    assert horizon.settled == 9
    assert horizon.observe(last=20, holders=("long",), now=3, floors={"p": 9}) is None
    assert horizon.settled == 20
    assert horizon.observe(last=21, holders=(), now=4, floors={"p": 20}) == {"p": 3}
    assert not horizon.guarded


def test_floors_taken_after_a_guard_go_back_to_the_start() -> None:
    horizon: Horizon[str] = Horizon(patience=1.0)
    horizon.observe(last=7, holders=("long",), now=0, floors={"p": 3})
    horizon.observe(last=7, holders=("long",), now=2, floors={"p": 3})
    back = horizon.observe(last=9, holders=(), now=3, floors={"p": 7, "q": 7})
    assert back == {"p": 3}


def test_two_guards_that_end_together_bring_the_lower_floor_back() -> None:
    horizon: Horizon[str] = Horizon(patience=1.0)
    horizon.observe(last=5, holders=("a",), now=0, floors={"p": 1})
    horizon.observe(last=6, holders=("a",), now=2, floors={"p": 1})
    horizon.observe(last=9, holders=("a", "b"), now=3, floors={"p": 6})
    horizon.observe(last=9, holders=("a", "b"), now=5, floors={"p": 6})
    assert horizon.observe(last=12, holders=(), now=6, floors={"p": 9}) == {"p": 1}


def test_reset_forgets_what_was_proven() -> None:
    horizon: Horizon[str] = Horizon()
    horizon.observe(last=7, holders=(), now=0, floors={})
    horizon.observe(last=9, holders=("a",), now=0, floors={})
    horizon.reset()
    assert (horizon.settled, horizon.pending, horizon.guarded) == (0, False, False)


WRITERS = 4
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("draw"), st.integers(0, WRITERS - 1)),
        st.tuples(st.just("end"), st.integers(0, WRITERS - 1)),
        st.tuples(st.just("look"), st.floats(0, 2)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, between=st.data())
def test_no_number_at_or_below_the_floor_appears_without_bringing_the_floor_back(
    steps: list[tuple[str, float]], between: st.DataObject
) -> None:
    """A reader that skips up to the horizon misses nothing, whatever writers do between its three looks."""
    horizon: Horizon[str] = Horizon(patience=1.0)
    last, clock, floor, serial = 0, 0.0, 0, 0
    drawn: dict[int, tuple[str, list[int]]] = {}
    visible: set[int] = set()
    read: set[int] = set()

    def write(kind: str, writer: int) -> None:
        nonlocal last, serial
        if kind == "draw":
            last += 1
            if writer not in drawn:
                serial += 1
                drawn[writer] = (f"{writer}/{serial}", [])
            drawn[writer][1].append(last)
        elif writer in drawn:
            visible.update(drawn.pop(writer)[1])

    def slip() -> None:
        for kind, writer in between.draw(
            st.lists(st.tuples(st.sampled_from(["draw", "end"]), st.integers(0, WRITERS - 1)), max_size=2)
        ):
            write(kind, writer)

    def look() -> None:
        nonlocal floor
        seen = {number for number in visible if number > floor}
        slip()
        noted = last
        slip()
        holders = {name for name, _ in drawn.values()}
        proven = horizon.settled
        back = horizon.observe(last=noted, holders=holders, now=clock, floors={"p": floor})
        if back is not None:
            floor = min(floor, back.get("p", 0))
            return
        read.update(seen)
        floor = max(floor, proven)

    for kind, value in steps:
        if kind == "look":
            clock += value
            look()
        else:
            write(kind, int(value))
    for writer in list(drawn):
        write("end", writer)
    for _ in range(4):
        clock += 2
        seen = {number for number in visible if number > floor}
        back = horizon.observe(last=last, holders=(), now=clock, floors={"p": floor})
        floor = min(floor, back.get("p", 0)) if back is not None else floor
        read.update(seen if back is None else ())
    assert read == visible
