"""An app with a limit of every kind, and a parent that forks workers of it: `python -m tests.process.apps.limited DSN`.

Each line on stdin forks one worker and answers with its process id: a fork is there at once, a new interpreter is not.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback

from pgqueue import App
from pgqueue.config import WorkerSettings
from pgqueue.worker import Worker

QUEUES = ("default", "capped")
LIMIT, KEY_LIMIT, QUEUE_LIMIT = 3, 2, 4
#: Longer than what a lane hands out at once, so that each job has a slot of its own.
SECONDS = 0.05
LEASE = 1.0

app = App()


@app.job("narrow", limit=LIMIT, max_attempts=1000)
def narrow(n: int) -> None:
    time.sleep(SECONDS)


@app.job("by-key", key_limit=KEY_LIMIT, max_attempts=1000)
def by_key(n: int) -> None:
    time.sleep(SECONDS)


@app.job("capped", queue="capped", max_attempts=1000)
def capped(n: int) -> None:
    time.sleep(SECONDS)


def serve(dsn: str) -> None:
    """Work until killed."""
    settings = WorkerSettings(queues=QUEUES, visibility=LEASE, concurrency=16, prefetch=0, poll=0.05)
    Worker(app, dsn, settings).start()
    threading.Event().wait()


def main() -> None:
    """Fork a worker for each line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                serve(sys.argv[1])
            except Exception:  # noqa: BLE001 - a child that ends must not go on as its parent
                traceback.print_exc()
            os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
