"""The effect log: handlers append lines to a file outside the database, so that nothing they did can roll back."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.waiting import eventually

EFFECTS = "EFFECTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One thing a handler did. `at`: seconds of the machine's monotonic clock, the same in every process."""

    what: str
    n: int
    attempt: int
    pid: int
    thread: str
    at: float
    note: str = ""


def note(what: str, n: int, attempt: int = 0, note: str = "") -> None:
    """Append one line; a single write to an O_APPEND file is never torn."""
    effect = Effect(
        what=what, n=n, attempt=attempt, pid=os.getpid(), thread=threading.current_thread().name,
        at=time.monotonic(), note=note,
    )  # fmt: skip
    file = os.open(os.environ[EFFECTS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, (json.dumps(asdict(effect)) + "\n").encode())
    finally:
        os.close(file)


@dataclass(frozen=True, slots=True)
class Effects:
    """Reads the log."""

    path: Path

    def all(self, what: str | None = None) -> list[Effect]:
        """Return the effects so far, of one kind if given, in the order they were written."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines()
        found = [Effect(**json.loads(line)) for line in lines]
        return [e for e in found if what is None or e.what == what]

    def ns(self, what: str) -> list[int]:
        """Return the numbers of the jobs that did this."""
        return [e.n for e in self.all(what)]

    def wait(self, what: str, count: int = 1, timeout: float = 15.0) -> list[Effect]:
        """Wait until so many effects of a kind are there."""

        def enough() -> list[Effect] | None:
            found = self.all(what)
            return found if len(found) >= count else None

        enough.__name__ = f"{count} x {what}"
        return eventually(enough, timeout)

    def overlaps(self, group: Callable[[Effect], object]) -> list[tuple[Effect, Effect]]:
        """Return pairs of attempts of one group that were at work at the same time."""
        open_now: dict[object, Effect] = {}
        found = []
        for effect in self.all():
            where = group(effect)
            if effect.what == "start":
                if where in open_now:
                    found.append((open_now[where], effect))
                open_now[where] = effect
            elif effect.what == "end":
                open_now.pop(where, None)
        return found
