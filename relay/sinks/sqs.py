"""`sqs:`: Amazon SQS, one message per event.

    sqs://orders.fifo?region=eu-central-1

`account` names another account's queue, `max_bytes` lowers the limit that the queue itself has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from relay.event import Event, Receipt
from relay.sinks.aws import Limits, away, opener
from relay.sinks.aws_messages import ENTRIES, MessageSink

BYTES: Final = 1_048_576


class SqsSink(MessageSink):
    """Sends to one queue."""

    service = "sqs"
    body = "MessageBody"
    _queue: str | None = None

    def check(self) -> Limits:
        """Return what a call takes as far as the URL tells; the queue may take less."""
        most = self.place.address.number("max_bytes", BYTES)
        return Limits(entries=ENTRIES, bytes=BYTES, entry_bytes=most)

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Send messages, ten in a call; raises SinkUnavailable where the queue cannot be found."""
        if events and self._queue is None:
            self._queue = self._find()
        return super().publish(events)

    def close(self) -> None:
        """Look the queue up anew."""
        self._queue = None

    def send(self, entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Send messages in one call."""
        answer: Mapping[str, Any] = self.client.send_message_batch(QueueUrl=self._queue, Entries=entries)
        return answer

    def _find(self) -> str:
        """Return the queue's URL, and learn what it takes."""
        from botocore.exceptions import BotoCoreError, ClientError

        account = {"QueueOwnerAWSAccountId": self.place.account} if self.place.account else {}
        try:
            url: str = self.client.get_queue_url(QueueName=self.place.name, **account)["QueueUrl"]
        except (BotoCoreError, ClientError) as error:
            raise away(self.name, error) from error
        try:
            found = self.client.get_queue_attributes(QueueUrl=url, AttributeNames=["MaximumMessageSize"])
        except ClientError:
            found = {}  # the right to send does not bring the right to ask; SQS itself refuses what is too large
        except BotoCoreError as error:
            raise away(self.name, error) from error
        most = int(found.get("Attributes", {}).get("MaximumMessageSize", BYTES))
        own = self.check()
        self.limits = Limits(entries=own.entries, bytes=own.bytes, entry_bytes=min(most, own.entry_bytes))
        return url


open_sink = opener(SqsSink)
