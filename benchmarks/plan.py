"""What a statement touches: buffers, counted by EXPLAIN. Unlike time they hardly vary from run to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import psycopg

from benchmarks.work import RunFailed


def explain(connection: psycopg.Connection[Any], text: str, params: Mapping[str, object]) -> float:
    """Run a statement under EXPLAIN; return the buffers it touched."""
    command = "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) " + text
    row = connection.execute(command, params).fetchone()
    if row is None:
        raise RunFailed("EXPLAIN brought no plan")
    return buffers(row[0][0]["Plan"])


def buffers(plan: Mapping[str, Any]) -> float:
    """Count the buffers of a plan and of all its CTEs.

    A node counts what it pulls, and nothing pulls an UPDATE whose rows are not asked for: the top node alone would
    leave it out. What a CTE Scan pulls is counted at its CTE.
    """
    found = 0.0
    for node, root in _nodes(plan, root=True):
        touched = node["Shared Hit Blocks"] + node["Shared Read Blocks"]
        found += touched * (root - (node["Node Type"] == "CTE Scan"))
    return found


def _nodes(node: Mapping[str, Any], *, root: bool) -> Iterator[tuple[Mapping[str, Any], bool]]:
    yield node, root
    for child in node.get("Plans", ()):
        yield from _nodes(child, root=child.get("Subplan Name", "").startswith("CTE "))
