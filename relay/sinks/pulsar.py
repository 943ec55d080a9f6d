"""`pulsar:`: Apache Pulsar, one message per event.

    pulsar://broker:6650/tenant/namespace/orders       pulsar+ssl: the same over TLS; a token as the URL's password

The CloudEvents attributes are the message's properties (`ce_id` is outbox:<id>), the aggregate is its partition key.
The topic may have places ({event_type}, {aggregate_type} ..). Options: ca (file), max_bytes (refuse a larger event). No
two events of an aggregate are ever under way, so order needs nothing of the broker. A topic with deduplication switched
on must not be used: it compares sequence numbers of the client, which begin anew with every relay.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, HELD, Event, Receipt, Rejected, Unavailable, attributes
from relay.sinks import SinkContext, SinkUnavailable
from relay.sinks.destination import Address, Destination

PORT: Final = 6650
OPTIONS: Final = ("ca", "max_bytes")
CONNECT_S: Final = 5.0
#: To find a topic, or to close; a process that ends waits for it.
OPERATION_S: Final = 10.0
#: What a broker takes by default (maxMessageSize), less than its envelope.
MAX_BYTES: Final = 5 * 1024 * 1024 - 64 * 1024
PENDING: Final = 10_000
#: How much longer than the producer's own timeout to wait for its answers.
LATE_S: Final = 1.0


class PulsarSink:
    """Sends to the topics of one cluster."""

    ordered = False
    marks = False

    def __init__(self, url: str, context: SinkContext) -> None:
        import pulsar

        self._pulsar = pulsar
        self._address = address = Address(url, port=PORT, known=OPTIONS)
        self.name = address.shown
        parts = address.path.split("/")
        if len(parts) not in (1, 3) or not all(parts):
            raise ConfigError(f"sink {self.name} names no topic; write pulsar://host/tenant/namespace/topic")
        topic = "/".join(parts if len(parts) == 3 else ["public", "default", *parts])
        self._topic = Destination(self.name, f"persistent://{topic}", _escape)
        self._max_bytes = address.number("max_bytes", MAX_BYTES)
        self._source = context.source
        self._timeout = context.send_timeout
        self._client: Any = None
        self._producers: dict[str, Any] = {}

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Send all events at once and wait for the answers."""
        answers = _Answers()
        receipts: dict[int, Receipt] = {}
        try:
            for event in events:
                content = event.payload.encode()
                if len(content) > self._max_bytes:
                    receipts[event.id] = Rejected(
                        f"payload has {len(content)} bytes, more than {self._max_bytes}"
                    )
                else:
                    self._send(event, content, answers)
        except self._pulsar.PulsarException as error:
            if not answers.results():
                raise self._away(error) from error
        answers.wait(time.monotonic() + self._timeout + LATE_S)
        for id_, result in answers.results().items():
            receipts[id_] = self._receipt(result)
        if any(isinstance(receipt, Unavailable) for receipt in receipts.values()):
            # What the producers still hold would be sent later; it is read from the outbox again.
            self.close()
        return [receipts.get(event.id, HELD) for event in events]

    def close(self) -> None:
        """Let go of producers and connections, and of whatever they still hold."""
        client, self._client = self._client, None
        self._producers = {}
        if client is not None:
            atexit.unregister(self._end)
            # Closing waits for a broker that is frozen, and `shutdown` can stop every thread of the process for 10 s.
            # What the old client still sends can but repeat: an event that was not confirmed is sent again before
            # any later one of its aggregate.
            threading.Thread(target=self._end, args=[client], name="pulsar-close").start()

    def _send(self, event: Event, content: bytes, answers: _Answers) -> None:
        producer = self._producer(self._topic.of(event))
        context = attributes(event, self._source)
        properties = {"content-type": context.pop("datacontenttype")}
        properties |= {f"ce_{name}": value for name, value in context.items()}
        key = event.aggregate_id or None
        answered = answers.expect(event.id)
        try:
            producer.send_async(content, answered, properties=properties, partition_key=key)
        except self._pulsar.PulsarException as error:
            answered(error, None)
            raise

    def _producer(self, topic: str) -> Any:
        found = self._producers.get(topic)
        if found is None:
            if self._client is None:
                self._client = self._open()
                # A client that is still open aborts the process as it ends.
                atexit.register(self._end, self._client)
            found = self._producers[topic] = self._client.create_producer(
                topic,
                send_timeout_millis=int(self._timeout * 1000),
                max_pending_messages=PENDING,
                block_if_queue_full=True,
                batching_enabled=True,
                batching_type=self._pulsar.BatchingType.KeyBased,
                batching_max_publish_delay_ms=1,
            )
        return found

    def _open(self) -> Any:
        address = self._address
        hosts = ",".join(f"{host}:{port}" for host, port in address.hosts)
        # A logger of Python's is no longer there when the process ends, and then the client writes to stdout.
        quiet = self._pulsar.FileLogger(self._pulsar.LoggerLevel.Error, os.devnull)
        token = self._pulsar.AuthenticationToken(address.password) if address.password else None
        return self._pulsar.Client(
            f"{address.scheme}://{hosts}",
            authentication=token,
            operation_timeout_seconds=max(1, int(min(OPERATION_S, self._timeout))),
            connection_timeout_ms=int(min(CONNECT_S, self._timeout) * 1000),
            tls_trust_certs_file_path=address.options.get("ca"),
            tls_validate_hostname=True,
            logger=quiet,
        )

    def _end(self, client: Any) -> None:
        with suppress(self._pulsar.PulsarException):
            client.close()

    def _away(self, error: Exception) -> SinkUnavailable:
        self.close()
        return SinkUnavailable(self.name, " ".join(str(error).split()) or type(error).__name__)

    def _receipt(self, result: Any) -> Receipt:
        known = self._pulsar.Result
        if result == known.Ok:
            return CONFIRMED
        if result in (known.MessageTooBig, known.InvalidMessage):
            return Rejected(str(result))
        return Unavailable("no answer" if result is None else str(result))


class _Answers:
    """The answers to one batch, which come on a thread of the client."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._results: dict[int, Any] = {}
        self._missing = 0

    def expect(self, id_: int) -> Callable[[Any, Any], None]:
        """Note an event that is sent; return what the client calls with the result."""
        with self._change:
            self._results[id_] = None
            self._missing += 1

        def answered(result: Any, _: Any) -> None:
            with self._change:
                self._results[id_] = result
                self._missing -= 1
                self._change.notify()

        return answered

    def wait(self, until: float) -> None:
        """Wait for every answer, at most until then (monotonic seconds)."""
        with self._change:
            self._change.wait_for(lambda: self._missing == 0, max(0.0, until - time.monotonic()))

    def results(self) -> dict[int, Any]:
        """Return the results by event; None where there is none."""
        with self._change:
            return dict(self._results)


def open_sink(url: str, context: SinkContext) -> PulsarSink:
    """Return the sink for a `pulsar:` or `pulsar+ssl:` URL."""
    try:
        return PulsarSink(url, context)
    except ModuleNotFoundError as error:
        raise ConfigError(f"sink pulsar: needs {error.name}; install pgqueue-relay[pulsar]") from error


def _escape(_place: str, value: str) -> str:
    """Keep a value from adding levels to a topic's name."""
    return value.replace("%", "%25").replace("/", "%2F")
