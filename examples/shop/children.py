"""The processes of the demo: started, looked after, killed on purpose, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from pgqueue import PgqueueError

STOP_S = 15.0
TAIL = 12


class ChildFailed(PgqueueError):
    """A process of the demo ended by itself, or did not start."""

    def __init__(self, name: str, problem: str, tail: str) -> None:
        self.name = name
        super().__init__(f"{name} {problem}; the last lines of its log:\n{tail or '(it said nothing)'}")


@dataclass(slots=True, kw_only=True)
class Child:
    """One process with its log."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    stopping: bool = False

    @property
    def pid(self) -> int:
        """The process id; 0 before the start."""
        return self.process.pid if self.process else 0

    def start(self) -> None:
        """Start it; its log goes on where the last one ended."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=dict(self.environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self) -> int:
        """End it with SIGKILL, as the kernel does when memory is short; return its process id."""
        pid = self.pid
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        return pid

    def check(self) -> None:
        """Raise ChildFailed if it ended by itself."""
        if self.process is not None and (status := self.process.poll()) is not None:
            raise ChildFailed(self.name, f"ended with status {status}", self.tail())

    def text(self) -> str:
        """Return what it said."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(f"  {line}" for line in self.text().splitlines()[-TAIL:])


@dataclass(slots=True, kw_only=True)
class Children:
    """All of them; leaving the block leaves none behind."""

    folder: Path
    environment: Mapping[str, str]
    all: list[Child] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, *command: str) -> Child:
        """Start one; the first word is a program of this environment, `python` included."""
        program = Path(sys.executable).with_name(command[0])
        child = Child(
            name=name,
            command=[sys.executable if command[0] == "python" else str(program), *command[1:]],
            log=self.folder / f"{name.replace(' ', '-')}.log",
            environment=os.environ | self.environment,
        )
        self.all.append(child)
        child.start()
        return child

    def check(self) -> None:
        """Raise ChildFailed for the first that ended by itself."""
        for child in self.all:
            child.check()

    def stop(self) -> None:
        """Ask all to stop, in the order of their start; kill those that take too long."""
        running = [c.process for c in self.all if c.process is not None and c.process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        until = time.monotonic() + STOP_S
        with ExitStack() as last:  # also where a second Ctrl-C ends the waiting
            for process in running:
                last.callback(process.wait)
                last.callback(process.kill)
            for process in running:
                try:
                    process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    break
