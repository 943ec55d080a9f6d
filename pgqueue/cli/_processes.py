"""Several worker processes under one parent: started, kept running, stopped together.

The parent holds no connection and runs no job. A child that dies is started again, after a wait that grows while
it keeps dying; its jobs come back when their leases run out. Children stop when their pipe to the parent closes:
when the parent is told to stop, and when it dies, however it dies. No signal is passed on, as Ctrl-C and service
managers send theirs to the whole group already and a second one would end the children at once.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import Final

from pgqueue.cli._app import stop_on_signals

PARENT: Final = "PGQUEUE_PARENT_PIPE"
#: Exit status of a command whose options, app or database are wrong.
MISTAKE: Final = 1
SOON: Final = 15.0

_log = logging.getLogger("pgqueue")


def supervise(count: int, dsn: str, grace: float) -> int:
    """Run `count` copies of this command, each with one process, until a signal; return the exit status."""
    children: dict[int, subprocess.Popen[bytes]] = {}

    def kill() -> None:
        for child in list(children.values()):
            child.kill()

    told = stop_on_signals(at_once=kill)
    theirs, ours = os.pipe()  # no child has our end
    environment = os.environ | {"PGQUEUE_PROCESSES": "1", "PGQUEUE_DSN": dsn, PARENT: str(theirs)}
    started: dict[int, float] = {}
    crashes = dict.fromkeys(range(count), 0)
    due = dict.fromkeys(range(count), 0.0)
    while not told.wait(0.2):
        now = time.monotonic()
        for place in range(count):
            child = children.get(place)
            if child is not None and child.poll() is not None:
                if child.returncode == MISTAKE and not crashes[place] and now - started[place] < SOON:
                    told.set()  # nothing that starting it again would mend; it has said why
                    continue
                del children[place]
                crashes[place] = 0 if now - started[place] > 60 else crashes[place] + 1
                wait = 0.0 if crashes[place] <= 1 else min(30.0, 0.5 * 2.0 ** crashes[place])
                due[place] = now + wait
                _log.error(
                    "worker process %d ended with %d; starting again in %.1f s",
                    child.pid,
                    child.returncode,
                    wait,
                )
            if place not in children and now >= due[place]:
                children[place] = subprocess.Popen(_command(), env=environment, pass_fds=(theirs,))
                started[place] = now
    os.close(ours)
    until = time.monotonic() + grace + 10.0
    status = 0
    for child in children.values():
        try:
            status = max(status, abs(child.wait(max(0.0, until - time.monotonic()))))
        except subprocess.TimeoutExpired:
            child.kill()
            status = 1
    os.close(theirs)
    return status


def stop_with_parent(told: threading.Event) -> None:
    """Set `told` when the parent of this worker process stops or is gone."""
    if (pipe := os.environ.pop(PARENT, None)) is not None:

        def watch() -> None:
            os.read(int(pipe), 1)
            told.set()

        threading.Thread(target=watch, name="pgqueue-parent", daemon=True).start()


def _command() -> list[str]:
    """Return this command line for one child: the parent's, without --processes and --dsn."""
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word in ("--processes", "--dsn"):
            next(words, None)
        elif not word.startswith(("--processes=", "--dsn=")):
            kept.append(word)
    return [sys.executable, "-c", "from pgqueue.cli import worker; worker()", *kept]
