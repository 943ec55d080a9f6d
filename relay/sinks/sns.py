"""`sns:`: Amazon SNS, one message per event.

    sns://orders.fifo?region=eu-central-1&account=123456789012

The message is a CloudEvents JSON object; the attributes id, type, source and partitionkey serve filter policies. A FIFO
topic keeps the order of each aggregate (its message group) and drops repetitions for five minutes; a standard topic
keeps no order. A message has at most 256 KiB with its attributes; `max_bytes` lowers that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pgqueue.errors import ConfigError
from relay.event import Event, Receipt
from relay.sinks import SinkContext
from relay.sinks.aws import (
    Calls,
    Entry,
    Limits,
    Place,
    attributes,
    deduplication,
    group,
    message_size,
    taken,
    text,
)

ENTRIES: Final = 10
BYTES: Final = 262_144


class SnsSink:
    """Publishes to one topic."""

    ordered = False
    marks = False

    def __init__(self, url: str, context: SinkContext) -> None:
        self._place = place = Place(url)
        self.name = place.address.shown
        self._source = context.source
        self._fifo = place.name.endswith(".fifo")
        if not place.region or not place.account:
            raise ConfigError(
                f"sink {self.name} needs ?region=..&account=.., which are part of a topic's name"
            )
        self._client = place.client("sns", context)
        partition = self._client.meta.partition
        self._topic = f"arn:{partition}:sns:{place.region}:{place.account}:{place.name}"
        self._calls = Calls(self.name, context)
        most = place.address.number("max_bytes", BYTES)
        self._limits = Limits(entries=ENTRIES, bytes=BYTES, entry_bytes=min(most, BYTES))

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Publish messages, ten in a call; no two events of an aggregate are ever under way."""
        return self._calls.run(events, self._entry, self._send, self._limits)

    def close(self) -> None:
        """Do nothing: the client keeps no connection that is in the way."""

    def _entry(self, event: Event) -> Entry:
        body, named = text(event, self._source), attributes(event, self._source)
        fields: dict[str, Any] = {"Message": body, "MessageAttributes": named}
        if self._fifo:
            fields |= {
                "MessageGroupId": group(event.key),
                "MessageDeduplicationId": deduplication(event, self._source),
            }
        return Entry(event=event, size=message_size(body, named), fields=fields)

    def _send(self, batch: Sequence[Entry]) -> Mapping[int, Receipt]:
        entries = [{"Id": str(place), **entry.fields} for place, entry in enumerate(batch)]
        return taken(self._client.publish_batch(TopicArn=self._topic, PublishBatchRequestEntries=entries))


def open_sink(url: str, context: SinkContext) -> SnsSink:
    """Return the sink for an `sns:` URL."""
    try:
        return SnsSink(url, context)
    except ModuleNotFoundError as error:
        raise ConfigError(f"sink sns: needs {error.name}; install pgqueue-relay[aws]") from error
