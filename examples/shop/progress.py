"""Progress for people: a bar that is drawn over itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass, field

PLAIN_EVERY_S = 2.0
BAR = 24


@dataclass(slots=True, kw_only=True)
class Progress:
    """One bar. `say` prints a line above it."""

    total: int
    began: float = field(default_factory=time.monotonic)
    _live: bool = field(default_factory=sys.stdout.isatty)
    _said_at: float = 0.0
    _said: str = ""

    def show(self, done: int, text: str, *, last: bool = False) -> None:
        """Draw the bar at `done` of the total, and a text behind it."""
        share = min(1.0, done / max(1, self.total))
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            line = f" {share:4.0%}  {text}"
            size = max(4, min(BAR, width - len(line)))
            bar = "█" * round(share * size) + "░" * (size - round(share * size))
            sys.stdout.write(f"\r\x1b[2K{(bar + line)[:width]}" + ("\n" if last else ""))
            sys.stdout.flush()
            return
        now = time.monotonic()
        if last or now - self._said_at >= PLAIN_EVERY_S:
            self._said_at = now
            print(f"{share:4.0%}  {text}", flush=True)

    def say(self, text: str) -> None:
        """Print a line of its own."""
        if self._live:
            sys.stdout.write("\r\x1b[2K")
        print(text, flush=True)
