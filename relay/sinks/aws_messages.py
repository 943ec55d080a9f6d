"""What SQS and SNS share: messages of text with attributes, in batches of ten, and their FIFO groups.

A message is a CloudEvents JSON object; its attributes id, type, source and partitionkey repeat what filters may want.
A FIFO queue or topic keeps the order of each aggregate (its message group) and drops repetitions for five minutes; a
standard one keeps no order.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final
from urllib.parse import quote

from relay.event import CONFIRMED, Event, Receipt, Rejected, Unavailable, structured
from relay.sinks.aws import AwsSink, Entry, is_bad

ENTRIES: Final = 10
GROUP_LENGTH: Final = 128
#: Punctuation that AWS allows in group and deduplication ids, without the percent sign that escapes the others.
_PLAIN: Final = "!\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
#: What SQS and SNS refuse in a message, beside control characters, which JSON escapes.
_REFUSED: Final = re.compile("[\ufffe\uffff]")
_CONTROL: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


class MessageSink(AwsSink):
    """Sends messages to a queue or a topic. `body` is what its service calls the text of a message."""

    body: ClassVar[str]

    def entry(self, event: Event) -> Entry:
        """Return the message of an event, with its group where the name ends in .fifo."""
        said, named = text(event, self.source), attributes(event, self.source)
        fields: dict[str, Any] = {self.body: said, "MessageAttributes": named}
        if self.place.name.endswith(".fifo"):
            fields |= {
                "MessageGroupId": group(event.key),
                "MessageDeduplicationId": deduplication(event, self.source),
            }
        return Entry(event=event, size=message_size(said, named), fields=fields)

    def call(self, batch: Sequence[Entry]) -> Mapping[int, Receipt]:
        """Send messages in one call, each named by its place."""
        answer = self.send([{"Id": str(place), **entry.fields} for place, entry in enumerate(batch)])
        receipts: dict[int, Receipt] = {int(one["Id"]): CONFIRMED for one in answer.get("Successful", ())}
        return receipts | {int(one["Id"]): failure(one) for one in answer.get("Failed", ())}

    def send(self, entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Make the service's batch call; return its answer."""
        raise NotImplementedError


def text(event: Event, source: str) -> str:
    """Return the event as JSON of characters that a message may hold; a reader of JSON sees no difference."""
    return _REFUSED.sub(lambda found: f"\\u{ord(found[0]):04x}", structured(event, source).decode())


def attributes(event: Event, source: str) -> dict[str, Any]:
    """Return what filters and logs may want to see without reading the body; bent where a value has to be."""
    given = {
        "id": event.idempotency_key,
        "type": event.event_type,
        "source": source,
        "partitionkey": event.aggregate_id,
        "content-type": "application/cloudevents+json",
    }
    return {
        name: {"DataType": "String", "StringValue": _CONTROL.sub(lambda found: quote(found[0]), value)}
        for name, value in given.items()
        if value
    }


def message_size(body: str, named: Mapping[str, Any]) -> int:
    """Return the bytes of a message as SQS and SNS count them: body, and name, type and value of each attribute."""
    more = sum(len(name) + len(a["DataType"]) + len(a["StringValue"].encode()) for name, a in named.items())
    return len(body.encode()) + more


def group(key: str) -> str:
    """Return the group of an ordering key: the key where it fits, percent-encoded where it does not, else its hash."""
    escaped = quote(key, safe=_PLAIN)
    return (
        escaped if 0 < len(escaped) <= GROUP_LENGTH else f"sha256-{hashlib.sha256(key.encode()).hexdigest()}"
    )


def deduplication(event: Event, source: str) -> str:
    """Return the id by which a FIFO queue drops repetitions: of the source too, for several may share a queue."""
    return hashlib.sha256(f"{source}\n{event.idempotency_key}".encode()).hexdigest()


def failure(entry: Mapping[str, Any]) -> Receipt:
    """Return the receipt of an entry that a batch call of SQS or SNS reports as failed."""
    reason = f"{entry.get('Code')}: {entry.get('Message', '')}".strip(": ")
    return Rejected(reason) if entry.get("SenderFault") and is_bad(entry) else Unavailable(reason)
