"""The relay of a measurement: the command that users run, with its defaults, in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.brokers import guard, program
from benchmarks.install import ROOT
from benchmarks.relay.outbox import wait_until_published
from benchmarks.relay.sinks import announced
from benchmarks.work import RunFailed

STOP_S = 20.0
#: A run may take this long, and a second more for every so many events.
PATIENCE_S, EVENTS_A_SECOND = 90.0, 200


def patience(n: int) -> float:
    """Return the seconds that n events may take."""
    return PATIENCE_S + n / EVENTS_A_SECOND


def command() -> list[str]:
    """Return how to start the relay."""
    found = program("outbox-relay")
    return [found] if found else [sys.executable, "-c", "from relay.cli import main; main()"]


class Relays:
    """Relay processes of one outbox, ended with the block."""

    def __init__(
        self,
        dsn: str,
        sink: str,
        folder: Path,
        *,
        count: int = 1,
        words: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._dsn = dsn
        self._logs = [folder / f"relay-{place}.log" for place in range(count)]
        #: Seconds of CPU that they had used when they were told to stop.
        self.cpu_s = 0.0
        path = os.pathsep.join([str(ROOT), announced(folder / "plugins")])
        given = os.environ | {"PYTHONPATH": path, "PGQUEUE_DSN": dsn, "OUTBOX_SINK": sink, **(environ or {})}
        self.all: list[subprocess.Popen[bytes]] = []
        try:
            for place, path_of_log in enumerate(self._logs):
                with path_of_log.open("wb") as log:
                    self.all.append(
                        subprocess.Popen(
                            [*guard(), *command(), *words, "--name", f"bench-{place}"], cwd=ROOT, env=given,
                            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                        )
                    )  # fmt: skip
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def publish(self, n: int) -> float:
        """Wait until all n events are published, then stop; return when the database knew."""
        ended = wait_until_published(self._dsn, patience(n), self.alive())
        self.stop()
        return ended

    def alive(self) -> Iterator[None]:
        """Go on as long as no relay has ended."""
        for _ in repeat(None):
            for place, process in enumerate(self.all):
                if process.poll() is not None:
                    raise RunFailed(f"relay {place} ended with {process.returncode}: {self.log(place)}")
            yield

    def stop(self) -> None:
        """Ask all to stop as an operator does, and see that they do it in order."""
        self.cpu_s += sum(_cpu_s(process.pid) for process in self.all)
        for process in self.all:
            process.send_signal(signal.SIGTERM)
        until = time.monotonic() + STOP_S
        for place, process in enumerate(self.all):
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            if process.returncode != 0:
                raise RunFailed(f"relay {place} stopped with {process.returncode}: {self.log(place)}")

    def kill(self) -> None:
        """End all, whatever they do."""
        for process in self.all:
            with suppress(ProcessLookupError):  # it ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def log(self, place: int) -> str:
        """Return the end of what a relay wrote."""
        return self._logs[place].read_text(errors="replace").strip()[-600:]


def _cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
