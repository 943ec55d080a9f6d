"""The notebook: what running handlers say about themselves, on its way to the database.

Handlers leave progress here and go on; the pulse writes it once a second. A checkpoint, or a look at the last one,
wakes the pulse and waits for its answer. Everything goes through the pulse's connection: handlers need none of their
own, and the engine writes no row more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from pgqueue.errors import DatabaseUnreachable, LeaseLost
from pgqueue.job import Claim
from pgqueue.pipeline import Pipeline
from pgqueue.progress import Note, checkpoint, progress, state
from pgqueue.run import safe
from pgqueue.statement import Statement

#: Seconds for which a handler waits for its checkpoint to be written.
PATIENCE: Final = 30.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """A checkpoint to write, or one to read if there is no text."""

    claim: Claim
    text: str | None
    answer: Future[Any]


class Notebook:
    """Progress and checkpoints of one process; handlers may use it from any thread."""

    def __init__(self) -> None:
        self._notes: dict[int, Note] = {}
        self._asked: deque[_Asked] = deque()
        #: Wakes whoever calls `answer`; the pulse sets it.
        self.ring: Callable[[], None] = lambda: None

    def progress(self, claim: Claim, fraction: float, note: str) -> None:
        """Note how far a job is; the latest word counts."""
        self._notes[claim.id] = Note(claim, fraction, safe(note))

    def checkpoint(self, claim: Claim, state: str) -> None:
        """Write the state of a job and wait until it is committed."""
        _kept(claim, _wait(self._ask(claim, state)))

    async def acheckpoint(self, claim: Claim, state: str) -> None:
        """Write the state of a job without holding up the event loop."""
        _kept(claim, await _await(self._ask(claim, state)))

    def state(self, claim: Claim) -> str | None:
        """Read the last checkpoint of a job."""
        found: str | None = _wait(self._ask(claim, None))
        return found

    async def astate(self, claim: Claim) -> str | None:
        """Read the last checkpoint of a job without holding up the event loop."""
        found: str | None = await _await(self._ask(claim, None))
        return found

    def answer(self, connection: psycopg.Connection[Any]) -> None:
        """Write and read what handlers wait for. If the connection breaks, they go on waiting for the next one."""
        for _ in range(
            len(self._asked)
        ):  # what comes in meanwhile waits: heartbeats have their turn in between
            asked = self._asked.popleft()
            if asked.answer.cancelled():
                continue
            try:
                with Pipeline(connection) as p:
                    pending = p.send(_statement(asked))
                found = pending.result()
            except psycopg.Error as error:
                if connection.closed or isinstance(error, psycopg.OperationalError):
                    self._asked.appendleft(asked)
                    raise
                _settle(asked.answer, error)
            else:
                _settle(asked.answer, found)

    def write(self, connection: psycopg.Connection[Any]) -> None:
        """Write the progress that came in since the last time."""
        if not self._notes:
            return
        notes, self._notes = self._notes, {}
        with Pipeline(connection) as p:
            p.send(progress(list(notes.values())))

    def _ask(self, claim: Claim, text: str | None) -> Future[Any]:
        answer: Future[Any] = Future()
        self._asked.append(_Asked(claim, text, answer))
        self.ring()
        return answer


def _statement(asked: _Asked) -> Statement[Any]:
    return state(asked.claim.id) if asked.text is None else checkpoint(asked.claim, asked.text)


def _settle(answer: Future[Any], found: Any) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    if isinstance(found, BaseException):
        answer.set_exception(found)
    else:
        answer.set_result(found)


def _kept(claim: Claim, answer: Any) -> None:
    if not answer:
        raise LeaseLost(claim.id, claim.lease)


def _wait(answer: Future[Any]) -> Any:
    try:
        return answer.result(PATIENCE)
    except NotInTime as error:
        answer.cancel()
        raise _away() from error


async def _await(answer: Future[Any]) -> Any:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(answer), PATIENCE)
    except TimeoutError as error:
        raise _away() from error


def _away() -> DatabaseUnreachable:
    return DatabaseUnreachable(
        "the worker's DSN", f"a checkpoint waited for {PATIENCE:g} s; the attempt should end"
    )
