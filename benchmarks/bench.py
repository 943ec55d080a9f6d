"""The driver: runs a workload on every system in turn, round by round, so that all share the machine's moods."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import psycopg

from benchmarks import work
from benchmarks.figures import Absent, Figure, sentence
from benchmarks.install import Installed, NotInstallable, install
from benchmarks.server import Server, settle
from benchmarks.system import Mode, System, system_named

#: A run may take this long, and as much again as one job in 200 takes a second.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """Something a workload measures."""

    what: str
    unit: str
    title: str
    more_is_better: bool = True


def cost(what: str, unit: str, title: str) -> Quantity:
    """Return a quantity of which less is better."""
    return Quantity(what=what, unit=unit, title=title, more_is_better=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload: what it measures, on which systems, and one measurement.

    `measure` gets a fresh database with the system's schema and returns a value by quantity. `mode`: the systems
    that take part, None = ours alone.
    """

    name: str
    text: str
    quantities: Sequence[Quantity]
    n: int
    measure: Callable[[Case, int], Mapping[str, float]]
    mode: Mode | None = None
    #: The most that `--n` may ask for: a run is to end in minutes.
    most: int = 5_000_000
    #: The most rounds: a long run, or counters that do not vary, need no more.
    rounds: int = 100
    #: Measured one after the other in every round, each on a database of its own: name -> the most of it.
    parts: Mapping[str, int] = field(default_factory=dict)
    #: The title of one table and plot for all quantities of which ours alone has figures; else one for each quantity.
    chart: str = ""
    #: What `n` counts.
    things: str = "jobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement: a system, its program, and a database of its own."""

    server: Server
    system: System
    installed: Installed
    database: str
    folder: Path
    #: Which of the workload's parts is measured.
    part: str = ""
    #: What is to be said of the surroundings (a broker's version): by its name.
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def dsn(self) -> str:
        """The URL of the database."""
        return self.server.dsn(self.database)

    def fill(self, n: int, *, rest: bool = True, **settings: object) -> float:
        """Enqueue n jobs through the bulk interface; return the seconds; bring the database to rest after."""
        said = self._call("fill", n, patience=_patience(n), settings={"chunk": self.system.chunk, **settings})
        if rest:
            settle(self.dsn)
        return float(said.split()[-1])

    def produce(self, verb: str, *words: float, **settings: object) -> list[tuple[int, float, float]]:
        """Enqueue one by one; return (number, called, committed) of each."""
        import json

        out = self.folder / "produced"
        self._call(verb, *words, settings={"out": out, **settings})
        sent: list[tuple[int, float, float]] = [tuple(row) for row in json.loads(out.read_text())]
        return sent

    def workers(self, n: int, count: int = 1, **settings: object) -> work.Workers:
        """Start workers that will run n jobs."""
        environ = work.environment(self.installed, self.dsn, **settings, step=step(n)) | dict(
            self.system.environ
        )
        return work.Workers(self.installed, self.folder, environ, count)

    def drain(self, n: int, workers: work.Workers) -> float:
        """Wait until the workers have run n jobs and the database agrees; return the seconds from the first start.

        Ends the workers and checks that every job ran.
        """
        patience = _patience(n)
        workers.wait_for(max(1, n - step(n) * len(workers.all)), patience)
        ended = work.drained_at(self.dsn, self.system.left, patience)
        began = workers.first_at
        workers.end()
        numbers = [number for worker in workers.all for number in worker.numbers()]
        work.verify(self.dsn, self.system.count_left, iter(numbers), n)
        return ended - began

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        """Open a connection of the driver's own to the database."""
        return psycopg.connect(self.dsn, **options)

    def _call(self, verb: str, *words: float, patience: float = 180.0, settings: Mapping[str, object]) -> str:
        environ = work.environment(self.installed, self.dsn, **settings)
        return work.call(self.installed, environ | dict(self.system.environ), verb, *words, patience=patience)


class Bench:
    """A run of the benchmarks: the server, the installed systems, and what could not take part."""

    def __init__(
        self, server: Server, systems: Sequence[str], say: Callable[[str], None], parts: Sequence[str] = ()
    ) -> None:
        self.server = server
        self._only = parts
        self.say = say
        self.systems: dict[str, tuple[System, Installed]] = {}
        self.missing: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self._templates: dict[str, str] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="benchmarks-"))
        for name in systems:
            system = system_named(name)
            try:
                self.systems[name] = (system, install(system))
            except NotInstallable as error:
                self.missing[name] = f"not installed: {error}"
                say(f"{name}: {self.missing[name]}")

    def close(self) -> None:
        """Throw away what runs left."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, workload: Workload, *, n: int | None, runs: int) -> tuple[list[Figure], list[Absent]]:
        """Measure `runs` times, the systems in turn, each time beginning with another one."""
        runs = min(runs, workload.rounds)
        self.notes.clear()
        names = [
            name
            for name, (system, _) in self.systems.items()
            if (workload.mode in system.modes if workload.mode else name == "ours")
        ]
        absent = {
            (name, ""): reason
            for name, reason in self.missing.items()
            if workload.mode in system_named(name).modes
        }
        found: dict[tuple[str, str], Figure] = {}
        for turn in range(runs):
            turned = names[turn % len(names) :] + names[: turn % len(names)] if names else []
            for part, name in product(self._parts(workload), turned):
                if (name, part) in absent:
                    continue
                most = min(workload.parts.get(part, workload.most), self.systems[name][0].most)
                jobs = min(n or workload.n, most)
                where = " ".join(filter(None, (workload.name, part, name)))
                try:
                    with self.case(name, part) as case:
                        measured = workload.measure(case, jobs)
                except (work.RunFailed, psycopg.Error) as error:
                    absent[name, part] = f"failed: {sentence(str(error))}"
                    self.say(f"{where}: {absent[name, part]}")
                    continue
                for quantity in workload.quantities:
                    if quantity.what in measured:
                        measure = found.setdefault(
                            (quantity.what, name),
                            Figure(
                                what=quantity.what, system=name, unit=quantity.unit, values=[], jobs=jobs,
                                more_is_better=quantity.more_is_better, part=part,
                            ),
                        )  # fmt: skip
                        measure.values.append(measured[quantity.what])
                told = ", ".join(f"{what} {value:,.4g}" for what, value in measured.items())
                self.say(f"{where} {turn + 1}/{runs}: {told}")
        figures = [
            figure
            for quantity in workload.quantities
            for name in names
            if (figure := found.get((quantity.what, name))) and (name, figure.part) not in absent
        ]
        return figures, [
            Absent(what=workload.name, system=name, part=part, reason=reason)
            for (name, part), reason in absent.items()
        ]

    def _parts(self, workload: Workload) -> Sequence[str]:
        """Return the parts of a workload that are to be measured; one without a name where it has none."""
        if not workload.parts:
            return [""]
        return [part for part in workload.parts if not self._only or part in self._only]

    @contextmanager
    def case(self, name: str, part: str = "") -> Iterator[Case]:
        """Give a fresh database with the schema of a system."""
        system, installed = self.systems[name]
        if name not in self._templates:
            template = self.server.create()
            environ = work.environment(installed, self.server.dsn(template)) | dict(system.environ)
            work.call(installed, environ, "setup")
            self._templates[name] = template
        database = self.server.create(self._templates[name])
        try:
            yield Case(
                server=self.server,
                system=system,
                installed=installed,
                database=database,
                folder=self._folder,
                part=part,
                notes=self.notes,
            )
        finally:
            self.server.drop(database)


def step(n: int) -> int:
    """Return how often a worker marks its progress: a hundred times in a run, at least every 1,000 jobs."""
    return max(1, min(1_000, n // 100))


def paced(seconds: float) -> float:
    """Wait; the one place where the driver lets time pass on purpose (a worker is to become idle)."""
    time.sleep(seconds)
    return seconds


def _patience(n: int) -> float:
    return PATIENCE_S + n / 200
