"""`sns:`: Amazon SNS, one message per event.

    sns://orders.fifo?region=eu-central-1&account=123456789012

Region and account are part of a topic's name. The attributes of a message serve filter policies. A message has at most
256 KiB with its attributes; `max_bytes` lowers that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pgqueue.errors import ConfigError
from relay.sinks import SinkContext
from relay.sinks.aws import Limits, opener
from relay.sinks.aws_messages import ENTRIES, MessageSink

BYTES: Final = 262_144


class SnsSink(MessageSink):
    """Publishes to one topic."""

    service = "sns"
    body = "Message"

    def __init__(self, url: str, context: SinkContext) -> None:
        super().__init__(url, context)
        place = self.place
        self._topic = f"arn:{self.client.meta.partition}:sns:{place.region}:{place.account}:{place.name}"

    def check(self) -> Limits:
        """Return what a call takes; raises ConfigError where region or account is missing."""
        if not self.place.region or not self.place.account:
            raise ConfigError(
                f"sink {self.name} needs ?region=..&account=.., which are part of a topic's name"
            )
        most = self.place.address.number("max_bytes", BYTES)
        return Limits(entries=ENTRIES, bytes=BYTES, entry_bytes=min(most, BYTES))

    def send(self, entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Publish messages in one call."""
        answer: Mapping[str, Any] = self.client.publish_batch(
            TopicArn=self._topic, PublishBatchRequestEntries=entries
        )
        return answer


open_sink = opener(SnsSink)
