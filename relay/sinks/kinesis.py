"""`kinesis:`: Amazon Kinesis Data Streams, one record per event.

    kinesis://orders?region=eu-central-1

Records have no headers, so the data is a CloudEvents JSON object. The partition key is the aggregate, or the hash of
an id of more than 256 characters. A call that succeeds may still have failed for some of its records; those are sent
again. `max_bytes` is the largest record, 1 MiB unless the stream takes more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

from relay.event import CONFIRMED, Event, Receipt, Unavailable, structured
from relay.sinks.aws import AwsSink, Entry, Limits, opener

ENTRIES: Final = 500
BYTES: Final = 5 * 1_048_576
RECORD_BYTES: Final = 1_048_576
KEY_LENGTH: Final = 256


class KinesisSink(AwsSink):
    """Puts records into one stream."""

    service = "kinesis"

    def check(self) -> Limits:
        """Return what a call takes."""
        most = self.place.address.number("max_bytes", RECORD_BYTES)
        return Limits(entries=ENTRIES, bytes=max(BYTES, most), entry_bytes=most)

    def entry(self, event: Event) -> Entry:
        """Return the record of an event."""
        data, key = structured(event, self.source), partition_key(event.key)
        return Entry(
            event=event, size=len(data) + len(key.encode()), fields={"Data": data, "PartitionKey": key}
        )

    def call(self, batch: Sequence[Entry]) -> Mapping[int, Receipt]:
        """Put records in one call."""
        records = [entry.fields for entry in batch]
        answer = self.client.put_records(StreamName=self.place.name, Records=records)
        return {
            place: Unavailable(f"{one['ErrorCode']}: {one.get('ErrorMessage', '')}")
            if one.get("ErrorCode")
            else CONFIRMED
            for place, one in enumerate(answer["Records"])
        }


def partition_key(key: str) -> str:
    """Return the key if Kinesis takes it, else its hash."""
    return key if 0 < len(key) <= KEY_LENGTH else f"sha256-{hashlib.sha256(key.encode()).hexdigest()}"


open_sink = opener(KinesisSink)
