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
import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, HELD, Event, Receipt, Rejected, Unavailable, attributes
from relay.sinks import SinkContext, SinkUnavailable
from relay.sinks.destination import Address, Destination
from relay.sinks.nats_link import CLOSE_S, Ack, LoopThread, Message, NatsLink, said
from relay.sinks.window import windows

PORT: Final = 4222
OPTIONS: Final = ("stream", "tls", "ca", "creds", "token")
CONNECT_S: Final = 5.0
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
_BREAK: Final = re.compile(r"\s")
_TOKEN: Final = re.compile(r"[^*>]+").fullmatch
_SAFE: Final = re.compile(r"[!#$&-~]*").fullmatch


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
        stream = address.options.get("stream")
        if _BREAK.search(address.path) or _BREAK.search(stream or ""):
            raise ConfigError(f"sink {self.name}: a subject or stream holds no white space")
        if not all(map(_TOKEN, address.path.split("."))):
            raise ConfigError(
                f"sink {self.name}: {address.path!r} is no subject to publish to: tokens between dots, none empty, "
                "without the wildcards * and >"
            )
        self._subject = Destination(self.name, address.path, _token)
        self._expected = f"Nats-Expected-Stream: {stream}\r\n" if stream is not None else ""
        self._tls = address.flag("tls", default="ca" in address.options)
        self._source = context.source
        self._safe_source = _safe(context.source)
        self._own_id = quote(context.source, safe="/:.-_")
        self._timeout = context.send_timeout
        self._thread: LoopThread | None = None
        self._link: NatsLink | None = None

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Send events in windows and wait for the stream's confirmations."""
        if not events:
            return []
        until = time.monotonic() + self._timeout
        thread = self._thread = self._thread or LoopThread()
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

    async def _open(self) -> NatsLink:
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
        link = NatsLink(self._make())
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
            raise SinkUnavailable(self.name, f"no connection: {link.trouble or said(error)}") from error
        return link

    async def _send(self, link: NatsLink, messages: list[Message], until: float) -> dict[int, Receipt]:
        receipts: dict[int, Receipt] = {}
        again: list[Message] = []
        for window in windows(messages, _size, most=WINDOW, most_bytes=WINDOW_BYTES):
            if time.monotonic() >= until or link.client.is_closed:
                break
            for message, ack in zip(window, await link.publish(window, until), strict=True):
                receipts[message.event.id] = self._receipt(message, ack)
                if isinstance(ack, Ack) and ack.duplicate and not await self._is_ours(link, ack):
                    again.append(message)
        for message in again:
            message.id += f"@{self._own_id}"
        for window in windows(again, _size, most=WINDOW, most_bytes=WINDOW_BYTES):
            for message, ack in zip(window, await link.publish(window, until), strict=True):
                receipts[message.event.id] = self._receipt(message, ack)
        return receipts

    async def _is_ours(self, link: NatsLink, ack: Ack) -> bool:
        """Tell whether the stored message that was repeated came from the same outbox."""
        try:
            found = await link.client.jetstream(timeout=LOOK_S).get_msg(ack.stream, ack.seq)
        except Exception:  # noqa: BLE001 - gone, forbidden, late: then it is not known
            return False
        return (found.headers or {}).get("ce-source") == self._safe_source

    def _message(self, event: Event) -> Message:
        context = attributes(event, self._source)
        lines = [f"content-type: {context.pop('datacontenttype')}\r\n{self._expected}"]
        plain = _SAFE("".join(context.values())) is not None
        for name, value in context.items():
            safe = value if plain else _safe(value)
            lines.append(f"ce-{name}: {safe}\r\n")
            if name in ("traceparent", "tracestate"):
                lines.append(f"{name}: {safe}\r\n")
        return Message(
            event, self._subject.of(event), event.idempotency_key, "".join(lines), event.payload.encode()
        )

    @staticmethod
    def _problem(message: Message, limit: int) -> str | None:
        if message.size > limit:
            return (
                f"message has {message.size} bytes with its headers, the server takes {limit} (max_payload)"
            )
        if len(message.subject) > SUBJECT_BYTES:
            return f"subject has {len(message.subject)} bytes, more than {SUBJECT_BYTES}"
        return None

    @staticmethod
    def _receipt(message: Message, ack: Ack | Unavailable) -> Receipt:
        if isinstance(ack, Unavailable):
            return ack
        if ack.error is None:
            return CONFIRMED
        reason = f"{message.subject}: {ack.error.description} (JetStream error {ack.error.err_code})"
        return Rejected(reason) if ack.error.err_code in REFUSED else Unavailable(reason)


def open_sink(url: str, context: SinkContext) -> NatsSink:
    """Return the sink for a `nats:` URL."""
    try:
        return NatsSink(url, context)
    except ModuleNotFoundError as error:
        raise ConfigError(f"sink nats: needs {error.name}; install pgqueue-relay[nats]") from error


def _safe(value: str) -> str:
    return value if _SAFE(value) else quote(value, safe=_PLAIN, errors="replace")


def _size(message: Message) -> int:
    return message.size


def _token(place: str, value: str) -> str:
    """Write a value so that it can stand in a subject."""
    whole = place == "event_type" and all(value.split("."))
    safe = quote(value, safe="" if not whole else ".", errors="replace")
    return (safe if whole else safe.replace(".", "%2E")) or "-"
