"""Watch one embedded server: start it, stop it at the owner's wish, outlive the owner only to clean up.

Run by path in an interpreter of its own (`python -I -S watch.py ORDER`), so it imports the standard library
alone. The owner holds the other end of standard input. A line `fast` or `immediate` stops the server; end
of file without such a line, or a new parent process, means that the owner died: then the server stops and a
throw-away folder goes.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
LOOK_S = 0.2
"""How long the death of the owner may go unseen when a forked child of it still holds the pipe."""

SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to run and what to do with its folders; travels as one JSON argument."""

    owner: int
    initdb: Sequence[str]
    postgres: Sequence[str]
    environ: Mapping[str, str]
    data: str
    draft: str
    folder: str
    throw_away: bool
    account: tuple[int, int] | None
    stop_s: float


class Stop(Exception):
    """The server has to stop, because the owner said so or is gone."""

    def __init__(self, how: str, *, orphaned: bool) -> None:
        super().__init__(how)
        self.how = how
        self.orphaned = orphaned


def look(order: Order, timeout: float) -> None:
    """Wait up to `timeout` seconds for the owner; raise Stop when it asks to stop or has died."""
    orphan = "immediate" if order.throw_away else "fast"
    readable, _, _ = select.select([0], [], [], timeout)
    if readable:
        wish = os.read(0, 64).decode("ascii", "replace").strip()
        raise Stop(wish, orphaned=False) if wish in SIGNALS else Stop(orphan, orphaned=True)
    if os.getppid() != order.owner:
        raise Stop(orphan, orphaned=True)


def _die_with_watcher() -> Callable[[], None] | None:
    """Return what a child runs before exec so that the kernel stops it if this process is killed (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask_kernel() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)

    return ask_kernel


def spawn(order: Order, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a child in a process group of its own, as the unprivileged account where there is one."""
    uid, gid = order.account if order.account is not None else (None, None)
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=2,
        cwd=order.folder,
        env=dict(order.environ),
        user=uid,
        group=gid,
        extra_groups=None if order.account is None else [],
        process_group=0,
        preexec_fn=_die_with_watcher(),  # noqa: PLW1509 - this process has one thread
        umask=0o077,
    )


def create(order: Order) -> None:
    """Make the data folder when there is none; a creation cut short leaves only a draft, removed the next
    time.
    """
    if Path(order.data).exists():
        return
    shutil.rmtree(order.draft, ignore_errors=True)
    Path(order.draft).mkdir(mode=0o700)
    if order.account is not None:
        os.chown(order.draft, *order.account, follow_symlinks=False)
    child = spawn(order, order.initdb)
    try:
        while child.poll() is None:
            look(order, LOOK_S / 10)
    except Stop:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    if child.returncode != 0:
        sys.exit(child.returncode)
    Path(order.draft).rename(order.data)


def stop(order: Order, child: subprocess.Popen[bytes], how: str) -> None:
    """Stop the server; go from fast to immediate to kill as its patience runs out."""
    for number, patience in (
        (SIGNALS[how], order.stop_s),
        (signal.SIGQUIT, order.stop_s / 2),
        (signal.SIGKILL, None),
    ):
        with suppress(ProcessLookupError):
            child.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(patience)
            return


def remove(order: Order) -> None:
    """Remove the folder; backends of a killed server may write for a moment more, so try until it is gone."""
    deadline = time.monotonic() + order.stop_s
    while Path(order.folder).exists() and time.monotonic() < deadline:
        shutil.rmtree(order.folder, ignore_errors=True)
        time.sleep(LOOK_S / 10)


def watch(order: Order) -> int:
    """Run the server until it ends or has to; return the exit code for the owner to see."""
    child = None
    try:
        create(order)
        child = spawn(order, order.postgres)
        os.write(1, b"%d\n" % child.pid)
        while child.poll() is None:
            look(order, LOOK_S)
    except Stop as wish:
        if child is not None:
            stop(order, child, wish.how)
        if wish.orphaned:
            remove(order)
        return 0
    return 1


def main(argv: Sequence[str]) -> int:
    """Read the order and watch."""
    fields = json.loads(argv[1])
    account = fields.pop("account")
    order = Order(account=None if account is None else (account[0], account[1]), **fields)

    def leave(_signal: int, _frame: FrameType | None) -> None:
        raise Stop("fast", orphaned=True)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    return watch(order)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
