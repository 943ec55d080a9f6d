"""A pipeline of records to Kafka that keeps the order of a key, whatever fails.

What keeps it: the library never gives up on a record on its own (delivery.timeout.ms=0), for then a later one
of the same key would pass; it stops at a gap (enable.gapless.guarantee); a call has a deadline, after which the
producer is purged and thrown away. What may still arrive from a thrown-away producer is a repetition.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from relay.sinks import SinkUnavailable

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Producer

Setting = str | int | float | bool
Headers = dict[str, str | bytes | None]
Answers = dict[int, "KafkaError | None"]

CONNECT_S: Final = 5.0
LIST_S: Final = 2.0
LIMIT_S: Final = 2.0
#: How long a call waits on when every broker is away.
DOWN_S: Final = 3.0
POLL_S: Final = 0.05
PURGE_S: Final = 1.0
#: A missing topic is looked for again after this.
TOPICS_S: Final = 5.0
#: A topic's max.message.bytes where nobody changed it, and the library's batches.
MAX_BYTES: Final = 1_048_588
LIBRARY_MAX_BYTES: Final = 1_000_000_000
LIBRARY_BATCH: Final = 1_000_000

#: With other values records are lost or change places.
STRICT: Final[Mapping[str, Setting]] = {
    "enable.idempotence": True,
    "enable.gapless.guarantee": True,
    "delivery.timeout.ms": 0,
    "message.max.bytes": LIBRARY_MAX_BYTES,
    # A record that is no longer on its way and of which nothing was reported has been delivered.
    "delivery.report.only.error": True,
}
DEFAULTS: Final[Mapping[str, Setting]] = {
    "client.id": "outbox-relay",
    "partitioner": "murmur2_random",
    "linger.ms": 0,
    "queue.buffering.max.kbytes": 64 * 1024,
    "reconnect.backoff.max.ms": 1000,
    "socket.keepalive.enable": True,
}

#: The library's own log lines: one for every connection that fails. What it says last goes into `trouble`.
_SILENT: Final = logging.Logger("librdkafka", logging.CRITICAL + 1)  # noqa: LOG001 - of nobody's tree

_ALL_BROKERS_DOWN: Final = -187
_TIMED_OUT: Final = -192


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record; `id` is the event's."""

    id: int
    topic: str
    key: bytes | None
    value: bytes
    headers: Headers


class Pipeline:
    """One producer at a time, opened when it is needed, and what is known of the topics."""

    def __init__(
        self, name: str, settings: Mapping[str, Setting], *, auto_create: bool, max_bytes: int
    ) -> None:
        import confluent_kafka

        self._kafka = confluent_kafka
        self._name = name
        self._settings = dict(settings)
        self._auto_create = auto_create
        self._max_bytes = max_bytes
        self._producer: Producer | None = None
        self._batch_bytes = self._producer_batch = LIBRARY_BATCH
        #: How long a record batch of each topic may be, as far as it is known.
        self.limits: dict[str, int] = {}
        self._missing: dict[str, float] = {}
        self._down_at: float | None = None
        self.trouble = ""

    def limit(self, topic: str, until: float) -> int | None:
        """Return how long a record batch of the topic may be; None where there is no such topic.

        Raises SinkUnavailable where no broker answers.
        """
        known = self.limits.get(topic)
        if known is not None:
            return known
        if not self._auto_create:
            looked = self._missing.get(topic)
            if looked is not None and time.monotonic() - looked < TOPICS_S:
                return None
            self._down_at = None
            # All topics: asking for one by name would create it where the broker does so.
            if topic not in self._list(self._ready(until), until):
                self._missing[topic] = time.monotonic()
                return None
        limit = self.limits[topic] = self._max_bytes or self._ask_limit(topic, until)
        # A batch of many records must fit too.
        self._batch_bytes = min(self._batch_bytes, limit)
        return limit

    def produce(self, records: Sequence[Record], until: float) -> Answers:
        """Produce records as one pipeline; return an error for each that was not confirmed by then.

        An error throws the producer away. Raises SinkUnavailable where no broker answers.
        """
        if self._producer_batch != self._batch_bytes:
            self.drop()
        producer = self._ready(until)
        # What was told of idle connections does not count.
        self._poll(producer, 0)
        self._down_at = None
        errors: dict[int, KafkaError] = {}
        handed = 0
        for record in records:
            if not self._put(producer, record, errors, until):
                break
            handed += 1
            if errors:
                break
        self._wait(producer, errors, until)
        lost = self._kafka.KafkaError(_TIMED_OUT, "not confirmed in time")
        # Nothing may be taken for delivered while something is still on its way: nobody knows which.
        delivered = handed if not len(producer) else 0
        answers: Answers = {record.id: None for record in records[:delivered]}
        answers |= {record.id: lost for record in records[delivered:]}
        answers |= errors
        if delivered < len(records) or errors:
            self.drop()
        return answers

    def drop(self) -> None:
        """Throw the producer away, with what it has not delivered."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge(in_queue=True, in_flight=True, blocking=False)

    def forget(self) -> None:
        """Look at the topics anew."""
        self.limits.clear()
        self._missing.clear()
        self._batch_bytes = LIBRARY_BATCH

    def check(self) -> str | None:
        """Have the library look at the settings, without a broker to connect to; return what it minds."""
        try:
            own: dict[str, Any] = {**self._settings, "bootstrap.servers": "", "logger": _SILENT}
            self._kafka.Producer(own)
        except self._kafka.KafkaException as error:
            return str(error.args[0].str())
        return None

    def _put(self, producer: Producer, record: Record, errors: dict[int, KafkaError], until: float) -> bool:
        """Hand a record to the library; False when there is no time to wait for room."""
        report = partial(_report, errors, record.id)
        while True:
            try:
                producer.produce(
                    record.topic, record.value, key=record.key, headers=record.headers, on_delivery=report
                )
            except BufferError:  # as much is under way as is allowed
                self._poll(producer)
                if self._over(until):
                    return False
            except self._kafka.KafkaException as error:
                errors[record.id] = error.args[0]
                return True
            else:
                return True

    def _wait(self, producer: Producer, errors: Mapping[int, KafkaError], until: float) -> None:
        """Wait until nothing is on its way, something failed, or there is no more time; give up the rest."""
        while (under_way := len(producer)) and not self._over(until) and not errors:
            self._poll(producer)
            if len(producer) < under_way:
                self._down_at = None
        if len(producer):
            # What the library says of the purge itself would hide why it had to be.
            why = self.trouble or "not confirmed in time"
            producer.purge(in_queue=True, in_flight=True, blocking=True)
            until = time.monotonic() + PURGE_S
            while len(producer) and time.monotonic() < until:
                self._poll(producer)
            self.trouble = why

    def _ready(self, until: float) -> Producer:
        if self._producer is None:
            self.trouble = ""
            self._down_at = None
            self._producer_batch = self._batch_bytes
            own: dict[str, Any] = {
                **self._settings,
                "batch.size": self._batch_bytes,
                "error_cb": self._on_error,
                "logger": _SILENT,
            }
            producer = self._kafka.Producer(own)
            self._list(producer, until)
            self._producer = producer
        return self._producer

    def _list(self, producer: Producer, until: float) -> Mapping[str, object]:
        """Ask for the topics; give up early where every broker is away."""
        until = min(until, time.monotonic() + CONNECT_S)
        while True:
            try:
                topics: Mapping[str, object] = producer.list_topics(timeout=LIST_S).topics
            except self._kafka.KafkaException as error:
                self._poll(producer, 0)
                if self._down_at is not None or time.monotonic() >= until:
                    raise SinkUnavailable(self._name, self.trouble or error.args[0].str()) from error
            else:
                return topics

    def _ask_limit(self, topic: str, until: float) -> int:
        from confluent_kafka import admin

        wait = max(0.1, min(LIMIT_S, until - time.monotonic()))
        asked = admin.ConfigResource(admin.ConfigResource.Type.TOPIC, topic)  # type: ignore[attr-defined]
        own: dict[str, Any] = {**self._settings, "logger": _SILENT}
        client = admin.AdminClient(own)
        try:
            answer = client.describe_configs([asked], request_timeout=wait)[asked].result(wait)
            return int(answer["max.message.bytes"].value)
        except (self._kafka.KafkaException, KeyError, TypeError, ValueError, TimeoutError):
            return MAX_BYTES  # not allowed to ask, or a broker that has no such setting

    def _poll(self, producer: Producer, seconds: float = POLL_S) -> None:
        """Serve the reports that have come; a fatal error of the producer shows in them too."""
        try:
            producer.poll(seconds)
        except self._kafka.KafkaException as error:
            self._down_at = self._down_at or time.monotonic() - DOWN_S
            self.trouble = error.args[0].str()

    def _over(self, until: float) -> bool:
        """Tell whether waiting is of no use any more."""
        now = time.monotonic()
        return now >= until or (self._down_at is not None and now - self._down_at >= DOWN_S)

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == _ALL_BROKERS_DOWN or error.fatal():
            self._down_at = self._down_at or time.monotonic()
        else:
            self.trouble = error.str()


def _report(errors: dict[int, KafkaError], id_: int, error: KafkaError | None, _: object) -> None:
    if error is not None:
        errors[id_] = error
