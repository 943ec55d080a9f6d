"""The proof of which sequence numbers are settled."""

from __future__ import annotations

from collections.abc import Callable

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


class Sequence:
    """A sequence with writers: numbers are drawn, then become visible together at the writer's end."""

    def __init__(self) -> None:
        self.last = 0
        self.serial = 0
        self.drawn: dict[int, tuple[str, list[int]]] = {}
        self.visible: set[int] = set()

    def write(self, kind: str, writer: int) -> None:
        """Let a writer draw a number, or end."""
        if kind == "draw":
            self.last += 1
            if writer not in self.drawn:
                self.serial += 1
                self.drawn[writer] = (f"{writer}/{self.serial}", [])
            self.drawn[writer][1].append(self.last)
        elif writer in self.drawn:
            self.visible.update(self.drawn.pop(writer)[1])

    @property
    def holders(self) -> set[str]:
        """The writers at work."""
        return {name for name, _ in self.drawn.values()}


class Reader:
    """Reads what is visible above its floor, and raises the floor as far as the horizon allows."""

    def __init__(self) -> None:
        self.horizon: Horizon[str] = Horizon(patience=1.0)
        self.clock = 0.0
        self.floor = 0
        self.read: set[int] = set()

    def look(self, sequence: Sequence, between: Callable[[], None]) -> None:
        """Look three times, with whatever happens in between."""
        seen = {number for number in sequence.visible if number > self.floor}
        between()
        last = sequence.last
        between()
        proven = self.horizon.settled
        back = self.horizon.observe(
            last=last, holders=sequence.holders, now=self.clock, floors={"p": self.floor}
        )
        if back is None:
            self.read |= seen
            self.floor = max(self.floor, proven)
        else:
            self.floor = min(self.floor, back.get("p", 0))


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, data=st.data())
def test_a_reader_that_skips_up_to_the_horizon_misses_nothing(
    steps: list[tuple[str, float]], data: st.DataObject
) -> None:
    """Whatever writers do between its three looks."""
    sequence, reader = Sequence(), Reader()
    slips = st.lists(st.tuples(st.sampled_from(["draw", "end"]), st.integers(0, WRITERS - 1)), max_size=2)

    def between() -> None:
        for kind, writer in data.draw(slips):
            sequence.write(kind, writer)

    for kind, value in steps:
        if kind == "look":
            reader.clock += value
            reader.look(sequence, between)
        else:
            sequence.write(kind, int(value))
    for writer in range(WRITERS):
        sequence.write("end", writer)
    for _ in range(4):
        reader.clock += 2
        reader.look(sequence, lambda: None)
    assert reader.read == sequence.visible
