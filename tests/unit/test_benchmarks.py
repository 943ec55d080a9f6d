from __future__ import annotations

import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from xml.etree import ElementTree as ET

import msgspec
import pytest

import benchmarks
from benchmarks import install, plan, report
from benchmarks.figures import Absent, Figure, Outcome, quantile, ratios, sentence
from benchmarks.goals import GOALS, judge
from benchmarks.prototypes import rotation
from benchmarks.system import OURS, PEERS, SYSTEMS, Go, Node, Python, system_named
from benchmarks.systems.limit import BATCH, behind
from benchmarks.systems.ours import HOT, hot_key
from benchmarks.work import Worker, Workers
from benchmarks.workloads import all_workloads

ROOT = install.ROOT
MODULES = [
    m.name for m in walk_packages(benchmarks.__path__, "benchmarks.") if m.name != "benchmarks.__main__"
]
ALL = (*OURS, *PEERS)


def figure(what: str, system: str, *values: float, more_is_better: bool = True) -> Figure:
    return Figure(
        what=what, system=system, unit="jobs/s", values=list(values), more_is_better=more_is_better, jobs=1
    )


def outcome(what: str, *figures: Figure, absent: tuple[Absent, ...] = ()) -> Outcome:
    return Outcome(
        what=what, figures=list(figures), absent=list(absent), command="python -m benchmarks", server="18", machine="m",
        versions={"ours": ["pgqueue-relay 1"]}, seconds=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports_without_a_peer_installed(module: str) -> None:
    assert import_module(module).__doc__


def test_a_peers_program_needs_nothing_of_ours_but_the_standard_library() -> None:
    peers = [name for name in PEERS if isinstance(system_named(name).install, Python)]
    script = (
        "import sys\n"
        f"for name in {peers!r}: __import__(f'benchmarks.systems.{{name}}')\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('pgqueue', 'relay', 'psycopg', 'msgspec')])"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ALL)
def test_every_system_has_its_settings_written_down(name: str) -> None:
    system = system_named(name)
    assert system.name == name
    assert system.settings
    assert all(what.strip() and how.strip() for what, how in system.settings.items())
    if name in PEERS:
        assert {"drain", "bulk"} <= system.modes
        assert "bulk" in system.settings
    if "io" in system.modes:
        assert "I/O" in system.settings


@pytest.mark.parametrize("name", PEERS)
def test_no_peer_is_a_dependency_of_ours(name: str) -> None:
    wanted = system_named(name).install
    project = (ROOT / "pyproject.toml").read_text()
    if isinstance(wanted, Python):
        assert wanted.packages
        assert f'"{wanted.packages[0].partition("[")[0]}' not in project
    else:
        assert isinstance(wanted, Node | Go)
        assert (SYSTEMS / wanted.script).is_file()


def test_the_folder_of_installed_peers_is_ignored_by_git() -> None:
    assert "benchmarks/.cache/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("workload", all_workloads().values(), ids=lambda w: w.name)
def test_every_workload_says_what_it_measures(workload: object) -> None:
    assert workload.text  # type: ignore[attr-defined]
    assert workload.quantities  # type: ignore[attr-defined]
    for quantity in workload.quantities:  # type: ignore[attr-defined]
        assert quantity.what.split(".")[0] == workload.name  # type: ignore[attr-defined]


def test_every_goal_names_a_quantity_that_is_measured_on_systems_that_have_it() -> None:
    measured = {q.what: w for w in all_workloads().values() for q in w.quantities}
    for goal in GOALS:
        assert goal.what in measured
        assert (goal.at_least is None) != (goal.at_most is None)
        for what in goal.by:
            mode = measured[what].mode
            assert mode is None or any(mode in system_named(name).modes for name in goal.than)


def test_a_ratio_compares_runs_of_the_same_round() -> None:
    assert ratios(figure("drain", "ours", 10, 100), figure("drain", "graphile", 5, 50)) == [2, 2]
    assert quantile(range(100), 0.99) == 99


def test_the_buffers_of_a_plan_are_those_of_all_its_ctes_each_once() -> None:
    """An UPDATE that nothing reads from runs after the top node has ended."""

    def node(kind: str, touched: int, *below: dict[str, object], cte: str = "") -> dict[str, object]:
        name = {"Subplan Name": f"CTE {cte}"} if cte else {}
        return {
            "Node Type": kind, "Shared Hit Blocks": touched, "Shared Read Blocks": 1, "Plans": list(below), **name
        }  # fmt: skip

    found = node("Index Scan", 9, cte="found")
    written = node("ModifyTable", 49, node("CTE Scan", 9), cte="written")
    assert plan.buffers(node("CTE Scan", 9, found, written)) == 50


def test_a_goal_is_met_exactly_at_its_bound() -> None:
    figures = [
        figure("drain", "ours", 100, 100),
        figure("drain", "graphile", 50, 50),
        figure("wal", "ours", 751),
    ]
    verdicts = {v.goal.text: v.met for v in judge(figures)}
    assert verdicts == {"drain, one process, by graphile-worker": True, "WAL per job, B": False}


def test_what_was_measured_on_another_machine_is_not_compared() -> None:
    figures = [
        figure("drain", "graphile", 100),
        figure("drain2", "ours", 50),
        figure("drain2", "graphile", 25),
    ]
    (here,) = judge(figures, {"drain": "fast", "drain2": "slow"})
    assert (here.value, here.met) == (2, True)
    (mixed,) = judge(figures)
    assert mixed.value == 0.5


def test_the_report_says_plainly_where_a_peer_is_better_and_who_is_left_out(tmp_path: Path) -> None:
    gone = Absent(what="drain", system="river", reason="not installed: go is not here")
    drain = outcome(
        "drain", figure("drain", "ours", 90_000), figure("drain", "pgmq", 95_000), figure("drain", "oban", 6_000),
        absent=(gone,),
    )  # fmt: skip
    report.write(tmp_path, [drain])
    text = (tmp_path / "README.md").read_text()
    better = text.split("## Where a peer is better")[1].split("##")[0]
    assert "pgmq, bare loop has 95,000 jobs/s, ours 90,000" in better
    assert "oban" not in better
    assert "River is left out: not installed: go is not here" in text
    assert all(how in text for name in ALL for how in system_named(name).settings.values())
    assert ET.parse(tmp_path / "drain.svg").getroot().tag.endswith("svg")  # noqa: S314 - our own file


def test_a_later_run_replaces_the_workloads_it_ran_and_keeps_the_others(tmp_path: Path) -> None:
    report.write(
        tmp_path, [outcome("drain", figure("drain", "ours", 1)), outcome("wal", figure("wal", "ours", 2))]
    )
    fresh = report.merged(tmp_path, [outcome("drain", figure("drain", "ours", 3))])
    assert [(o.what, o.figures[0].values) for o in fresh] == [("drain", [3]), ("wal", [2])]


def test_figures_of_the_readme_are_those_of_the_results_file() -> None:
    folder = ROOT / "docs" / "benchmarks"
    assert (folder / "README.md").read_text() == report.report(report.merged(folder, []))


def test_marks_that_threads_print_out_of_order_are_counted_right() -> None:
    worker = Worker.__new__(Worker)
    worker.marks = [(done, done * 0.5) for done in (10, 1, 5, 100, 90, 95, 2, 12)]
    workers = Workers.__new__(Workers)
    workers.all = [worker]
    assert workers.count == 100
    assert workers.first_at == 0.5
    assert workers.tenths(100) == (2.0, 2.0)


@pytest.mark.parametrize(("name", "tool"), [("river", "go"), ("graphile", "npm")])
def test_a_peer_whose_tools_are_missing_is_reported_by_name(
    name: str, tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(install.NotInstallable, match=f"{tool} is not here"):
        install.install(system_named(name))


def test_a_newer_python_is_found_beside_a_shim_that_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim, installed = tmp_path / "shims" / "python3.19", tmp_path / "versions" / "3.19.2" / "bin" / "python"
    for path, text in ((shim, "#!/bin/sh\nexit 127\n"), (installed, "#!/bin/sh\nexit 0\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(shim.parent))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    assert install._interpreter((3, 19)) == str(installed)
    with pytest.raises(install.NotInstallable, match=r"3\.20 or newer, and none is here"):
        install._interpreter((3, 20))


def test_the_decision_about_partitions_shows_what_its_command_runs() -> None:
    (decision,) = (ROOT / "docs" / "adr").glob("0015-*")
    assert f"{rotation.JOBS:,} jobs" in decision.read_text()


def test_a_claim_of_the_limit_line_starts_behind_the_jobs_of_the_full_one_in_front() -> None:
    assert behind([0, 700], [0, 700]) == [0, 700 + BATCH]
    assert behind([0, 700], [0, 5_000]) == [0, 5_000]


def test_a_goal_that_a_run_missed_says_so() -> None:
    met, held, missed, lost = (
        judge([figure("wal", "ours", *values)])[0].text
        for values in ((700, 710, 720), (700, 710, 760), (700, 760, 770), (760, 770, 780))
    )
    assert (met, held) == ("yes", "yes by median; 1 of 3 runs missed it")
    assert (missed, lost) == ("**no**, by median; 1 of 3 runs met it", "**no**")
    assert f"| 710 [700 to 760] | {held} |" in report.report(
        [outcome("wal", figure("wal", "ours", 700, 710, 760))]
    )


def test_the_report_says_where_two_processes_bring_less_than_one() -> None:
    one = outcome("drain", figure("drain", "ours", 200), figure("drain", "pgmq", 100))
    two = outcome("drain2", figure("drain2", "ours", 180), figure("drain2", "pgmq", 120))
    less = report.report([one, two]).split("## Where two processes bring less than one")[1].split("##")[0]
    assert "pgqueue: 180 jobs/s with two processes, 200 with one (0.90)." in less
    assert "pgmq" not in less
    assert "two processes bring less" not in report.report([one])
    assert "Nowhere in these" in report.report([one, outcome("drain2", figure("drain2", "ours", 220))])


def test_an_error_is_one_sentence() -> None:
    assert sentence('failed: timeout\nCONTEXT:  SQL statement "\n WITH x') == "failed: timeout"
    assert (
        sentence("fill failed: Traceback (most recent call last):\n  File\nValueError: no")
        == "fill failed: ValueError: no"
    )
    assert sentence("word " * 100).endswith("word ..")
    assert len(sentence("word " * 100)) <= 200


def test_the_report_says_how_long_its_runs_took() -> None:
    long = msgspec.structs.replace(outcome("wal", figure("wal", "ours", 1)), seconds=2_640.0)
    assert "44 minutes on two cores" in " ".join(report.report([long]).split())


def test_awa_is_asked_by_its_tables_what_is_left() -> None:
    """Its view takes minutes for 30,000 finished jobs: a statement timeout would count as awa's failure."""
    asked = system_named("awa")
    assert "ready_entries" in asked.left
    assert "awa.jobs" not in asked.left + asked.count_left


def test_the_hot_key_has_two_of_five_jobs_and_the_others_have_as_many_each() -> None:
    found = Counter(hot_key(number, 10) for number in range(1_000))
    assert found.pop(HOT) == 400
    assert sorted(found.values()) == [60] * 10
