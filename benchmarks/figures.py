"""Figures: what was measured, run by run, and how runs are brought together."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Sequence

import msgspec


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured quantity of one system: a value per run, in the order of the runs.

    `jobs`: how many jobs a run had. `more_is_better` says which way the quantity is good. `part`: of the workload.
    """

    what: str
    system: str
    unit: str
    values: list[float]
    more_is_better: bool = True
    jobs: int = 0
    part: str = ""

    @property
    def median(self) -> float:
        """The middle of the runs."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The lowest run."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The highest run."""
        return max(self.values)


class Absent(msgspec.Struct, frozen=True, kw_only=True):
    """A system that has no figure for a workload, and why."""

    what: str
    system: str
    reason: str
    part: str = ""


def sentence(error: str) -> str:
    """Return what an error says in one line: the first, or the last of a program's output that stands behind it."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["nothing was said"]
    text = lines[0]
    if "Traceback" in text:
        text = text.partition("Traceback")[0] + lines[-1]
    return textwrap.shorten(text, 200, placeholder=" ..")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one workload brought."""

    what: str
    figures: list[Figure]
    absent: list[Absent]
    command: str
    server: str
    machine: str
    #: System -> its versions.
    versions: dict[str, list[str]]
    seconds: float
    #: What is to be said of the surroundings.
    notes: list[str] = []


def ratios(left: Figure, right: Figure) -> list[float]:
    """Return left / right run by run: interleaved runs share their moment of the machine."""
    return [a / b for a, b in zip(left.values, right.values, strict=False) if b]


def quantile(values: Iterable[float], share: float) -> float:
    """Return the value below which `share` of the values lie."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def find(figures: Sequence[Figure], what: str, system: str) -> Figure | None:
    """Return the figure of a system, if there is one."""
    return next((f for f in figures if (f.what, f.system) == (what, system)), None)
