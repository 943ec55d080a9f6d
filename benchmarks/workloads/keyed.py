"""Ordering keys: many keys with 20 jobs each, beside the same number of jobs without keys."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench import Case, Quantity, Workload
from benchmarks.work import RunFailed

PER_KEY = 20


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Drain keyed jobs and check the order within each key; then drain as many without keys."""
    keys = max(1, n // PER_KEY)
    case.fill(n, keys=keys)
    with case.workers(n) as workers:
        keyed = n / case.drain(n, workers)
        last: dict[int, int] = {}
        for number in workers.all[0].numbers():
            if last.get(number % keys, -1) >= number:
                raise RunFailed(f"job {number} began after job {last[number % keys]} of its key")
            last[number % keys] = number
    case.fill(n)
    with case.workers(n) as workers:
        return {"keyed": keyed, "keyed.without": n / case.drain(n, workers)}


WORKLOAD = Workload(
    name="keyed",
    text=f"{PER_KEY} jobs for each ordering key, keys interleaved; the order within every key is checked. "
    "The same number of jobs without keys in the same round.",
    quantities=[
        Quantity(what="keyed", unit="jobs/s", title="drain with ordering keys"),
        Quantity(what="keyed.without", unit="jobs/s", title="drain without"),
    ],
    n=200_000,
    measure=measure,
)
