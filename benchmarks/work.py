"""Run a system's program: setup, fill, produce, and workers whose progress is read from their pipes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.install import ROOT, Installed
from benchmarks.server import ask

LOOK_S = 0.002


class RunFailed(Exception):
    """A measurement did not come to its end, or its numbers do not hold."""


def environment(installed: Installed, dsn: str, **settings: object) -> dict[str, str]:
    """Return the environment of a program: the database by URL and by PG*, settings as BENCH_*."""
    user, _, rest = dsn.removeprefix("postgresql://").partition("@/")
    name, _, host = rest.partition("?host=")
    return os.environ | {
        "PYTHONPATH": str(ROOT), "BENCH_DSN": dsn, "PGHOST": host.replace("%2F", "/"), "PGUSER": user,
        "PGDATABASE": name, "PGQUEUE_DSN": dsn, "BENCH_CACHE": str(installed.cwd),
        **{f"BENCH_{key.upper()}": str(value) for key, value in settings.items()},
    }  # fmt: skip


def call(
    installed: Installed, environ: Mapping[str, str], *words: str | float, patience: float = 180.0
) -> str:
    """Run a verb to its end; return what it printed."""
    argv = [*installed.argv, *map(str, words)]
    with subprocess.Popen(
        argv, cwd=installed.cwd, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=patience)
        except BaseException as error:  # also when the run is interrupted: nothing may be left behind
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RunFailed(f"{words[0]} took more than {patience:.0f} s") from None
            raise
    if process.returncode:
        raise RunFailed(f"{words[0]} failed: {err.strip()[-600:]}")
    return out


class Worker:
    """One worker process."""

    def __init__(self, installed: Installed, environ: Mapping[str, str], news: threading.Condition) -> None:
        self.out = Path(environ["BENCH_OUT"])
        self.marks: list[tuple[int, float]] = []
        self.started_at = time.monotonic()
        self._news = news
        self._log = self.out.with_suffix(".log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*installed.argv, "work"], cwd=installed.cwd, env=environ, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def count(self) -> int:
        """How many jobs it has run as far as its marks tell; threads may print theirs out of order."""
        return max((done for done, _ in self.marks), default=0)

    def log(self) -> str:
        """Return the end of what it wrote to standard error."""
        return self._log.read_text(errors="replace").strip()[-600:]

    def resident_bytes(self, field: str = "VmHWM") -> int:
        """Return the memory of the process: VmRSS now, VmHWM the most so far."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
        return 0

    def end(self) -> None:
        """Close its standard input, upon which it writes its record and ends; kill it if it does not."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with suppress(BrokenPipeError):  # it is gone already; its missing record tells
                self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()

    def kill(self) -> None:
        """End the process group whatever it does."""
        with suppress(ProcessLookupError):  # it ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)

    def numbers(self) -> array[int]:
        """Return the numbers of the jobs it ran, in the order they began."""
        found = array("I")
        if self.out.exists():
            found.frombytes(self.out.read_bytes())
        return found

    def _read(self) -> None:
        for line in self.process.stdout or ():
            words = line.split()
            if words and words[0] == b"mark":
                with self._news:
                    self.marks.append((int(words[1]), float(words[2])))
                    self._news.notify_all()


class Workers:
    """The workers of one measurement, ended and checked at the end of the block."""

    def __init__(self, installed: Installed, folder: Path, environ: Mapping[str, str], count: int) -> None:
        self._news = threading.Condition()
        self.all: list[Worker] = []
        try:
            for place in range(count):
                out = folder / f"worker-{place}"
                out.unlink(missing_ok=True)
                self.all.append(Worker(installed, {**environ, "BENCH_OUT": str(out)}, self._news))
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """End all."""
        for worker in self.all:
            worker.kill()

    def end(self) -> None:
        """Let all write their records and end."""
        for worker in self.all:
            worker.end()

    @property
    def count(self) -> int:
        """Jobs run so far, as far as the marks tell."""
        return sum(worker.count for worker in self.all)

    @property
    def first_at(self) -> float:
        """When the first job began."""
        return min(at for worker in self.all for _, at in worker.marks)

    def started(self) -> dict[int, float]:
        """Return when each job first began, after the end of workers that note times."""
        found: dict[int, float] = {}
        for worker in self.all:
            for number, at in json.loads(worker.out.with_name(f"{worker.out.name}.times").read_text()):
                found.setdefault(number, at)
        return found

    def wait_for(self, count: int, patience: float) -> None:
        """Wait until so many jobs were run, as the marks tell."""
        until = time.monotonic() + patience
        with self._news:
            while self.count < count:
                left = until - time.monotonic()
                dead = [w for w in self.all if w.process.poll() is not None]
                if dead:
                    raise RunFailed(f"a worker ended with {dead[0].process.returncode}: {dead[0].log()}")
                if left <= 0:
                    raise RunFailed(
                        f"{self.count} of {count} jobs after {patience:.0f} s: {self.all[0].log()}"
                    )
                self._news.wait(min(left, 0.5))

    def tenths(self, count: int) -> tuple[float, float]:
        """Return the rates of the first and the last tenth of `count` jobs (one worker).

        The first begins at 2 %: a worker that is still learning its batch size would flatter the comparison.
        """
        tenth, skipped = count // 10, count // 50
        return self._rate(skipped, skipped + tenth), self._rate(count - tenth, count)

    def _rate(self, low: int, high: int) -> float:
        inside = sorted((done, at) for done, at in self.all[0].marks if low <= done <= high)
        (a, t), (b, u) = inside[0], inside[-1]
        return (b - a) / (u - t)


def drained_at(dsn: str, left: str, patience: float) -> float:
    """Wait until the database says that nothing is left; return when it was asked.

    When it was asked, not when it answered: for some systems the question itself takes long.
    """
    import psycopg

    until = time.monotonic() + patience
    with psycopg.connect(dsn, autocommit=True) as connection:
        while True:
            asked = time.monotonic()
            row = connection.execute(left).fetchone()
            if row is not None and not row[0]:
                return asked
            if time.monotonic() > until:
                raise RunFailed(f"jobs are left {patience:.0f} s after their handlers ran")
            time.sleep(LOOK_S)


def verify(dsn: str, count_left: str, numbers: Iterator[int] | array[int], expected: int) -> int:
    """Check that every job 0..expected-1 ran and that the database agrees; return how many ran more than once."""
    ran = Counter(numbers)
    missing = sum(1 for number in range(expected) if number not in ran)
    left = ask(dsn, count_left)
    if missing or left:
        raise RunFailed(f"{missing} of {expected} jobs did not run; the database has {left} unfinished")
    return sum(1 for times in ran.values() if times > 1)
