"""`sqs:`: Amazon SQS, one message per event.

    sqs://orders.fifo?region=eu-central-1

The body is a CloudEvents JSON object; the attributes id, type, source and partitionkey repeat what filters may want.
A FIFO queue keeps the order of each aggregate (its message group) and drops repetitions for five minutes; a standard
queue keeps no order. `account` names another account's queue, `max_bytes` lowers the limit that the queue itself has.
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
    away,
    deduplication,
    group,
    message_size,
    taken,
    text,
)

ENTRIES: Final = 10
BYTES: Final = 1_048_576


class SqsSink:
    """Sends to one queue."""

    ordered = False
    marks = False

    def __init__(self, url: str, context: SinkContext) -> None:
        self._place = place = Place(url)
        self.name = place.address.shown
        self._source = context.source
        self._fifo = place.name.endswith(".fifo")
        self._max_bytes = place.address.number("max_bytes", BYTES)
        self._client = place.client("sqs", context)
        self._calls = Calls(self.name, context)
        self._queue: str | None = None
        self._limits = Limits(entries=ENTRIES, bytes=BYTES, entry_bytes=self._max_bytes)

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Send messages, ten in a call; no two events of an aggregate are ever under way."""
        if not events:
            return []
        if self._queue is None:
            self._queue = self._find()
        return self._calls.run(events, self._entry, self._send, self._limits)

    def close(self) -> None:
        """Look the queue up anew; the client keeps no connection that is in the way."""
        self._queue = None

    def _find(self) -> str:
        """Return the queue's URL, and learn what it takes."""
        from botocore.exceptions import BotoCoreError, ClientError

        account = {"QueueOwnerAWSAccountId": self._place.account} if self._place.account else {}
        try:
            url: str = self._client.get_queue_url(QueueName=self._place.name, **account)["QueueUrl"]
        except (BotoCoreError, ClientError) as error:
            raise away(self.name, error) from error
        try:
            found = self._client.get_queue_attributes(QueueUrl=url, AttributeNames=["MaximumMessageSize"])
        except ClientError:
            found = {}  # the right to send does not bring the right to ask; SQS itself refuses what is too large
        except BotoCoreError as error:
            raise away(self.name, error) from error
        most = int(found.get("Attributes", {}).get("MaximumMessageSize", BYTES))
        self._limits = Limits(entries=ENTRIES, bytes=BYTES, entry_bytes=min(most, self._max_bytes))
        return url

    def _entry(self, event: Event) -> Entry:
        body, named = text(event, self._source), attributes(event, self._source)
        fields: dict[str, Any] = {"MessageBody": body, "MessageAttributes": named}
        if self._fifo:
            fields |= {
                "MessageGroupId": group(event.key),
                "MessageDeduplicationId": deduplication(event, self._source),
            }
        return Entry(event=event, size=message_size(body, named), fields=fields)

    def _send(self, batch: Sequence[Entry]) -> Mapping[int, Receipt]:
        entries = [{"Id": str(place), **entry.fields} for place, entry in enumerate(batch)]
        return taken(self._client.send_message_batch(QueueUrl=self._queue, Entries=entries))


def open_sink(url: str, context: SinkContext) -> SqsSink:
    """Return the sink for an `sqs:` URL."""
    try:
        return SqsSink(url, context)
    except ModuleNotFoundError as error:
        raise ConfigError(f"sink sqs: needs {error.name}; install pgqueue-relay[aws]") from error
