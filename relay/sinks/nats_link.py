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

#: Bytes around the id and the other headers: first line, name of the id, line ends.
_AROUND: Final = len("NATS/1.0\r\nNats-Msg-Id: \r\n\r\n")

_NO_RESPONDERS: Final = "503"
_SUBJECT_IN_ERROR = re.compile(r'publish to "([^"]*)"', re.IGNORECASE)


class AckError(msgspec.Struct):
    """Why a stream did not store a message."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class Ack(msgspec.Struct):
    """A stream's answer."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: AckError | None = None


class Message(msgspec.Struct):
    """One message to publish. `lines` are its headers but Nats-Msg-Id, each with its line end."""

    event: Event
    subject: str
    id: str
    lines: str
    body: bytes

    @property
    def size(self) -> int:
        """What the server counts: headers and payload."""
        lines = self.lines if self.lines.isascii() else self.lines.encode()
        return _AROUND + len(self.id) + len(lines) + len(self.body)

    def line(self, reply: str) -> bytes:
        """Return the message as the protocol has it."""
        head = f"NATS/1.0\r\nNats-Msg-Id: {self.id}\r\n{self.lines}\r\n".encode()
        order = f"HPUB {self.subject} {reply} {len(head)} {len(head) + len(self.body)}\r\n".encode()
        return b"%b%b%b\r\n" % (order, head, self.body)


_decode = msgspec.json.Decoder(Ack).decode


class NatsLink:
    """One connection: its inbox for confirmations, and who waits for which."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.trouble: str | None = None
        self._answers: list[Ack | Unavailable | None] = []
        self._waiting: dict[str, int] = {}
        self._sent: Sequence[Message] = ()
        self._all: asyncio.Future[None] | None = None
        self._inbox = ""
        self._round = 0

    async def listen(self) -> None:
        """Subscribe to the confirmations."""
        self._inbox = self.client.new_inbox()
        await self.client.subscribe(f"{self._inbox}.*", cb=self._on_ack)

    async def publish(self, messages: Sequence[Message], until: float) -> list[Ack | Unavailable]:
        """Send messages; return the answers, Unavailable for what was not answered in time."""
        self._round += 1
        replies = [f"{self._inbox}.{self._round}-{place}" for place in range(len(messages))]
        self._sent = messages
        self._answers = [None] * len(messages)
        self._waiting = dict(zip(replies, range(len(messages)), strict=True))
        self._all = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await self._write(b"".join(map(Message.line, messages, replies)))
                await self._all
        except TimeoutError:
            self._fail("no confirmation in time")
        except Exception as error:  # noqa: BLE001 - the client's own errors, and a connection that broke
            self.trouble = self.trouble or said(error)
            self._fail(self.trouble)
        return [answer for answer in self._answers if answer is not None]

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
        for reply, place in list(self._waiting.items()):
            if self._sent[place].subject.lower() == found[1].lower():
                self._settle(reply, Unavailable(told))

    async def on_closed(self) -> None:
        """Tell everybody who waits that the connection is gone."""
        last = self.client.last_error
        self.trouble = self.trouble or (said(last) if last else "the connection was lost")
        self._fail(self.trouble)

    async def _write(self, lines: bytes) -> None:
        """Write protocol lines; the client's publish builds each header anew, which costs more than all the rest."""
        if self.client.is_closed:
            raise ConnectionError(self.trouble or "the connection was lost")
        await self.client._send_command(lines)  # noqa: SLF001 - there is no public way to send a line
        await self.client._flush_pending()  # noqa: SLF001 - what publish does next

    def _fail(self, reason: str) -> None:
        receipt = Unavailable(reason)
        for reply in list(self._waiting):
            self._settle(reply, receipt)

    def _settle(self, reply: str, answer: Ack | Unavailable) -> None:
        place = self._waiting.pop(reply, None)
        if place is None:
            return  # the answer to an earlier round
        self._answers[place] = answer
        if not self._waiting and self._all is not None and not self._all.done():
            self._all.set_result(None)

    async def _on_ack(self, message: Msg) -> None:
        if message.headers and message.headers.get("Status") == _NO_RESPONDERS:
            place = self._waiting.get(message.subject, 0)
            subject = self._sent[place].subject if self._sent else ""
            reason = f"no stream takes the subject {subject}: create one with this subject in JetStream"
            self._settle(message.subject, Unavailable(reason))
            return
        try:
            self._settle(message.subject, _decode(message.data))
        except msgspec.DecodeError as error:
            self._settle(message.subject, Unavailable(f"not a confirmation: {error}"))


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
        end = asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        with suppress(TimeoutError):  # a process that was paused meanwhile ends all the same
            end.result(2 * CLOSE_S)
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
