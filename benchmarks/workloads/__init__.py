"""The workloads, in the order they run: one small file each."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from benchmarks.bench import Workload

NAMES: Final = (
    "drain", "drain300k", "drain2", "async_", "io", "latency", "busy", "bulk", "commit", "snapshot", "backlog", "wal",
    "bloat", "memory", "keyed", "hot", "critical", "heartbeat", "relay", "relay2", "relay_latency", "relay_snapshot",
    "relay_peers",
)  # fmt: skip


def all_workloads() -> dict[str, Workload]:
    """Return every workload by its name."""
    found = (import_module(f"benchmarks.workloads.{name}").WORKLOAD for name in NAMES)
    return {workload.name: workload for workload in found}
