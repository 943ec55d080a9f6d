"""Process slots: child processes for handlers that compute, crash or hold the interpreter lock.

A slot thread sends one job to a child and waits for the answer, so the child is the only thing that can go wrong:
a child that dies (out of memory, a fault in C code) is an attempt that failed, and one that runs over its time is
killed. Children are started with `spawn` (forking a process with threads copies locked locks) and reused. The
handler is found in the child by importing its module: it must be a plain function at the top of one.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from multiprocessing.connection import Connection, wait
from typing import Any, Final, NamedTuple

import psycopg

from pgqueue.app import App, JobType
from pgqueue.errors import ConfigError, DatabaseUnreachable, LeaseLost, PgqueueError
from pgqueue.job import Claim, Claimed, Line, Outcome, Released
from pgqueue.run import Runner

#: Seconds a child may take to start and to import the handler's module.
STARTUP: Final = 60.0
BEGUN: Final = "begun"

_spawn = multiprocessing.get_context("spawn")


class ChildDied(Exception):
    """The child process that ran the handler ended before it answered."""


class Asked(NamedTuple):
    """What a handler in a child wants of the parent: progress (unanswered), checkpoint or state."""

    what: str
    claim: Claim
    text: str = ""
    fraction: float = 0.0


class Answer(NamedTuple):
    """The parent's answer: a value, or why there is none (lost: the lease; else the problem in words)."""

    value: Any = None
    problem: str | None = None


class Children:
    """Idle children, ready for the next job."""

    def __init__(self) -> None:
        self._idle: deque[Child] = deque()
        self._all: set[Child] = set()
        self._lock = threading.Lock()
        #: Set at the end of the grace period: whatever ends from here on was killed by us.
        self.closed = False

    def take(self) -> Child:
        """Return an idle child, or start one."""
        while True:
            try:
                child = self._idle.pop()
            except IndexError:
                child = Child()
                with self._lock:
                    self._all.add(child)
                if self.closed:
                    child.kill()
                return child
            if child.alive:
                return child
            with self._lock:
                self._all.discard(child)

    def give(self, child: Child) -> None:
        """Take a child back after its job."""
        if child.alive and not self.closed:
            self._idle.append(child)
        else:
            with self._lock:
                self._all.discard(child)

    def close(self) -> None:
        """Kill all children, idle or at work: the jobs of the latter are given back."""
        self.closed = True
        with self._lock:
            for child in self._all:
                child.kill()


class Child:
    """One child process and the pipe to it."""

    def __init__(self) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        #: Monotonic time at which the handler began; start-up and imports do not count against its time.
        self.began = math.inf

    @property
    def alive(self) -> bool:
        """Tell whether the process still runs."""
        return self._process.is_alive()

    def call(
        self,
        module: str,
        qualname: str,
        claimed: Claimed,
        queue: str,
        priority: int,
        line: Line | None = None,
    ) -> Outcome:
        """Run one job in the child; raises ChildDied if the child ends before it answers."""
        try:
            self._pipe.send((module, qualname, tuple(claimed), queue, priority))
            if not self._pipe.poll(STARTUP):
                self.kill()
            answer: Any = self._pipe.recv()
            if answer == BEGUN:
                self.began = time.monotonic()
                answer = self._pipe.recv()
            while isinstance(answer, Asked):
                if (reply := _reply(answer, line)) is not None:
                    self._pipe.send(reply)
                answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(5.0)
            code = self._process.exitcode
            how = (
                f"signal {signal.Signals(-code).name}"
                if code is not None and code < 0
                else f"exit code {code}"
            )
            raise ChildDied(f"the child process of the handler ended with {how}") from error
        finally:
            self.began = math.inf
        outcome: Outcome = answer
        return outcome

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()


class ProcessRunner(Runner):
    """Runs the jobs of one job type in child processes."""

    __slots__ = ("_children", "_levels", "_where", "at_work")

    def __init__(self, kind: JobType[Any], children: Children, levels: list[tuple[str, int]]) -> None:
        super().__init__(kind)
        handler = kind.handler
        self._where = (handler.__module__, handler.__qualname__)
        if "<locals>" in handler.__qualname__ or handler.__module__ == "__main__":
            raise ConfigError(
                f"job {kind.name!r}: a process=True handler must be importable; define it at the top of a module "
                f"(it is {handler.__module__}.{handler.__qualname__})"
            )
        self._children = children
        self._levels = levels
        #: Which child runs which attempt, for the one who has to kill it.
        self.at_work: dict[tuple[int, int], Child] = {}

    def call(self, claimed: Claimed, job: Any) -> Outcome:  # noqa: ARG002 - the child builds its own context
        """Run the handler in a child process and wait for it."""
        child = self._children.take()
        self.at_work[claimed.id, claimed.lease] = child
        try:
            return child.call(*self._where, claimed, *self._levels[claimed.level], self.line)
        except ChildDied as error:
            return Released() if self._children.closed else self.failed(claimed, error)
        finally:
            self.at_work.pop((claimed.id, claimed.lease), None)
            self._children.give(child)

    def began(self, claimed: Claimed) -> float:
        """Return the monotonic time at which the handler of this attempt began; math.inf before."""
        child = self.at_work.get((claimed.id, claimed.lease))
        return math.inf if child is None else child.began

    def kill(self, claimed: Claimed) -> None:
        """Kill the child that runs this attempt."""
        if (child := self.at_work.get((claimed.id, claimed.lease))) is not None:
            child.kill()


def _reply(asked: Asked, line: Line | None) -> Answer | None:
    """Do for a handler in a child what it asks for."""
    if line is None:
        return None if asked.what == "progress" else Answer()
    try:
        match asked.what:
            case "progress":
                line.progress(asked.claim, asked.fraction, asked.text)
                return None
            case "checkpoint":
                line.checkpoint(asked.claim, asked.text)
                return Answer()
        return Answer(value=line.state(asked.claim))
    except LeaseLost:
        return Answer(problem="lost")
    except (PgqueueError, psycopg.Error) as error:
        return Answer(problem=str(error))


class Wire:
    """The line of a job in a child process: its parent, at the other end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def progress(self, claim: Claim, fraction: float, note: str) -> None:
        """Tell the parent how far the job is."""
        with self._lock:
            self._pipe.send(Asked("progress", claim, note, fraction))

    def checkpoint(self, claim: Claim, state: str) -> None:
        """Let the parent write the state of the job."""
        self._ask(Asked("checkpoint", claim, state))

    async def acheckpoint(self, claim: Claim, state: str) -> None:
        """Do the same: handlers in a child are plain functions."""
        self.checkpoint(claim, state)

    def state(self, claim: Claim) -> str | None:
        """Let the parent read the last checkpoint."""
        found: str | None = self._ask(Asked("state", claim))
        return found

    async def astate(self, claim: Claim) -> str | None:
        """Do the same."""
        return self.state(claim)

    def _ask(self, asked: Asked) -> Any:
        with self._lock:
            self._pipe.send(asked)
            answer: Answer = self._pipe.recv()
        if answer.problem == "lost":
            raise LeaseLost(asked.claim.id, asked.claim.lease)
        if answer.problem is not None:
            raise DatabaseUnreachable("the worker's DSN", answer.problem)
        return answer.value


def _serve(pipe: Connection) -> None:
    """Answer jobs until the pipe closes. Runs in the child."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Both may reach the whole group; the parent decides. Not SIG_IGN: what the handler starts would inherit it.
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    runners: dict[tuple[str, str], Runner] = {}
    while True:
        try:
            module, qualname, row, queue, priority = pipe.recv()
        except (EOFError, OSError):
            return
        claimed = Claimed._make(row)
        try:
            runner = runners.get((module, qualname))
            if runner is None:
                runner = runners[module, qualname] = Runner(_find(module, qualname))
                runner.line = Wire(pipe)
        except Exception as error:  # noqa: BLE001 - the module may raise anything while it is imported
            pipe.send(_unimportable(claimed, error))
            continue
        pipe.send(BEGUN)
        pipe.send(runner.call(claimed, runner.context(claimed, queue, priority)))


def _end_with_parent() -> None:
    """End this child as soon as its parent is gone: soon another worker runs the job."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _find(module: str, qualname: str) -> JobType[Any]:
    found: Any = __import__(module, fromlist=["_"])
    for part in qualname.split("."):
        found = getattr(found, part)
    if not isinstance(found, JobType):
        raise ConfigError(f"{module}.{qualname} is not a job handler in the child process")
    return found


def _unimportable(claimed: Claimed, error: Exception) -> Outcome:
    def nothing() -> None: ...

    return Runner(App().job(claimed.name)(nothing)).failed(claimed, error)
