"""One connection to RabbitMQ, the channel that confirms, and questions about what is declared there."""

from __future__ import annotations

import re
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from relay.event import CONFIRMED, Event, Receipt, Unavailable

#: How long confirmations may still come after the broker said that it takes no more.
BLOCKED_S: Final = 1.0
#: Bytes that go out at once.
PIECE: Final = 64 * 1024

_ABORT: Final = struct.pack("ii", 1, 0)
_ARGUMENT = re.compile(r"inequivalent arg '(\w+)'.* but current is '([^']+)'", re.DOTALL)


class Cork:
    """Where a connection writes its frames. While it is held they go out in pieces, not each alone."""

    transport: Any

    def __init__(self) -> None:
        self._piece = bytearray()
        self._held = False

    def write(self, frame: bytes) -> None:
        """Write a frame, now or with others."""
        if not self._held:
            self.transport.write(frame)
            return
        self._piece += frame
        if len(self._piece) >= PIECE:
            self._flush()

    def hold(self) -> None:
        """Collect frames from now on."""
        self._held = True

    def release(self) -> None:
        """Write what was collected."""
        self._held = False
        self._flush()

    def _flush(self) -> None:
        piece, self._piece = self._piece, bytearray()
        if piece:
            self.transport.write(piece)


class AmqpLink:
    """One connection and the channel that confirms. `connect` is given what makes a writer of frames."""

    def __init__(self, connect: Callable[[Callable[..., Any]], Any], errors: Any) -> None:
        self._cork = Cork()
        connection = connect(self._writer)
        self.blocked = False
        self.settled: dict[int, Receipt] = {}
        self._connection = connection
        self._errors = errors
        self._channel: Any = None
        self._tag = 0
        self._waiting: dict[int, Event] = {}
        self._returned: dict[str, str] = {}
        connection.on_blocked = lambda _: self._block(blocked=True)
        connection.on_unblocked = lambda: self._block(blocked=False)

    @property
    def frame_max(self) -> int:
        """Return the longest frame that both sides take."""
        return int(self._connection.frame_max)

    @property
    def late(self) -> bool:
        """Tell whether the broker owes confirmations though it takes messages."""
        return bool(self._waiting) and not self.blocked

    def connect(self) -> None:
        """Connect and log in."""
        self._connection.connect()

    def begin(self) -> None:
        """Open the channel that confirms."""
        self._channel = channel = self._connection.channel()
        channel.confirm_select()
        channel.events["basic_ack"].add(self._on_ack)
        channel.events["basic_nack"].add(self._on_nack)
        channel.events["basic_return"].add(self._on_return)

    def publish(
        self, events: Sequence[Event], message: Callable[[Event], tuple[Any, str, str]], until: float
    ) -> dict[int, Receipt]:
        """Send events and wait for the confirmations, at most until then or a moment after a block."""
        self.settled = {}
        self._returned.clear()
        self._waiting.clear()
        self._send(events, message)
        given_up = until
        while self._waiting:
            if self.blocked:
                given_up = min(given_up, time.monotonic() + BLOCKED_S)
            left = given_up - time.monotonic()
            if left <= 0 or not self._drain(left):
                break
        reason = "the broker takes nothing for the moment" if self.blocked else "no confirmation in time"
        for event in self._waiting.values():
            self.settled[event.id] = Unavailable(reason)
        return self.settled

    def _send(self, events: Sequence[Event], message: Callable[[Event], tuple[Any, str, str]]) -> None:
        self._cork.hold()
        try:
            for event in events:
                if self.blocked:
                    break
                content, exchange, key = message(event)
                # The broker counts what it gets: a message that cannot be written down has no number.
                self._waiting[self._tag + 1] = event
                self._channel.basic_publish(content, exchange, key, mandatory=True)
                self._tag += 1
        finally:
            self._cork.release()

    def still_blocked(self) -> bool:
        """Look whether the broker takes messages again."""
        if self.blocked:
            self._drain(BLOCKED_S)
        return self.blocked

    def ask(self, question: Callable[[Any], object]) -> str | None:
        """Put a question on a channel of its own; return what the broker has against it."""
        channel = self._connection.channel()
        try:
            question(channel)
        except self._errors.ChannelError as error:
            return str(error.reply_text)
        finally:
            channel.close()
        return None

    def transient(self, what: str, name: str) -> bool:
        """Tell whether a thing that is there is not durable: a declaration that differs says in what."""
        kind = "direct"
        for _ in range(2):
            if what == "queue":
                answer = self.ask(lambda c: c.queue_declare(name, durable=True, auto_delete=False))
            else:
                answer = self.ask(
                    lambda c, k=kind: c.exchange_declare(name, k, durable=True, auto_delete=False)  # type: ignore[misc]
                )
            found = _ARGUMENT.search(answer or "")
            if found is None or found[1] != "type":
                return found is not None and found[1] == "durable"
            kind = found[2]
        return False

    def drop(self) -> None:
        """Close the socket at once; what the broker has not read is dropped with it."""
        if self._waiting and self._connection.connected:
            with suppress(OSError):
                self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        self._connection.collect()

    def _writer(self, connection: Any, transport: Any) -> Any:
        """Make the connection's writer of frames."""
        from amqp.method_framing import frame_writer

        self._cork.transport = transport
        return frame_writer(connection, self._cork)

    def _drain(self, seconds: float) -> bool:
        try:
            self._connection.drain_events(timeout=seconds)
        except TimeoutError:
            return False
        return True

    def _block(self, *, blocked: bool) -> None:
        self.blocked = blocked

    def _on_ack(self, tag: int, multiple: bool) -> None:  # noqa: FBT001 - the library's signature
        for event in self._taken(tag, multiple=multiple):
            returned = self._returned.pop(event.idempotency_key, None)
            self.settled[event.id] = Unavailable(returned) if returned is not None else CONFIRMED

    def _on_nack(self, tag: int, multiple: bool) -> None:  # noqa: FBT001 - the library's signature
        for event in self._taken(tag, multiple=multiple):
            self.settled[event.id] = Unavailable(
                "refused by the queue (nack): it is full, or its leader is gone"
            )

    def _on_return(self, _error: object, exchange: str, key: str, message: Any) -> None:
        place = f"exchange {exchange!r} with routing key {key!r}" if exchange else f"queue {key!r}"
        reason = f"no queue takes it: {place} leads nowhere; bind a queue"
        self._returned[message.properties["message_id"]] = reason

    def _taken(self, tag: int, *, multiple: bool) -> list[Event]:
        tags = [t for t in self._waiting if t <= tag] if multiple else [tag]
        return [self._waiting.pop(t) for t in tags if t in self._waiting]
