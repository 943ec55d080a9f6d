"""From the return of a commit to the broker's confirmation, at a steady rate."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.bench import Case, Quantity, Workload, cost
from benchmarks.figures import quantile
from benchmarks.install import ROOT
from benchmarks.relay import outbox
from benchmarks.relay.ends import ENDS, end_named, timed
from benchmarks.relay.process import Relays, patience
from benchmarks.relay.run import opened
from benchmarks.relay.sinks import STAMP
from benchmarks.work import RunFailed

SINKS = ("null", "kafka", "nats")
RATE, CLIENTS, WARM = 1_000, 8, 20_000
#: The producers of a machine that is too busy do not keep the rate; then the figure is none.
KEPT = 0.9


def measure(case: Case, n: int) -> Mapping[str, float]:
    """Start the relay, write 1,000 events a second, join commits and confirmations by the events' ids."""
    with opened(case, end_named(case.part)) as end:
        url, confirmed = timed(end)
        with Relays(case.dsn, url, end.folder, words=end.words, environ=end.environ) as relays:
            sent = _produce(case.dsn, n + WARM, end.folder / "committed")
            relays.publish(n + WARM)
        repeated = outbox.verify(case.dsn, end.arrived())
        heard: dict[int, float] = {}
        for id_, at in STAMP.iter_unpack(confirmed.read_bytes()):
            heard.setdefault(id_, at)
    waits = [1000 * max(0.0, heard[id_] - at) for id_, at in sent[WARM:]]
    times = [at for _, at in sent[WARM:]]
    rate = (len(times) - 1) / (times[-1] - times[0])
    if rate < KEPT * RATE:
        raise RunFailed(f"the producers wrote {rate:.0f} events/s instead of {RATE}: the machine is too busy")
    what = f"relay_latency.{case.part}"
    return {
        f"{what}.p50": quantile(waits, 0.5), f"{what}.p99": quantile(waits, 0.99), f"{what}.max": max(waits),
        "rate": rate, "repeated": repeated,
    }  # fmt: skip


def _produce(dsn: str, n: int, file: Path) -> list[tuple[int, float]]:
    """Return (id, time of the commit) of each event, in the order of the commits."""
    words = [dsn, str(n), str(RATE), str(CLIENTS), str(file)]
    try:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.relay.producer", *words], cwd=ROOT, check=True, capture_output=True,
            text=True, timeout=patience(n) + n / RATE,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        raise RunFailed(f"the producers failed: {error.stderr.strip()[-600:]}") from error
    lines = (line.split() for line in file.read_text().splitlines())
    return sorted(((int(id_), float(at)) for id_, at in lines), key=lambda pair: pair[1])


def _quantities() -> Iterator[Quantity]:
    for name in SINKS:
        title = ENDS[name].title
        for part, words in (("p50", "median"), ("p99", "99th percentile"), ("max", "longest")):
            yield cost(f"relay_latency.{name}.{part}", "ms", f"{title}, {words}")


WORKLOAD = Workload(
    name="relay_latency",
    text=f"{CLIENTS} connections write {RATE:,} events a second, each in a transaction of its own; one relay. From the "
    "return of the commit to the moment at which the relay's sink knows that the broker has the event. The first "
    f"{WARM:,} events, while the broker's code is compiled, do not count.",
    quantities=list(_quantities()),
    n=5_000,
    measure=measure,
    things="events",
    parts=dict.fromkeys(SINKS, 100_000),
    chart="commit to confirmation at 1,000 events/s",
)
