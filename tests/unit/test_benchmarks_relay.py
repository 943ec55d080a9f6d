"""The relay's part of the benchmarks: what a run checks is seen by these tests to be able to fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from xml.etree import ElementTree as ET

import psycopg
import pytest

from benchmarks import bench, report
from benchmarks.figures import Absent, Figure, Outcome
from benchmarks.install import ROOT
from benchmarks.relay import outbox, peers
from benchmarks.relay.ends import ENDS, Null, end_named, timed
from benchmarks.relay.outbox import Arrived
from benchmarks.relay.sinks import STAMP, announced
from benchmarks.system import RELAY_PEERS, Python, system_named
from benchmarks.work import RunFailed
from benchmarks.workloads import all_workloads
from relay.sinks import SinkContext, open_sink
from tests.sinks.events import Made

Rows = list[tuple[int, str, int, bool, str | None]]


class Database:
    """Stands for a connection to an outbox with these rows."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def execute(self, _query: str) -> Rows:
        return self.rows


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Give the rows of an outbox: four events of two aggregates, all published."""
    given: Rows = [(id_, "ab"[id_ % 2], id_, False, None) for id_ in (1, 2, 3, 4)]
    monkeypatch.setattr(psycopg, "connect", lambda _dsn: Database(given))
    return given


def arrived(*ids: int) -> list[Arrived]:
    return [Arrived(id_) for id_ in ids]


def test_a_run_counts_when_every_event_arrived_in_order(rows: Rows) -> None:
    assert outbox.verify("", [Arrived(id_, aggregate, number) for id_, aggregate, number, _, _ in rows]) == 0
    assert outbox.verify("", arrived(2, 4, 1, 3)) == 0


def test_repetitions_are_counted_and_are_no_inversion(rows: Rows) -> None:
    assert len(rows) == 4
    assert outbox.verify("", arrived(1, 3, 1, 2, 4, 4)) == 2


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (arrived(1, 2, 3), "1 of 4 events are marked as published and never arrived"),
        (arrived(1, 4, 3, 2), "event 2 of a arrived after event 4"),
        (arrived(1, 2, 3, 4, 5), "event 5 arrived, which the outbox does not have"),
        ([Arrived(1, "a")], "event 1 of b arrived as"),
        ([Arrived(1, "b", 2)], "event 1 of b arrived as"),
    ],
)
def test_a_run_does_not_count_when_the_broker_has_something_else(
    rows: Rows, seen: Sequence[Arrived], message: str
) -> None:
    assert len(rows) == 4
    with pytest.raises(RunFailed, match=message):
        outbox.verify("", seen)


@pytest.mark.parametrize("row", [(5, "a", 5, True, None), (5, "a", 5, False, "rejected")])
def test_a_run_does_not_count_when_the_outbox_does_not_agree(
    rows: Rows, row: tuple[int, str, int, bool, str | None]
) -> None:
    rows.append(row)
    with pytest.raises(RunFailed, match="1 of 5 events are not published"):
        outbox.verify("", arrived(1, 2, 3, 4, 5))


def test_rates_are_those_of_the_marks() -> None:
    steady = [1_000 + number / 500 for number in range(1_000)]
    assert outbox.rate(steady) == pytest.approx(500, rel=0.01)
    assert outbox.last_tenth_by_first(steady) == pytest.approx(1, rel=0.02)
    slower = [*steady[:900], *(steady[899] + (number + 1) / 250 for number in range(100))]
    assert outbox.last_tenth_by_first(slower) == pytest.approx(0.5, rel=0.02)


def test_a_peers_event_is_as_large_as_ours() -> None:
    for number in (0, 9, 10, 12_345):
        assert len(json.dumps(peers.event(number))) == peers.EVENT_BYTES


def test_the_programs_of_peers_need_nothing_of_ours_but_the_standard_library() -> None:
    script = (
        "import sys\n"
        f"for name in {RELAY_PEERS!r}: __import__(f'benchmarks.systems.{{name}}')\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('pgqueue', 'relay', 'psycopg', 'msgspec')])"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("name", RELAY_PEERS)
def test_a_peer_has_its_settings_its_broker_and_its_order_written_down(name: str) -> None:
    system = system_named(name)
    assert system.modes == {"relay"}
    assert {"worker", "broker", "order"} <= set(system.settings)
    assert isinstance(system.install, Python)
    assert f'"{system.install.packages[0].partition("[")[0]}' not in (ROOT / "pyproject.toml").read_text()


def test_the_command_finds_the_sinks_of_the_benchmark_as_it_finds_a_strangers(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom relay.sinks import SinkContext, open_sink\n"
        "for url in sys.argv[1:]: print(open_sink(url, SinkContext(source='/s')).name)\n"
    )
    end = Null(tmp_path, "")
    end.start()
    ran = subprocess.run(
        [sys.executable, "-c", script, end.url, timed(end)[0]],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{announced(tmp_path / 'plugins')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == ["null:", "null:"], ran.stderr


def test_sinks_of_the_benchmark_note_what_they_confirm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(announced(tmp_path / "plugins"))
    end = Null(tmp_path, "")
    end.start()
    url, record = timed(end)
    sink = open_sink(url, SinkContext(source="/s"))
    made = Made()
    sink.publish([made.event(), made.event()])
    assert [event.id for event in end.arrived()] == [1, 2]
    stamps = list(STAMP.iter_unpack(record.read_bytes()))
    assert [id_ for id_, _ in stamps] == [1, 2]
    assert stamps[0][1] == stamps[1][1] > 1_700_000_000


def test_every_part_of_a_workload_has_its_figures_and_its_end() -> None:
    for workload in all_workloads().values():
        for part in workload.parts:
            assert any(f"{q.what}.".startswith(f"{workload.name}.{part}.") for q in workload.quantities)
    for name in ENDS:
        assert end_named(name).title
        assert end_named(name).settings


def outcome(what: str, parts: Sequence[str], *, absent: Sequence[Absent] = ()) -> Outcome:
    figures = [
        Figure(what=f"{what}.{p}", system="ours", unit="events/s", values=[10_000.0], jobs=1, part=p)
        for p in parts
    ]
    return Outcome(
        what=what, figures=figures, absent=list(absent), command="python -m benchmarks", server="18", machine="m",
        versions={"ours": ["pgqueue-relay 1"]}, seconds=1.0, notes=["Kafka 4.1.0: one node"],
    )  # fmt: skip


def test_all_brokers_stand_in_one_table_and_one_plot(tmp_path: Path) -> None:
    gone = Absent(what="relay", system="ours", part="rabbitmq", reason="failed: no rabbitmq-server")
    report.write(tmp_path, [outcome("relay", ["null", "kafka", "nats"], absent=[gone])])
    text = (tmp_path / "README.md").read_text()
    for title in ("no broker", "Kafka", "NATS"):
        assert f"| {title} | 10,000 | 10,000 to 10,000 | 1 | 1 |" in text
    assert "- rabbitmq is left out: failed: no rabbitmq-server" in text
    assert "- Kafka 4.1.0: one node" in text
    assert text.count("(relay.svg)") == 1
    plot = ET.parse(tmp_path / "relay.svg").getroot()  # noqa: S314 - our own file
    assert "Kafka" in [element.text for element in plot]


def test_a_part_that_fails_leaves_the_others_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def measure(case: bench.Case, n: int) -> dict[str, float]:
        calls.append(case.part)
        if case.part == "kafka":
            raise RunFailed("gone")
        return {f"relay.{case.part}": float(n)}

    run = bench.Bench.__new__(bench.Bench)
    run.say, run.missing, run.notes, run._only = print, {}, {}, ()
    run.systems = {"ours": (system_named("ours"), None)}  # type: ignore[dict-item]

    class Given:
        def __init__(self, part: str) -> None:
            self.part = part

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing was made."""

    monkeypatch.setattr(run, "case", lambda _name, part="": Given(part))
    workload = all_workloads()["relay"]
    few = bench.Workload(
        name="relay", text="", quantities=workload.quantities, n=100, measure=measure,
        parts={"kafka": 50, "nats": 50, "null": 1_000},
    )  # fmt: skip
    figures, absent = run.run(few, n=None, runs=2)
    assert {f.what: (f.values, f.jobs) for f in figures} == {
        "relay.null": ([100.0, 100.0], 100), "relay.nats": ([50.0, 50.0], 50),
    }  # fmt: skip
    assert [(a.part, a.reason) for a in absent] == [("kafka", "failed: gone")]
    assert calls == ["kafka", "nats", "null", "nats", "null"]
    run._only = ("null",)
    assert [f.what for f in run.run(few, n=None, runs=1)[0]] == ["relay.null"]
