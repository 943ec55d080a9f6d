"""Worker processes of a test: started by the console script, ended with the test whatever happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tests.process.apps.effects import EFFECTS, Effects
from tests.waiting import eventually

ROOT = Path(__file__).parents[3]
COMMAND = str(Path(sys.executable).with_name("pgqueue-worker"))
EVERY = "tests.process.apps.every:app"
#: What the server still does for the workers of some processes.
AT_WORK = """
SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND datname = current_database()
  AND application_name ~ format('^pgqueue-.*:(%%s)$', array_to_string(%s::int[], '|'))
"""
LOSE = """
UPDATE pgqueue.{} SET deadline = clock_timestamp() - interval '1 s'
WHERE lease <> 0 AND lease >> 32 IN (SELECT nonce FROM pgqueue.worker WHERE pid = ANY (%s))
"""


@dataclass(slots=True)
class Process:
    """One pgqueue-worker."""

    process: subprocess.Popen[bytes]
    log_path: Path

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self.process.pid

    @property
    def log(self) -> str:
        """Return what it has written to stderr."""
        return self.log_path.read_text()

    def says(self, pattern: str, timeout: float = 40.0) -> re.Match[str]:
        """Wait for a line in its log."""

        def said() -> re.Match[str] | None:
            assert self.process.poll() is None or re.search(pattern, self.log), self.log
            return re.search(pattern, self.log)

        said.__name__ = pattern
        try:
            return eventually(said, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}; the log:\n{self.log}") from None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def freeze(self) -> None:
        """Stop it, and wait until each of its threads stands still."""
        self.signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")

        def still() -> bool:
            return all(" T " in stat.read_text().rpartition(")")[2][:4] for stat in tasks.glob("*/stat"))

        eventually(still)

    def thaw(self) -> None:
        """Let it go on."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self.process.kill()
        self.process.wait(40)

    def wait(self, timeout: float = 40.0) -> int:
        """Wait for its end and return the exit status."""
        return self.process.wait(timeout)

    def stop(self, timeout: float = 40.0) -> int:
        """Stop it as an orchestrator does."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)


class Fleet:
    """Starts workers on one database."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self.effects = Effects(folder / "effects.jsonl")
        self._started: list[Process] = []

    def gate(self, name: str) -> Path:
        """Return the path of a file that a handler can wait for."""
        return self.folder / name

    def launch(self, *options: str, app: str = EVERY, env: Mapping[str, str] | None = None) -> Process:
        """Start a worker. Unless the options say otherwise no lease runs out in a test, however busy the machine is."""
        if not any(o.startswith("--visibility") for o in options):
            options = (*options, "--visibility=2m")
        log_path = self.folder / f"worker-{len(self._started)}.log"
        environ = os.environ | {
            "PGQUEUE_DSN": self.dsn, EFFECTS: str(self.effects.path), "PYTHONUNBUFFERED": "1"
        } | dict(env or {})  # fmt: skip
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [COMMAND, app, *options], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        started = Process(process, log_path)
        self._started.append(started)
        return started

    def start(self, *options: str, app: str = EVERY, env: Mapping[str, str] | None = None) -> Process:
        """Start a worker and wait until it claims."""
        process = self.launch(*options, app=app, env=env)
        process.says("started queues=")
        return process

    def lose(self, *pids: int) -> None:
        """Let every lease of these processes run out at once: they are dead, or stand still."""
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            eventually(lambda: conn.execute(AT_WORK, [list(pids)]).fetchone() == (0,))
            for table in ("lane", "job"):
                conn.execute(LOSE.format(table).encode(), [list(pids)])

    def close(self) -> None:
        """End everything that still runs."""
        for started in self._started:
            if started.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)  # its own session: nobody else is in this group
            started.process.wait(40)
