"""The routing table: each event type has one place, the most specific pattern names it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pgqueue.errors import BadOption
from relay.event import CONFIRMED, Event, Receipt, Unavailable
from relay.routes import REMEMBERED, Routes, routes
from relay.sinks.memory import MemorySink
from relay.targets import Targets
from tests.unit.test_relay_event import event

LATER = float("inf")

TABLE = {
    "order.placed": "exact",
    "order.*": "prefix",
    "order.line.*": "longer",
    "*": "default",
    "ord*": "shorter",
}


@pytest.mark.parametrize(
    ("event_type", "goes_to"),
    [
        ("order.placed", "exact"),
        ("order.placed.late", "prefix"),
        ("order.", "prefix"),
        ("order.line.added", "longer"),
        ("order", "shorter"),
        ("Order.placed", "default"),
        ("customer.added", "default"),
        ("*", "default"),
    ],
)
def test_the_exact_type_wins_then_the_longest_prefix_then_the_default(event_type: str, goes_to: str) -> None:
    table = Routes(TABLE)
    assert [table.of(event_type) for _ in range(2)] == [goes_to] * 2


def test_a_table_remembers_no_more_than_a_bounded_number_of_types() -> None:
    table = Routes(TABLE)
    assert all(table.of(f"order.{n}") == "prefix" for n in range(REMEMBERED + 10))
    assert len(table._known) <= REMEMBERED


def test_lines_a_file_and_the_default_make_one_table(tmp_path: Path) -> None:
    file = tmp_path / "routes.toml"
    file.write_text('[routes]\n"order.*" = "kafka://k/orders?a=b"\nmail = "queue:"\n')
    made = routes("stdout:", ["order.paid = https://bank/?a=b"], file)
    assert made.table == {
        "*": "stdout:",
        "order.paid": "https://bank/?a=b",
        "order.*": "kafka://k/orders?a=b",
        "mail": "queue:",
    }


@pytest.mark.parametrize(
    ("sink", "lines", "text", "said"),
    [
        (None, ["a=stdout:"], None, "no default"),
        ("stdout:", ["*=queue:"], None, "given twice"),
        ("stdout:", ["a=queue:", "a=stdout:"], None, "given twice"),
        ("stdout:", ["a=queue:"], '[routes]\na = "stdout:"', "given twice"),
        ("stdout:", ["a"], None, "PATTERN=URL"),
        ("stdout:", ["a="], None, "PATTERN=URL"),
        ("stdout:", ["=queue:"], None, "no event type"),
        ("stdout:", ["a*b=queue:"], None, "asterisk"),
        ("stdout:", ["a.**=queue:"], None, "asterisk"),
        ("stdout:", [], "[routes]\norder.placed = 'queue:'", "quotes"),
        ("stdout:", [], "[other]\n", r"\[routes\]"),
        ("stdout:", [], "nonsense", "cannot read"),
    ],
)
def test_a_table_that_says_two_things_or_none_is_refused(
    tmp_path: Path, sink: str | None, lines: list[str], text: str | None, said: str
) -> None:
    file = None
    if text is not None:
        file = tmp_path / "routes.toml"
        file.write_text(text)
    with pytest.raises(BadOption, match=said):
        routes(sink, lines, file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="nowhere"):
        routes("stdout:", [], tmp_path / "nowhere.toml")


class Shared(MemorySink):
    """A sink that notes what it accepts in a list that several share."""

    def __init__(self, name: str, log: list[tuple[str, int]], *, ordered: bool = False) -> None:
        super().__init__(ordered=ordered)
        self.name = name
        self.log = log

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Note the ids that were accepted."""
        receipts = super().publish(events)
        self.log += [(self.name, e.id) for e, r in zip(events, receipts, strict=True) if r is CONFIRMED]
        return receipts


@pytest.fixture(params=["unordered", "ordered", "mixed"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Targets, Shared, Shared, list[tuple[str, int]]]]:
    """Give two sinks, of each kind, behind one table."""
    log: list[tuple[str, int]] = []
    a = Shared("a", log, ordered=request.param != "unordered")
    b = Shared("b", log, ordered=request.param == "ordered")
    targets = Targets(Routes({"a": a, "*": b}))
    yield targets, a, b, log
    assert targets._pool is not None
    targets._pool.shutdown()


def events(*where: tuple[str, str]) -> list[Event]:
    """Return one event per (aggregate, type), with rising ids."""
    return [event(id=i, key=key, aggregate_id=key, event_type=kind) for i, (key, kind) in enumerate(where, 1)]


Pair = tuple[Targets, Shared, Shared, list[tuple[str, int]]]


def test_each_event_goes_to_the_sink_of_its_type_and_an_aggregate_keeps_its_order_across_sinks(
    pair: Pair,
) -> None:
    targets, a, b, log = pair
    made = events(*[(f"k{n % 3}", "ab"[n // 3 % 2]) for n in range(60)])
    outcome = targets.send(made, deadline=LATER)
    assert not any(sent.unconfirmed for sent in outcome.values())
    assert {e.event_type for e in a.accepted} == {"a"}
    assert {e.event_type for e in b.accepted} == {"b"}
    for key in ("k0", "k1", "k2"):
        ids = [id_ for _, id_ in log if made[id_ - 1].key == key]
        assert ids == sorted(ids)
        assert len(ids) == 20


@pytest.mark.parametrize("answer", ["reject", "mute"])
def test_the_first_answer_that_is_not_yes_stops_the_aggregate_whichever_sink_gave_it(
    pair: Pair, answer: str
) -> None:
    targets, a, _, log = pair
    setattr(a, answer, lambda e: "no" if e.id == 3 else None)
    made = events(("x", "a"), ("x", "b"), ("x", "a"), ("x", "b"), ("y", "b"), ("x", "a"), ("y", "a"))
    outcome = targets.send(made, deadline=LATER)
    assert sorted(id_ for _, id_ in log) == [1, 2, 5, 7]
    left = {target.sink.name: sorted(e.id for e in sent.unconfirmed) for target, sent in outcome.items()}
    assert left == {"a": [3, 6], "b": [4]}
    of_a = outcome[targets.of(made[0])]
    assert (of_a.rejected, of_a.unanswered) == (
        ({3: "no"}, {}) if answer == "reject" else ({}, {3: Unavailable("no")})
    )


def test_a_sink_that_is_away_holds_its_own_aggregates_and_no_other(pair: Pair) -> None:
    targets, a, _, log = pair
    a.away.set()
    made = events(("x", "b"), ("x", "a"), ("x", "b"), ("y", "b"), ("y", "b"), ("z", "a"))
    outcome = targets.send(made, deadline=LATER)
    assert sorted(id_ for _, id_ in log) == [1, 4, 5]
    target = targets.of(made[1])
    assert outcome[target].down == "away"
    target.down("away", 100.0)
    calls = a.calls
    targets.send(made[1:], deadline=LATER)
    assert a.calls == calls, "a sink that is quiet is not asked"


def test_nothing_is_sent_after_the_deadline(pair: Pair) -> None:
    targets, a, b, _ = pair
    outcome = targets.send(events(("x", "a"), ("y", "b")), deadline=0)
    assert a.calls == b.calls == 0
    assert sorted(e.id for sent in outcome.values() for e in sent.unconfirmed) == [1, 2]


def test_a_sink_that_breaks_harms_no_other(pair: Pair) -> None:
    targets, a, _, log = pair

    def broken(_: Event) -> str | None:
        raise TypeError("cannot encode")

    a.reject = broken
    targets.send(events(("x", "a"), ("y", "b"), ("x", "b")), deadline=LATER)
    assert log == [("b", 2)]


def test_a_sink_that_several_patterns_name_is_there_once() -> None:
    sink = MemorySink()
    assert len(Targets(Routes({"a": sink, "*": sink})).all) == 1
