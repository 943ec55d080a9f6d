"""`python -m benchmarks`: run workloads, write the table and the plots."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path

from benchmarks import report
from benchmarks.bench import Bench
from benchmarks.figures import Outcome
from benchmarks.install import ROOT
from benchmarks.server import started
from benchmarks.system import OURS, PEERS, RELAY_PEERS, system_named
from benchmarks.workloads import all_workloads

EVERY_PEER = (*PEERS, *RELAY_PEERS)
RESULTS = ROOT / "docs" / "benchmarks"


def main() -> int:
    """Read the options, run, write; 1 if nothing could be measured."""
    workloads = all_workloads()
    options = _options(list(workloads)).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that everything started is ended
    names = options.what or list(workloads)
    peers = tuple(filter(None, options.peers.split(","))) if options.peers is not None else EVERY_PEER
    modes = {workloads[name].mode for name in names}
    taking_part = [name for name in dict.fromkeys([*OURS, *peers]) if modes & system_named(name).modes]
    chosen = list(dict.fromkeys(["ours", *taking_part]))
    command = "python -m benchmarks " + shlex.join(sys.argv[1:])
    outcomes = []
    with started() as server:
        bench = Bench(server, chosen, say, options.parts)
        try:
            for name in names:
                began = time.monotonic()
                figures, absent = bench.run(workloads[name], n=options.n, runs=options.runs)
                outcomes.append(
                    Outcome(
                        what=name, figures=figures, absent=absent, command=command.strip(), server=server.version(),
                        machine=report.machine(), seconds=time.monotonic() - began,
                        versions={n: list(installed.versions) for n, (_, installed) in bench.systems.items()},
                        notes=list(bench.notes.values()),
                    )
                )  # fmt: skip
                report.write(options.out, report.merged(options.out, outcomes))
        finally:
            bench.close()
    print(report.table(report.merged(options.out, outcomes)))
    return 0 if any(outcome.figures for outcome in outcomes) else 1


def say(line: str) -> None:
    """Print a line of progress."""
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


def _options(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure this queue and its peers on an embedded PostgreSQL and write docs/benchmarks.",
    )
    parser.add_argument(
        "what", nargs="*", choices=[*names, []], help=f"workloads (default: all): {', '.join(names)}"
    )
    parser.add_argument("--n", type=int, help="jobs per run (default: by workload; slow systems get fewer)")
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each workload, the systems in turn (default 3)"
    )
    parser.add_argument(
        "--peers",
        metavar="A,B",
        help=f"peers to measure beside ours (default: {','.join(EVERY_PEER)}; '' for none)",
    )
    parser.add_argument(
        "--parts",
        type=lambda text: tuple(filter(None, text.split(","))),
        default=(),
        metavar="A,B",
        help="parts of workloads that have some, such as the brokers of `relay` (default: all)",
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder of the results (default: docs/benchmarks)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
