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

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, Event, Receipt, Unavailable, structured
from relay.sinks import SinkContext
from relay.sinks.aws import Calls, Entry, Limits, Place

ENTRIES: Final = 500
BYTES: Final = 5 * 1_048_576
RECORD_BYTES: Final = 1_048_576
KEY_LENGTH: Final = 256


class KinesisSink:
    """Puts records into one stream."""

    ordered = False
    marks = False

    def __init__(self, url: str, context: SinkContext) -> None:
        self._place = place = Place(url)
        self.name = place.address.shown
        self._source = context.source
        self._client = place.client("kinesis", context)
        self._calls = Calls(self.name, context)
        most = place.address.number("max_bytes", RECORD_BYTES)
        self._limits = Limits(entries=ENTRIES, bytes=max(BYTES, most), entry_bytes=most)

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Put records, up to 500 in a call; no two events of an aggregate are ever under way."""
        return self._calls.run(events, self._entry, self._send, self._limits)

    def close(self) -> None:
        """Do nothing: the client keeps no connection that is in the way."""

    def _entry(self, event: Event) -> Entry:
        data, key = structured(event, self._source), partition_key(event.key)
        fields = {"Data": data, "PartitionKey": key}
        return Entry(event=event, size=len(data) + len(key.encode()), fields=fields)

    def _send(self, batch: Sequence[Entry]) -> Mapping[int, Receipt]:
        records = [entry.fields for entry in batch]
        answer = self._client.put_records(StreamName=self._place.name, Records=records)
        return {
            place: Unavailable(f"{one['ErrorCode']}: {one.get('ErrorMessage', '')}")
            if one.get("ErrorCode")
            else CONFIRMED
            for place, one in enumerate(answer["Records"])
        }


def partition_key(key: str) -> str:
    """Return the key if Kinesis takes it, else its hash."""
    return key if 0 < len(key) <= KEY_LENGTH else f"sha256-{hashlib.sha256(key.encode()).hexdigest()}"


def open_sink(url: str, context: SinkContext) -> KinesisSink:
    """Return the sink for a `kinesis:` URL."""
    try:
        return KinesisSink(url, context)
    except ModuleNotFoundError as error:
        raise ConfigError(f"sink kinesis: needs {error.name}; install pgqueue-relay[aws]") from error
