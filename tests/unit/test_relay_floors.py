"""How far a partition counts as published."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from pgqueue.horizon import Horizon
from relay.event import Event
from relay.floors import Batch, Floors
from relay.publish import Look, Trouble
from tests.unit.test_relay_event import event

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def row(id_: int, *, part: int = 0, key: str = "a") -> Event:
    """Return an event of a partition."""
    return event(id=id_, part=part, key=key, aggregate_id=key)


class Reader:
    """Floors with one partition or more, and a clock."""

    def __init__(self, *parts: int, patience: float = 1.0) -> None:
        self.floors = Floors(horizon=Horizon(patience=patience))
        self.floors.take(parts or (0,))
        self.clock = 0.0

    def look(
        self,
        rows: Sequence[Event] = (),
        *,
        last: int,
        writers: Collection[str] = (),
        trouble: Sequence[Trouble] = (),
        mine: Sequence[int] | None = None,
        n: int = 100,
        step: float = 0.1,
    ) -> Batch:
        """Take in one look."""
        self.clock += step
        asked = dict(self.floors.parts)
        seen = Look(
            mine=list(asked) if mine is None else mine,
            trouble=trouble,
            rows=rows,
            last=last,
            at=NOW,
            writers=writers,
        )
        return self.floors.absorb(seen, asked=asked, n=n, now=self.clock)

    def floor(self, part: int = 0) -> int:
        """Return the floor of a partition."""
        return self.floors.parts[part]


def waits(id_: int, key: str = "a") -> Trouble:
    """Return an event whose aggregate waits."""
    return Trouble(part=0, key=key, id=id_, waits=True)


def due(id_: int, key: str = "a") -> Trouble:
    """Return an event that is due again."""
    return Trouble(part=0, key=key, id=id_, waits=False)


def proven(last: int) -> Reader:
    """Return a reader that has proven and published everything up to `last`."""
    reader = Reader()
    for _ in range(2):
        reader.look(last=last)
        reader.floors.settle(())
    assert reader.floor() == last
    return reader


def test_a_floor_rises_only_to_what_was_proven_before_the_read() -> None:
    reader = Reader()
    reader.look([row(1), row(2)], last=2)
    reader.floors.settle(())
    assert reader.floor() == 0
    reader.look(last=9)
    reader.floors.settle(())
    assert reader.floor() == 2


def test_a_floor_stays_below_the_first_event_that_was_not_confirmed() -> None:
    reader = proven(3)
    reader.look([row(4), row(5, key="b"), row(6)], last=6)
    reader.floors.settle([row(5, key="b")])
    batch = reader.look([row(5, key="b")], last=6)
    reader.floors.settle(batch.events)
    assert reader.floor() == 4


def test_a_full_read_raises_the_floor_only_to_its_last_event() -> None:
    reader = proven(3)
    reader.look(last=50)
    reader.floors.settle(())
    assert reader.look([row(4), row(5)], last=50, n=2).full
    reader.floors.settle(())
    assert reader.floor() == 5


def test_a_full_read_beyond_the_proof_raises_the_floor_only_to_the_proof() -> None:
    reader = proven(3)
    reader.look([row(4), row(9)], last=9, writers=("w",), n=2)
    reader.floors.settle(())
    assert reader.floor() == 3


def test_an_open_writer_keeps_the_floor_down() -> None:
    reader = proven(3)
    for _ in range(3):
        reader.look(last=9, writers=("w",))
        reader.floors.settle(())
    assert reader.floor() == 3


def test_when_a_guard_ends_the_floor_goes_back_and_the_rows_of_that_cycle_do_not_count() -> None:
    reader = proven(3)
    reader.look([row(5)], last=5, writers=("long",))
    reader.floors.settle(())
    reader.look(last=6, writers=("long",), step=2)
    reader.floors.settle(())
    reader.look(last=7, writers=("long",))
    reader.floors.settle(())
    assert reader.floor() == 6
    batch = reader.look([row(8)], last=8)
    assert (batch.events, batch.moved) == ([], True)
    assert reader.floor() == 3
    assert [e.id for e in reader.look([row(4), row(8)], last=8).events] == [4, 8]


def test_an_aggregate_that_stops_waiting_brings_the_floor_back_to_its_head() -> None:
    reader = proven(3)
    reader.look([row(4)], last=4)
    reader.floors.settle([row(4)])
    for _ in range(3):
        reader.look(last=9, trouble=[waits(4)])
        reader.floors.settle(())
    assert reader.floor() == 9
    batch = reader.look([row(10)], last=10)
    assert (batch.events, batch.moved) == ([], True)
    assert reader.floor() == 3


def test_an_event_due_again_below_the_floor_brings_the_floor_back_once() -> None:
    reader = proven(9)
    batch = reader.look([row(10)], last=10, trouble=[due(4)])
    assert (batch.events, batch.moved) == ([], True)
    assert reader.floor() == 3
    batch = reader.look([row(4), row(10)], last=10, trouble=[due(4)])
    assert [e.id for e in batch.events] == [4, 10]
    assert not batch.moved


def test_an_event_written_late_into_a_waiting_aggregate_is_found_when_it_goes_on() -> None:
    """Its writer was a guard: the floor had passed it, went back, and passed it again while the aggregate waited."""
    reader = proven(3)
    reader.look(last=8, writers=("long",), trouble=[waits(7)])
    reader.floors.settle(())
    reader.look(last=8, writers=("long",), trouble=[waits(7)], step=2)
    reader.floors.settle(())
    for _ in range(2):
        reader.look(last=9, writers=("long",), trouble=[waits(7)])
        reader.floors.settle(())
    assert reader.floor() == 9
    reader.look(last=9, trouble=[waits(7)])
    for _ in range(2):
        reader.look(last=9, trouble=[waits(7)])
        reader.floors.settle(())
    assert reader.floor() == 9
    reader.look(last=9)
    assert reader.floor() <= 3


def test_a_lost_partition_is_forgotten_with_its_rows() -> None:
    reader = Reader(0, 1)
    batch = reader.look([row(1), row(2, part=1, key="b")], last=2, mine=[0])
    assert [e.id for e in batch.events] == [1]
    assert batch.lost == {1}
    reader.floors.settle(batch.events)
    assert list(reader.floors.parts) == [0]


def test_a_partition_found_in_the_table_is_read_from_the_start_next_time() -> None:
    reader = proven(5)
    reader.look(last=6, mine=[0, 7])
    assert reader.floor(7) == 0


def test_a_sequence_that_went_back_starts_every_proof_anew() -> None:
    reader = proven(100)
    batch = reader.look([row(200)], last=40)
    assert (batch.events, batch.moved) == ([], True)
    assert reader.floor() == 0


def test_the_look_from_zero_keeps_what_is_proven() -> None:
    reader = proven(100)
    reader.floors.look_from_zero()
    assert reader.floor() == 0
    reader.look(last=100)
    reader.floors.settle(())
    assert reader.floor() == 100
