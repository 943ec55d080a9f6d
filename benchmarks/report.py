"""Write the results: results.json (every run), README.md (the tables) and one plot a compared quantity."""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.bench import Quantity, Workload
from benchmarks.figures import Figure, Outcome, find, sentence
from benchmarks.goals import GOALS, judge
from benchmarks.plot import bars, number
from benchmarks.server import SETTINGS
from benchmarks.system import OURS, PEERS, RELAY_PEERS, System, system_named
from benchmarks.workloads import all_workloads

RESULTS = "results.json"

ABOUT = """# Benchmarks

Written by `python -m benchmarks`; do not edit. `make bench` makes all of it anew on your machine, the only one whose
figures matter to you: {minutes} on two cores. `python -m benchmarks drain latency --peers graphile,pgqueuer`
runs a part, `--peers ''` ours alone.

One embedded PostgreSQL serves all systems, one after the other in every round and each round in another order; every
measurement has a fresh database, brought to rest (VACUUM ANALYZE, CHECKPOINT) before the clock starts. A run counts
only if every job ran and the database agrees that none is left. All systems use the same Unix socket, the same payload
(about 150 bytes of JSON) and a handler that does nothing but note its job's number. Figures are medians of the runs.
On a shared machine differences below 20 % say little. Sections may have been measured on different machines, named
below each, of which one may be four times as fast as the other: compare within a section.

The workloads `relay` to `relay_peers` measure the relay: the command that users run, with its defaults, and brokers
as plain processes, each started with an empty folder for one measurement (`--parts kafka,nats` picks some). A run
counts only if every event was read back from the broker, as it was written and in the order of its aggregate, and the
outbox agrees. `python -m benchmarks relay relay2 relay_latency relay_snapshot relay_peers` makes them in ten minutes.
"""


@functools.cache
def machine() -> str:
    """Describe the machine in a line, and how fast it is: of two with one name one may be four times the other."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.partition(":")[2].strip()
            for line in cpuinfo.read_text().splitlines()
            if "model name" in line
        ]
        processor = names[0] if names else processor
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    squares = _best(lambda: sum(n * n for n in range(1_000_000)))
    fill = _best(lambda: bytearray(256 << 20))
    return (
        f"{os.cpu_count()} x {processor}, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"{squares:.0f} ms for a million squares in Python, {fill:.0f} ms to fill 256 MiB"
    )


def _name(machine: str) -> str:
    """Return what a machine is, without how fast it was."""
    return ", ".join(machine.split(", ")[:3])


def _best(work: Callable[[], object]) -> float:
    """Return the shortest of five times, in ms."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times) * 1000


def merged(folder: Path, fresh: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes of earlier runs in `folder`, the fresh ones in their place, in the order of workloads."""
    path = folder / RESULTS
    found = msgspec.json.decode(path.read_bytes(), type=list[Outcome]) if path.exists() else []
    by_name = {outcome.what: outcome for outcome in [*found, *fresh]}
    return [by_name[name] for name in all_workloads() if name in by_name]


def write(folder: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the results, the report and the plots into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).write_bytes(msgspec.json.format(msgspec.json.encode(list(outcomes)), indent=1) + b"\n")
    titles = {name: system.title for name, system in _systems().items()}
    for plot in folder.glob("*.svg"):
        plot.unlink()
    for _, quantity, figures in _compared(outcomes):
        (folder / f"{quantity.what}.svg").write_text(bars(quantity.title, figures, titles))
    for workload, figures in _charted(outcomes):
        names = {quantity.what: quantity.title for quantity in workload.quantities}
        (folder / f"{workload.name}.svg").write_text(bars(workload.chart, figures, names))
    (folder / "README.md").write_text(report(outcomes))


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the goals and the figures, for the terminal."""
    return "\n".join([*_goals(outcomes), "", *_figures(outcomes, plots=False), *_better(outcomes)])


def report(outcomes: Sequence[Outcome]) -> str:
    """Return README.md."""
    goals = ["## Goals", "", *_goals(outcomes), ""]
    figures = ["## Figures", "", *_figures(outcomes, plots=True)]
    minutes = round(sum(outcome.seconds for outcome in outcomes) / 60)
    about = ABOUT.replace("{minutes}", f"{minutes} minutes" if minutes != 1 else "a minute")
    lines = [about, *goals, *figures, *_better(outcomes), *_less(outcomes), *_settings(outcomes)]
    return "\n".join(lines).rstrip() + "\n"


def _systems() -> dict[str, System]:
    return {name: system_named(name) for name in (*OURS, *PEERS, *RELAY_PEERS)}


def _compared(outcomes: Sequence[Outcome]) -> list[tuple[Workload, Quantity, list[Figure]]]:
    """Return the quantities that more than one system has."""
    workloads = all_workloads()
    found = []
    for outcome in outcomes:
        for quantity in workloads[outcome.what].quantities:
            figures = [figure for figure in outcome.figures if figure.what == quantity.what]
            if len(figures) > 1:
                found.append((workloads[outcome.what], quantity, figures))
    return found


def _charted(outcomes: Sequence[Outcome]) -> list[tuple[Workload, list[Figure]]]:
    """Return the workloads whose quantities stand in one plot."""
    workloads = all_workloads()
    return [(workloads[o.what], o.figures) for o in outcomes if workloads[o.what].chart and o.figures]


def _goals(outcomes: Sequence[Outcome]) -> list[str]:
    figures = [figure for outcome in outcomes for figure in outcome.figures]
    lines = ["| goal | is to be | measured | met |", "|---|---|---|---|"]
    machines = {figure.what: _name(outcome.machine) for outcome in outcomes for figure in outcome.figures}
    verdicts = {verdict.goal: verdict for verdict in judge(figures, machines)}
    for goal in GOALS:
        if (v := verdicts.get(goal)) is None:
            lines.append(f"| {goal.text} | {goal.bound} | not run | |")
            continue
        against = f" ({v.against})" if len(goal.than) > 1 else ""
        spread = f"{number(v.value)} [{number(v.low)} to {number(v.high)}]"
        lines.append(f"| {goal.text}{against} | {goal.bound} | {spread} | {v.text} |")
    return lines


def _figures(outcomes: Sequence[Outcome], *, plots: bool) -> list[str]:
    workloads, systems = all_workloads(), _systems()
    lines: list[str] = []
    for outcome in outcomes:
        workload = workloads[outcome.what]
        lines += [f"### {workload.name}", "", workload.text, ""]
        if workload.chart and outcome.figures:
            lines += _chart(workload, outcome.figures, plots=plots)
        else:
            for quantity in workload.quantities:
                figures = [figure for figure in outcome.figures if figure.what == quantity.what]
                if figures:
                    lines += _table(workload, quantity, figures, plots=plots)
        for absent in outcome.absent:
            who = absent.part or systems[absent.system].title
            lines.append(f"- {who} is left out: {sentence(absent.reason)}")
        lines += [f"- {note}" for note in outcome.notes]
        if outcome.notes:
            lines.append("")
        lines += [
            f"`{outcome.command}`, {outcome.seconds:.0f} s, PostgreSQL {outcome.server}, {outcome.machine}",
            "",
        ]
    return lines


def _table(workload: Workload, quantity: Quantity, figures: list[Figure], *, plots: bool) -> list[str]:
    """Return the table of a quantity: a row for each system, the best first."""
    systems = _systems()
    figures.sort(key=lambda f: f.median, reverse=quantity.more_is_better)
    own = find(figures, quantity.what, "ours")
    lines = [
        f"| {quantity.title} | {quantity.unit} | lowest to highest | runs | {workload.things} | ours by it |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for f in figures:
        by = f"{own.median / f.median:.2f}" if own is not None and f is not own and f.median else ""
        name = f"**{systems[f.system].title}**" if f is own else systems[f.system].title
        lines.append(f"| {name} | {_spread(f)} | {by} |")
    lines.append("")
    if plots and len(figures) > 1:
        lines += [f"![{quantity.title}]({quantity.what}.svg)", ""]
    return lines


def _chart(workload: Workload, figures: Sequence[Figure], *, plots: bool) -> list[str]:
    """Return the one table of a workload: a row for each quantity, in their order."""
    names = {quantity.what: quantity.title for quantity in workload.quantities}
    lines = [
        f"| {workload.chart} | {figures[0].unit} | lowest to highest | runs | {workload.things} |",
        "|---|---:|---:|---:|---:|",
        *(f"| {names[f.what]} | {_spread(f)} |" for f in figures),
        "",
    ]
    return [*lines, f"![{workload.chart}]({workload.name}.svg)", ""] if plots else lines


def _spread(f: Figure) -> str:
    return f"{number(f.median)} | {number(f.low)} to {number(f.high)} | {len(f.values)} | {f.jobs:,}"


def _better(outcomes: Sequence[Outcome]) -> list[str]:
    """Say plainly where a peer is better."""
    systems = _systems()
    lines = ["## Where a peer is better", ""]
    if not _compared(outcomes):
        return []
    for _, quantity, figures in _compared(outcomes):
        own = find(figures, quantity.what, "ours")
        if own is None:
            continue
        ahead = [
            f for f in figures
            if f.system not in OURS and (f.median > own.median if quantity.more_is_better else f.median < own.median)
        ]  # fmt: skip
        lines += [
            f"- {quantity.title}: {systems[f.system].title} has {number(f.median)} {f.unit}, ours {number(own.median)}."
            for f in sorted(ahead, key=lambda f: f.median, reverse=quantity.more_is_better)
        ]
    if len(lines) == 2:
        lines.append("Nowhere in these figures.")
    return [*lines, ""]


def _less(outcomes: Sequence[Outcome]) -> list[str]:
    """Say plainly which systems do less with two processes than with one, and why."""
    figures = [figure for outcome in outcomes for figure in outcome.figures]
    machines = {outcome.what: _name(outcome.machine) for outcome in outcomes}
    if "drain2" not in machines or machines["drain2"] != machines.get("drain"):
        return []
    systems, lines = _systems(), []
    for two in figures:
        one = find(figures, "drain", two.system) if two.what == "drain2" else None
        if one is not None and two.median < one.median:
            lines.append(
                f"- {systems[two.system].title}: {number(two.median)} {two.unit} with two processes, "
                f"{number(one.median)} with one ({two.median / one.median:.2f})."
            )
    head = ["## Where two processes bring less than one", ""]
    if not lines:
        return [*head, "Nowhere in these figures.", ""]
    why = (
        f"Measured on {machines['drain2'].partition(' ')[0]} cores. Where a worker and its server process keep "
        "two cores busy (ours does: it sends a round before the last is answered), a second worker brings no core: "
        "the same two switch between four processes, and its claims pass by the other's jobs. With cores to spare, "
        "measure again."
    )
    return [*head, *lines, "", why, ""]


def _settings(outcomes: Sequence[Outcome]) -> list[str]:
    versions = {name: found for outcome in outcomes for name, found in outcome.versions.items()}
    lines = [
        "## Settings",
        "",
        "Server: " + ", ".join(f"`{name}={value}`" for name, value in SETTINGS.items()) + ".",
        "",
    ]
    for name, system in _systems().items():
        lines += [f"**{system.title}** ({system.language}; {', '.join(versions.get(name, ['not run']))})", ""]
        lines += [f"- {what}: {how}" for what, how in system.settings.items()]
        if name not in OURS and system.most < 1_000_000:
            lines.append(f"- at most {system.most:,} jobs a run, for the sake of time")
        lines.append("")
    return lines
