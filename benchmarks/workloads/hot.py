"""A hot ordering key: one key has 40 % of the backlog, 10,000 others share the rest."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Case, Quantity, Workload
from benchmarks.systems.ours import HOT, hot_key
from benchmarks.work import RunFailed

KEYS = 10_000


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Drain, and check the order within each key; return the rate of the hot key, and that of the others together."""
    case.fill(n, keys=KEYS, hot=1)
    with case.workers(n, timed=1) as workers:
        case.drain(n, workers)
        last: dict[str, int] = {}
        for number in workers.all[0].numbers():
            key = hot_key(number, KEYS)
            if last.get(key, -1) >= number:
                raise RunFailed(f"job {number} began after job {last[key]} of its key")
            last[key] = number
        started = workers.started()
    hot = [at for number, at in started.items() if hot_key(number, KEYS) == HOT]
    others = [at for number, at in started.items() if hot_key(number, KEYS) != HOT]
    began = min(started.values())
    return {"hot": len(hot) / (max(hot) - began), "hot.others": len(others) / (max(others) - began)}


WORKLOAD = Workload(
    name="hot",
    text=f"One ordering key has two of every five jobs, {KEYS:,} keys share the others; the order within every key is "
    "checked. From the first job to the last one of the hot key, and to the last one of the others.",
    quantities=[
        Quantity(what="hot", unit="jobs/s", title="jobs of the hot key"),
        Quantity(what="hot.others", unit="jobs/s", title="jobs of the other keys beside it"),
    ],
    n=100_000,
    measure=measure,
)
