"""`amqp:`: RabbitMQ (AMQP 0-9-1), one persistent message per event, routed and confirmed.

    amqp://user:password@host:5672/vhost?exchange=shop&routing_key={event_type}      amqps: the same over TLS
    amqp://user:password@host/vhost?queue=orders

Every message is mandatory: one that no queue takes comes back and is not confirmed. Exchange or queue must be
there and durable; both are looked at when a connection opens. Options: exchange and routing_key (which may have
places; {event_type} by default), or queue; max_bytes (what the broker takes, its max_message_size), durable
(false lets a transient exchange or queue pass), ca (file).

CloudEvents AMQP binding, binary mode: attributes in headers that begin with `cloudEvents_`; `message_id` is
outbox:<id>. RabbitMQ may refuse a message and confirm a later one, so the relay gives one at a time of each
aggregate. For order at the consumer: one queue, or a consistent-hash exchange on {aggregate_id}, with
single active consumers.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, HELD, Event, Receipt, Rejected, attributes
from relay.sinks import SinkContext, SinkUnavailable
from relay.sinks.amqp_link import AmqpLink
from relay.sinks.destination import Address, Destination
from relay.sinks.window import windows

PORT: Final = 5672
TLS_PORT: Final = 5671
OPTIONS: Final = ("exchange", "routing_key", "queue", "max_bytes", "durable", "ca")
CONNECT_S: Final = 5.0
#: Not yet confirmed at a time.
WINDOW: Final = 1000
WINDOW_BYTES: Final = 16 * 1024 * 1024
#: RabbitMQ 4 closes the channel on a larger one unless told otherwise (3 takes 128 MiB).
MAX_BYTES: Final = 16 * 1024 * 1024
#: A short string of the protocol.
SHORT: Final = 255
FRAME_SLACK: Final = 1024
REFUSED: Final = 406

_SILENCE: Final[int | None] = getattr(socket, "TCP_USER_TIMEOUT", None)


class AmqpSink:
    """Publishes to one exchange or queue."""

    ordered = False
    marks = False

    def __init__(self, url: str, context: SinkContext) -> None:
        import amqp

        self._amqp = amqp
        secure = url.lower().startswith("amqps:")
        self._address = address = Address(url, port=TLS_PORT if secure else PORT, known=OPTIONS)
        self.name = address.shown
        options = address.options
        if ("exchange" in options) == ("queue" in options):
            raise ConfigError(f"sink {self.name}: give either exchange=.. or queue=..")
        if "queue" in options and "routing_key" in options:
            raise ConfigError(f"sink {self.name}: queue=.. has no routing_key; give exchange=.. to use one")
        if options.get("queue") == "":
            raise ConfigError(f"sink {self.name}: queue= names no queue")
        self._queue = options.get("queue")
        self._exchange = options.get("exchange", "")
        self._key = Destination(self.name, self._queue or options.get("routing_key", "{event_type}"))
        if not self._exchange and self._key.fixed:  # the default exchange leads to the queue of that name
            self._queue = self._key.text
        self._durable = address.flag("durable", default=True)
        self._max_bytes = address.number("max_bytes", MAX_BYTES)
        self._source = context.source
        self._timeout = context.send_timeout
        self._link: AmqpLink | None = None

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Send events in windows and wait for the broker's confirmations."""
        if not events:
            return []
        until = time.monotonic() + self._timeout
        link = self._link = self._link or self._open()
        if link.still_blocked():
            raise SinkUnavailable(
                self.name, "the broker takes nothing for the moment: it is low on memory or disk"
            )
        receipts: dict[int, Receipt] = {}
        fit: list[Event] = []
        for event in events:
            problem = self._problem(event, link.frame_max)
            if problem is None:
                fit.append(event)
            else:
                receipts[event.id] = Rejected(problem)
        self._send(fit, receipts, until)
        return [receipts.get(event.id, HELD) for event in events]

    def close(self) -> None:
        """Drop the connection."""
        link, self._link = self._link, None
        if link is not None:
            link.drop()

    def _send(self, events: Sequence[Event], receipts: dict[int, Receipt], until: float) -> None:
        amqp = self._amqp
        for window in windows(events, _size, most=WINDOW, most_bytes=WINDOW_BYTES):
            if time.monotonic() >= until or (self._link is not None and self._link.blocked):
                break
            try:
                link = self._link = self._link or self._open()
                receipts.update(link.publish(window, self._message, until))
                if link.late:
                    self.close()
                    break
            except amqp.exceptions.ChannelError as error:
                # The channel is gone, and with it what it had not confirmed yet.
                self._after_refusal(error, window, receipts, until)
            except (amqp.exceptions.AMQPError, OSError) as error:
                receipts.update(self._settled())
                self.close()
                if any(receipt is CONFIRMED for receipt in receipts.values()):
                    return
                raise SinkUnavailable(self.name, _text(error)) from error
            except Exception:
                self.close()  # half a message may have been written
                raise

    def _after_refusal(
        self, error: Any, window: Sequence[Event], receipts: dict[int, Receipt], until: float
    ) -> None:
        """Find the event that the broker closed the channel for: each of the window alone."""
        receipts.update(self._settled())
        self.close()
        if error.reply_code != REFUSED:
            raise SinkUnavailable(self.name, f"{error.reply_code} {error.reply_text}") from error
        left = [event for event in window if event.id not in receipts]
        if len(left) == 1:
            receipts[left[0].id] = Rejected(f"{error.reply_code} {error.reply_text}")
            return
        for event in left:
            self._send([event], receipts, until)

    def _settled(self) -> dict[int, Receipt]:
        return self._link.settled if self._link is not None else {}

    def _message(self, event: Event) -> tuple[Any, str, str]:
        context = attributes(event, self._source)
        content_type = context.pop("datacontenttype")
        headers = {f"cloudEvents_{name}": value for name, value in context.items()}
        headers |= {name: context[name] for name in ("traceparent", "tracestate") if name in context}
        properties: dict[str, Any] = (
            {"type": event.event_type} if len(event.event_type.encode()) <= SHORT else {}
        )
        message = self._amqp.Message(
            event.payload.encode(),
            content_type=content_type,
            delivery_mode=2,
            message_id=event.idempotency_key,
            timestamp=max(0, int(event.created_at.timestamp())),  # the protocol knows no time before 1970
            application_headers=headers,
            **properties,
        )
        return message, self._exchange, self._key.of(event)

    def _problem(self, event: Event, frame_max: int) -> str | None:
        body = len(event.payload.encode())
        if body > self._max_bytes:
            return f"payload has {body} bytes, more than {self._max_bytes} (max_bytes of this sink)"
        if len(key := self._key.of(event).encode()) > SHORT:
            return f"routing key has {len(key)} bytes, more than {SHORT}"
        given = sum(len(str(value)) for value in event.headers.values()) + len(event.event_type)
        if 4 * (given + 2 * len(event.aggregate_id or "")) < frame_max // 2:
            return None  # far from the limit whatever the characters
        message, _, _ = self._message(event)
        headers = sum(len(n) + len(v.encode()) + 6 for n, v in message.application_headers.items())
        return (
            f"headers have {headers} bytes, more than a frame of {frame_max} holds"
            if headers > frame_max - FRAME_SLACK
            else None
        )

    def _open(self) -> AmqpLink:
        problems = []
        for host, port in random.sample(self._address.hosts, len(self._address.hosts)):
            link = AmqpLink(partial(self._connection, host, port), self._amqp.exceptions)
            try:
                link.connect()
                self._look_at_topology(link)
                link.begin()
            except (self._amqp.exceptions.AMQPError, OSError) as error:
                link.drop()
                problems.append(f"{host}:{port}: {_text(error)}")
            except SinkUnavailable:
                link.drop()
                raise
            else:
                return link
        raise SinkUnavailable(self.name, "no connection: " + "; ".join(problems))

    def _connection(self, host: str, port: int, writer: Callable[..., Any]) -> Any:
        address = self._address
        secure: Any = False
        if address.scheme == "amqps":
            trust = {"check_hostname": True, "cafile": address.options.get("ca")}
            secure = {"context": trust, "server_hostname": host}
        return self._amqp.Connection(
            host=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            userid=address.user or "guest",
            password=address.password or "guest",
            login_method="PLAIN",
            virtual_host=address.path or "/",
            ssl=secure,
            connect_timeout=min(CONNECT_S, self._timeout),
            read_timeout=self._timeout,
            write_timeout=self._timeout,
            # The library's second of silence is less than a broker's pause.
            socket_settings={_SILENCE: int(1000 * self._timeout)} if _SILENCE is not None else {},
            # Nobody would send heartbeats while nothing is published; TCP keep-alive finds a dead peer.
            heartbeat=0,
            client_properties={"connection_name": "outbox-relay"},
            frame_writer=writer,
        )

    def _look_at_topology(self, link: AmqpLink) -> None:
        """Check that exchange or queue is there and outlives the broker's restart."""
        if self._queue is not None:
            what, name = "queue", self._queue
            answer = link.ask(lambda channel: channel.queue_declare(name, passive=True))
        elif self._exchange:
            what, name = "exchange", self._exchange
            answer = link.ask(lambda channel: channel.exchange_declare(name, "direct", passive=True))
        else:
            return
        if answer is not None:
            raise SinkUnavailable(
                self.name, f"{what} {name!r}: {answer}; declare it, durable, before events are sent"
            )
        if self._durable and not name.startswith("amq.") and link.transient(what, name):
            raise SinkUnavailable(
                self.name,
                f"{what} {name!r} is not durable, a restart of the broker loses it; declare it durable, "
                "or add durable=false",
            )


def open_sink(url: str, context: SinkContext) -> AmqpSink:
    """Return the sink for an `amqp:` or `amqps:` URL."""
    try:
        return AmqpSink(url, context)
    except ModuleNotFoundError as error:
        raise ConfigError(f"sink amqp: needs {error.name}; install pgqueue-relay[rabbitmq]") from error


def _size(event: Event) -> int:
    return len(event.payload)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
