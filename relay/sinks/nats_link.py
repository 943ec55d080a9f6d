"""One connection to NATS: messages out, the stream's confirmations in."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from relay.event import Event, Unavailable
from relay.sinks import SinkUnavailable

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

T = TypeVar("T")

CLOSE_S: Final = 1.0

_NO_RESPONDERS: Final = "503"
_SUBJECT_IN_ERROR = re.compile(r'publish to "([^"]*)"', re.IGNORECASE)


class AckError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class Ack(msgspec.Struct):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: AckError | None = None


class Message(msgspec.Struct):
    event: Event
    subject: str
    headers: dict[str, str]
    body: bytes

    @property
    def size(self) -> int:
        return len(self.body) + sum(len(name) + len(value) + 4 for name, value in self.headers.items()) + 12


class NatsLink:
    """One connection: its inbox for confirmations, and who waits for which."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.trouble: str | None = None
        self._waiting: dict[str, tuple[str, asyncio.Future[Ack | Unavailable]]] = {}
        self._count = 0
        self._inbox = ""

    async def listen(self) -> None:
        """Subscribe to the confirmations."""
        self._inbox = self.client.new_inbox()
        await self.client.subscribe(f"{self._inbox}.*", cb=self._on_ack)

    async def publish(self, messages: Sequence[Message], until: float) -> list[Ack | Unavailable]:
        """Send messages; return the answers, Unavailable for what was not answered in time."""
        loop = asyncio.get_running_loop()
        asked: list[asyncio.Future[Ack | Unavailable]] = []
        try:
            async with asyncio.timeout(until - time.monotonic()):
                for message in messages:
                    self._count += 1
                    reply = f"{self._inbox}.{self._count}"
                    answer = loop.create_future()
                    asked.append(answer)
                    self._waiting[reply] = (message.subject, answer)
                    await self.client.publish(message.subject, message.body, reply, message.headers)
                await asyncio.wait(asked)
        except TimeoutError:
            self._fail(Unavailable("no confirmation in time"))
        except Exception as error:  # noqa: BLE001 - the client's own errors, and a connection that broke
            self.trouble = self.trouble or said(error)
            self._fail(Unavailable(self.trouble))
        self._waiting.clear()
        unsent = Unavailable(self.trouble or "not sent in time")
        return [a.result() if a.done() else unsent for a in asked] + [unsent] * (len(messages) - len(asked))

    async def close(self) -> None:
        """Close the connection, not waiting for a server that is away."""
        with suppress(Exception):  # whatever it says of a farewell, the connection is dropped
            async with asyncio.timeout(CLOSE_S):
                await self.client.close()

    async def on_error(self, error: Exception) -> None:
        """Remember what the client tells of; a subject that is forbidden gets its answer from it."""
        told = said(error)
        found = _SUBJECT_IN_ERROR.search(told)
        if found is None:
            self.trouble = told
            return
        for subject, answer in self._waiting.values():
            if subject.lower() == found[1].lower() and not answer.done():
                answer.set_result(Unavailable(told))

    async def on_closed(self) -> None:
        """Tell everybody who waits that the connection is gone."""
        last = self.client.last_error
        self.trouble = self.trouble or (said(last) if last else "the connection was lost")
        self._fail(Unavailable(self.trouble))

    def _fail(self, receipt: Unavailable) -> None:
        for _, answer in self._waiting.values():
            if not answer.done():
                answer.set_result(receipt)

    async def _on_ack(self, message: Msg) -> None:
        subject, answer = self._waiting.pop(message.subject, ("", None))
        if answer is None or answer.done():
            return
        if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
            reason = f"no stream takes the subject {subject}: create one with this subject in JetStream"
            answer.set_result(Unavailable(reason))
            return
        try:
            answer.set_result(msgspec.json.decode(message.data, type=Ack))
        except msgspec.DecodeError as error:
            answer.set_result(Unavailable(f"{subject}: not a confirmation: {error}"))


class LoopThread:
    """An event loop in a thread of its own: it answers the server's pings while nothing is published."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay-nats", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], until: float) -> T:
        """Run a coroutine there and wait for it, at most until then."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            running.cancel()
            raise SinkUnavailable("nats", "no answer in time") from None

    def stop(self, last: Coroutine[Any, Any, None] | None) -> None:
        """Run a last coroutine, not longer than a moment; then end the loop and the thread."""
        asyncio.run_coroutine_threadsafe(self._end(last), self._loop).result(2 * CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self, last: Coroutine[Any, Any, None] | None) -> None:
        if last is not None:
            await asyncio.wait([asyncio.ensure_future(last)], timeout=CLOSE_S)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CLOSE_S / 2)


def said(error: BaseException) -> str:
    """Return what an error says, its name where it says nothing."""
    return str(error) or type(error).__name__
