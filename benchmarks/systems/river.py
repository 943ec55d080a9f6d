"""River: jobs on goroutines. Its program is river.go, built by the benchmark where `go` is there."""

from __future__ import annotations

from benchmarks.system import Go, System

SYSTEM = System(
    name="river",
    title="River",
    language="Go",
    install=Go(
        modules=(
            "github.com/riverqueue/river@v0.51.2", "github.com/riverqueue/river/riverdriver/riverpgxv5@v0.51.2",
            "github.com/riverqueue/river/rivermigrate",
        ),
        script="river.go",
    ),
    settings={
        "worker": "MaxWorkers 2,000, FetchCooldown 2 ms, FetchPollInterval 20 ms (defaults: 100 ms and 1 s), pool 20, "
        "completed jobs kept (default)",
        "I/O": "MaxWorkers 500, the rest the same",
        "bulk": "InsertManyFast (COPY), 1,000 a call",
    },
    left="SELECT EXISTS (SELECT FROM river_job WHERE state <> 'completed')",
    count_left="SELECT count(*) FROM river_job WHERE state <> 'completed'",
    most=300_000,
    modes=frozenset({"drain", "async", "io", "latency", "bulk"}),
)  # fmt: skip
