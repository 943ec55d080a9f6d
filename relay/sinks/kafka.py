"""`kafka:`: Kafka, one record per event, stored by all in-sync replicas, in order per aggregate.

    kafka://host:9092,host2:9092/shop.{aggregate_type}
    kafka://user:password@host:9092/orders?security.protocol=SASL_SSL&sasl.mechanism=SCRAM-SHA-512

The path is the topic, the record's key the aggregate id; keys land in the partition where a Java producer puts
them. Options with a dot are librdkafka's own (`compression.type=lz4`, `ssl.ca.location=..`). Of the sink:
max_bytes (asked of the topic otherwise), auto_create (let the broker make topics), pipeline (false: one record
of an aggregate at a time, for brokers that check records against a schema).

CloudEvents Kafka binding, binary mode: attributes in `ce_` headers, beside a plain header `id`. A topic that is
not there, or not allowed, is waited for; a record that is too large is refused before anything is sent.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, HELD, Event, Receipt, Rejected, Unavailable, attributes
from relay.sinks import SinkContext, SinkUnavailable
from relay.sinks.destination import Address, Destination
from relay.sinks.kafka_pipeline import DEFAULTS, STRICT, Answers, Headers, Pipeline, Record, Setting

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

PORT: Final = 9092
OPTIONS: Final = ("max_bytes", "auto_create", "pipeline")
TABOO: Final = frozenset(
    {
        *STRICT,
        "bootstrap.servers",
        "metadata.broker.list",
        "allow.auto.create.topics",
        "message.timeout.ms",
        "request.required.acks",
        "transactional.id",
    }
    | {"max.in.flight.requests.per.connection", "max.in.flight", "batch.size", "sasl.username"}
)
#: What a batch adds to its record.
BATCH_BYTES: Final = 128

#: Codes by which a broker refuses a record for what it is: INVALID_MSG_SIZE, MSG_SIZE_TOO_LARGE,
#: RECORD_LIST_TOO_LARGE, INVALID_TIMESTAMP, UNSUPPORTED_FOR_MESSAGE_FORMAT, POLICY_VIOLATION, INVALID_RECORD.
REFUSED: Final = frozenset({4, 10, 18, 32, 43, 44, 87})
_ANOTHER_OF_ITS_BATCH: Final = -138

_LEGAL = re.compile(r"[A-Za-z0-9._-]{1,249}")


class KafkaSink:
    """Produces to one cluster. It keeps the order itself where an aggregate has one topic."""

    marks = False

    def __init__(self, url: str, context: SinkContext) -> None:
        self._address = address = Address(url, port=PORT, known=None)
        self.name = address.shown
        if not address.path:
            raise ConfigError(f"sink {self.name} has no topic; write kafka://host:9092/topic")
        self._topic = Destination(self.name, address.path)
        if self._topic.fixed and not _legal(address.path):
            raise ConfigError(f"sink {self.name}: {address.path!r} is no legal topic name")
        self._source = context.source
        self._timeout = context.send_timeout
        self._in_pipeline = address.flag("pipeline", default=True)
        self._pipeline = Pipeline(
            self.name,
            self._settings(),
            auto_create=address.flag("auto_create", default=False),
            max_bytes=address.number("max_bytes", 0),
        )
        if problem := self._pipeline.check():
            raise ConfigError(f"sink {self.name}: {problem}")

    @property
    def ordered(self) -> bool:
        """Tell whether all events of an aggregate go to one topic, as a pipeline."""
        return self._in_pipeline and self._topic.per_aggregate

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Produce the events and wait for the brokers' confirmations."""
        if not events:
            return []
        until = time.monotonic() + self._timeout
        receipts: dict[int, Receipt] = {}
        stopped: set[str] = set()
        fit: list[tuple[Event, Record]] = []
        for event in events:
            if event.key in stopped:
                continue
            record = self._record(event)
            problem = self._problem(event, record, until)
            if problem is None:
                fit.append((event, record))
            else:
                receipts[event.id] = problem
                stopped.add(event.key)
        answers = self._pipeline.produce([record for _, record in fit], until) if fit else {}
        if len(fit) > 1 and any(error is not None and _of_a_record(error) for error in answers.values()):
            answers |= self._one_by_one(fit, answers, until)
        if any(answers.values()):
            self._pipeline.forget()
        return self._receipts(events, receipts, answers)

    def close(self) -> None:
        """Throw the producer away, with what it has not delivered."""
        self._pipeline.drop()
        self._pipeline.forget()

    def _receipts(
        self, events: Sequence[Event], receipts: Mapping[int, Receipt], answers: Answers
    ) -> Sequence[Receipt]:
        given: list[Receipt] = []
        stopped: set[str] = set()
        for event in events:
            receipt = receipts.get(event.id, HELD)
            if event.key in stopped:
                receipt = HELD
            elif event.id in answers:
                error = answers[event.id]
                receipt = CONFIRMED if error is None else self._failure(error)
            if receipt is not CONFIRMED:
                stopped.add(event.key)
            given.append(receipt)
        return given

    def _failure(self, error: KafkaError) -> Receipt:
        if error.code() in REFUSED:
            return Rejected(error.str())
        # A code of the library itself says little ("purged in flight"); what it told before says more.
        return Unavailable((error.code() < 0 and self._pipeline.trouble) or error.str())

    def _problem(self, event: Event, record: Record, until: float) -> Receipt | None:
        limit = self._pipeline.limits.get(record.topic)
        if limit is None:
            if not _legal(record.topic):
                return Rejected(f"{record.topic!r} is no legal topic name")
            limit = self._pipeline.limit(record.topic, until)
        if limit is None:
            problem = (
                f"topic {record.topic!r} does not exist, or this account has no right to see it (Describe); create it, "
                "or add auto_create=true"
            )
            if self._topic.fixed:
                raise SinkUnavailable(self.name, problem)
            return Unavailable(problem)
        # Most records are far from the limit, whatever the characters of their headers.
        if len(record.value) + 4 * self._roughly(event) < limit:
            return None
        size = len(record.value) + len(record.key or b"") + BATCH_BYTES
        size += sum(len(name) + len(_bytes(value)) + 4 for name, value in record.headers.items())
        return (
            Rejected(f"record has {size} bytes, topic {record.topic} takes {limit}") if size > limit else None
        )

    def _roughly(self, event: Event) -> int:
        """Return more characters than key and headers can have."""
        aggregate = 3 * len(event.aggregate_id or "") + len(event.aggregate_type or "")
        extensions = 2 * len(str(event.headers)) if event.headers else 0
        return 1024 + len(self._source) + len(event.event_type) + aggregate + extensions

    def _one_by_one(self, events: Sequence[tuple[Event, Record]], answers: Answers, until: float) -> Answers:
        """Find the record that a broker refused with its whole batch: each alone, an aggregate to its first."""
        found: Answers = {}
        stopped: set[str] = set()
        for event, record in events:
            if answers[event.id] is None or event.key in stopped or time.monotonic() >= until:
                continue
            try:
                found |= self._pipeline.produce([record], until)
            except SinkUnavailable:
                break
            if found[event.id] is not None:
                stopped.add(event.key)
        # What was not tried alone did not fail for what it is.
        for event, _ in events:
            error = answers[event.id]
            if event.id not in found and error is not None and error.code() in REFUSED:
                del answers[event.id]
        return found

    def _record(self, event: Event) -> Record:
        context = attributes(event, self._source)
        headers: Headers = {"id": context["id"], "content-type": context.pop("datacontenttype")}
        for name, value in context.items():
            headers[f"ce_{name}"] = value
        if event.headers:
            headers |= {name: context[name] for name in ("traceparent", "tracestate") if name in context}
        key = event.aggregate_id.encode() if event.aggregate_id is not None else None
        return Record(event.id, self._topic.of(event), key, event.payload.encode(), headers)

    def _settings(self) -> dict[str, Setting]:
        address = self._address
        given = {name: value for name, value in address.options.items() if name not in OPTIONS}
        for name in given:
            if "." not in name:
                raise ConfigError(f"sink {self.name} has no option {name!r}; known are {', '.join(OPTIONS)}")
            if name in TABOO:
                raise ConfigError(f"sink {self.name}: {name} is not to be changed; leave it out")
        hosts = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in address.hosts)
        settings: dict[str, Setting] = {
            "bootstrap.servers": ",".join(hosts),
            "request.timeout.ms": max(1, int(1000 * self._timeout)),
            **DEFAULTS,
        }
        if address.user is not None:
            settings |= {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}
            settings |= {"sasl.username": address.user, "sasl.password": address.password or ""}
        return settings | given | dict(STRICT)


def open_sink(url: str, context: SinkContext) -> KafkaSink:
    """Return the sink for a `kafka:` URL."""
    try:
        return KafkaSink(url, context)
    except ModuleNotFoundError as error:
        raise ConfigError(f"sink kafka: needs {error.name}; install pgqueue-relay[kafka]") from error


def _of_a_record(error: KafkaError) -> bool:
    return error.code() in REFUSED or error.code() == _ANOTHER_OF_ITS_BATCH


def _bytes(value: str | bytes | None) -> bytes:
    return value.encode() if isinstance(value, str) else value or b""


def _legal(topic: str) -> bool:
    return _LEGAL.fullmatch(topic) is not None and topic not in (".", "..")
