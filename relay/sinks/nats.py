"""`nats:`: NATS JetStream, one message per event, confirmed by the stream that stored it.

    nats://user:password@host:4222,host2:4222/shop.{event_type}?stream=SHOP

The path is the subject. Dots of an event type divide it into tokens; whatever else a token may not hold is
written as %XX, an empty value as "-". The stream must be there and take the subject. Options: stream (refuse a
message that another stream would store), tls, ca (file), creds (file), token.

CloudEvents NATS binding, binary mode: attributes in `ce-` headers. `Nats-Msg-Id: outbox:<id>` lets the stream
drop repetitions within its duplicate window. Another outbox may feed the same stream, so what the stream calls
a repetition is looked at: if it was the other's event, or nobody can say, this one goes again under an id of
its own.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote

import msgspec

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, HELD, Event, Receipt, Rejected, Unavailable, attributes
from relay.sinks import SinkContext, SinkUnavailable
from relay.sinks.destination import Address, Destination

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

T = TypeVar("T")

PORT: Final = 4222
OPTIONS: Final = ("stream", "tls", "ca", "creds", "token")
CONNECT_S: Final = 5.0
CLOSE_S: Final = 1.0
LOOK_S: Final = 5.0
#: Not yet confirmed at a time: what a server queues for a stream without refusing.
WINDOW: Final = 1000
WINDOW_BYTES: Final = 16 * 1024 * 1024
#: A longer protocol line ends the connection (the server's max_control_line is 4096).
SUBJECT_BYTES: Final = 3500
#: JetStream error codes: too large for the stream, headers too large.
REFUSED: Final = frozenset({10054, 10097})

#: What the HTTP binding lets stand as it is: printable ASCII but space, double quote and percent.
_PLAIN: Final = "!#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
_NO_RESPONDERS: Final = "503"
_SUBJECT_IN_ERROR = re.compile(r'publish to "([^"]*)"', re.IGNORECASE)


class _Error(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _Error | None = None


class _Message(msgspec.Struct):
    event: Event
    subject: str
    headers: dict[str, str]
    body: bytes

    @property
    def size(self) -> int:
        return len(self.body) + sum(len(name) + len(value) + 4 for name, value in self.headers.items()) + 12


class NatsSink:
    """Publishes to JetStream. A message can be refused after a later one was stored: one at a time for each key."""

    ordered = False
    marks = False

    def __init__(self, url: str, context: SinkContext) -> None:
        from nats.aio.client import Client

        self._make = Client
        self._address = address = Address(url, port=PORT, known=OPTIONS)
        self.name = address.shown
        if not address.path:
            raise ConfigError(f"sink {self.name} has no subject; write nats://host/orders.{{event_type}}")
        self._subject = Destination(self.name, address.path, _token)
        self._stream = address.options.get("stream")
        self._tls = address.flag("tls", default="ca" in address.options)
        self._source = context.source
        self._own_id = quote(context.source, safe="/:.-_")
        self._timeout = context.send_timeout
        self._thread: _LoopThread | None = None
        self._link: _Link | None = None

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Send events in windows and wait for the stream's confirmations."""
        if not events:
            return []
        until = time.monotonic() + self._timeout
        thread = self._thread = self._thread or _LoopThread()
        if self._link is None or self._link.client.is_closed:
            self._link = thread.run(self._open(), until + CLOSE_S)
        link = self._link
        receipts: dict[int, Receipt] = {}
        messages = []
        for event in events:
            message = self._message(event)
            problem = self._problem(message, link.client.max_payload)
            if problem is None:
                messages.append(message)
            else:
                receipts[event.id] = Rejected(problem)
        receipts.update(thread.run(self._send(link, messages, until), until + CLOSE_S))
        if link.client.is_closed and not any(r is CONFIRMED for r in receipts.values()):
            raise SinkUnavailable(self.name, link.trouble or "the connection is gone")
        return [receipts.get(event.id, HELD) for event in events]

    def close(self) -> None:
        """Drop the connection and its thread."""
        thread, self._thread = self._thread, None
        link, self._link = self._link, None
        if thread is not None:
            thread.stop(link.close() if link is not None else None)

    async def _open(self) -> _Link:
        address = self._address
        options: dict[str, Any] = {}
        if self._tls:
            options["tls"] = ssl.create_default_context(cafile=address.options.get("ca"))
        if address.user is not None and address.password is not None:
            options |= {"user": address.user, "password": address.password}
        if token := address.options.get("token") or (None if address.password else address.user):
            options["token"] = token
        if creds := address.options.get("creds"):
            options["user_credentials"] = creds
        link = _Link(self._make())
        servers = [f"nats://{f'[{host}]' if ':' in host else host}:{port}" for host, port in address.hosts]
        try:
            async with asyncio.timeout(min(CONNECT_S, self._timeout)):
                await link.client.connect(
                    servers,
                    name="outbox-relay",
                    error_cb=link.on_error,
                    closed_cb=link.on_closed,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=1,
                    ping_interval=10,
                    **options,
                )
                await link.listen()
        except Exception as error:
            # Whatever stands in the way of a connection (refused, TLS, login, no such host) may be put right.
            await link.close()
            raise SinkUnavailable(self.name, f"no connection: {link.trouble or _text(error)}") from error
        return link

    async def _send(self, link: _Link, messages: list[_Message], until: float) -> dict[int, Receipt]:
        receipts: dict[int, Receipt] = {}
        again: list[_Message] = []
        for window in _windows(messages):
            if time.monotonic() >= until or link.client.is_closed:
                break
            for message, ack in zip(window, await link.publish(window, until), strict=True):
                receipts[message.event.id] = self._receipt(message, ack)
                if isinstance(ack, _Ack) and ack.duplicate and not await self._is_ours(link, message, ack):
                    again.append(message)
        for message in again:
            message.headers["Nats-Msg-Id"] += f"@{self._own_id}"
        for window in _windows(again):
            for message, ack in zip(window, await link.publish(window, until), strict=True):
                receipts[message.event.id] = self._receipt(message, ack)
        return receipts

    async def _is_ours(self, link: _Link, message: _Message, ack: _Ack) -> bool:
        """Tell whether the stored message that this one repeats came from the same outbox."""
        try:
            found = await link.client.jetstream(timeout=LOOK_S).get_msg(ack.stream, ack.seq)
        except Exception:  # noqa: BLE001 - gone, forbidden, late: then it is not known
            return False
        return (found.headers or {}).get("ce-source") == message.headers["ce-source"]

    def _message(self, event: Event) -> _Message:
        context = attributes(event, self._source)
        headers = {"Nats-Msg-Id": event.idempotency_key, "content-type": context.pop("datacontenttype")}
        if self._stream is not None:
            headers["Nats-Expected-Stream"] = self._stream
        for name, value in context.items():
            safe = quote(value, safe=_PLAIN, errors="replace")
            headers[f"ce-{name}"] = safe
            if name in ("traceparent", "tracestate"):
                headers[name] = safe
        return _Message(event, self._subject.of(event), headers, event.payload.encode())

    @staticmethod
    def _problem(message: _Message, limit: int) -> str | None:
        if message.size > limit:
            return (
                f"message has {message.size} bytes with its headers, the server takes {limit} (max_payload)"
            )
        if len(message.subject) > SUBJECT_BYTES:
            return f"subject has {len(message.subject)} bytes, more than {SUBJECT_BYTES}"
        return None

    @staticmethod
    def _receipt(message: _Message, ack: _Ack | Unavailable) -> Receipt:
        if isinstance(ack, Unavailable):
            return ack
        if ack.error is None:
            return CONFIRMED
        reason = f"{message.subject}: {ack.error.description} (JetStream error {ack.error.err_code})"
        return Rejected(reason) if ack.error.err_code in REFUSED else Unavailable(reason)


class _Link:
    """One connection: its inbox for confirmations, and who waits for which."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.trouble: str | None = None
        self._waiting: dict[str, tuple[str, asyncio.Future[_Ack | Unavailable]]] = {}
        self._count = 0
        self._inbox = ""

    async def listen(self) -> None:
        """Subscribe to the confirmations."""
        self._inbox = self.client.new_inbox()
        await self.client.subscribe(f"{self._inbox}.*", cb=self._on_ack)

    async def publish(self, messages: Sequence[_Message], until: float) -> list[_Ack | Unavailable]:
        """Send messages; return the answers, Unavailable for what was not answered in time."""
        loop = asyncio.get_running_loop()
        asked: list[asyncio.Future[_Ack | Unavailable]] = []
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
            self.trouble = self.trouble or _text(error)
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
        text = _text(error)
        found = _SUBJECT_IN_ERROR.search(text)
        if found is None:
            self.trouble = text
            return
        for subject, answer in self._waiting.values():
            if subject.lower() == found[1].lower() and not answer.done():
                answer.set_result(Unavailable(text))

    async def on_closed(self) -> None:
        """Tell everybody who waits that the connection is gone."""
        last = self.client.last_error
        self.trouble = self.trouble or (_text(last) if last else "the connection was lost")
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
            answer.set_result(msgspec.json.decode(message.data, type=_Ack))
        except msgspec.DecodeError as error:
            answer.set_result(Unavailable(f"{subject}: not a confirmation: {error}"))


class _LoopThread:
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


def open_sink(url: str, context: SinkContext) -> NatsSink:
    """Return the sink for a `nats:` URL."""
    try:
        return NatsSink(url, context)
    except ModuleNotFoundError as error:
        raise ConfigError(f"sink nats: needs {error.name}; install pgqueue-relay[nats]") from error


def _windows(messages: Sequence[_Message]) -> list[list[_Message]]:
    """Cut messages into windows by number and by bytes."""
    windows: list[list[_Message]] = []
    size = 0
    for message in messages:
        if not windows or len(windows[-1]) >= WINDOW or size + message.size > WINDOW_BYTES:
            windows.append([])
            size = 0
        windows[-1].append(message)
        size += message.size
    return windows


def _token(place: str, value: str) -> str:
    """Write a value so that it can stand in a subject."""
    whole = place == "event_type" and all(value.split("."))
    safe = quote(value, safe="" if not whole else ".", errors="replace")
    return (safe if whole else safe.replace(".", "%2E")) or "-"


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
