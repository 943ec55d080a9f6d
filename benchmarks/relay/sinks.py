"""Two sinks for measurements: one that is no broker, and one that notes when a real one confirmed.

The command finds them as it finds any stranger's sink: `announced` writes the entry points.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from relay.event import CONFIRMED, Confirmed, Event, Receipt
from relay.sinks import Sink, SinkContext, open_sink

#: Id of an event, and when it was known to be confirmed.
STAMP = struct.Struct("<Qd")


class NullSink:
    """Confirms everything, `ms` milliseconds after it was asked, and appends the ids to a file."""

    ordered = True
    marks = False

    def __init__(self, record: Path, seconds: float) -> None:
        self.name = "null:"
        self._seconds = seconds
        self._record = record

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Note the events; wait as a broker far away would let one wait."""
        _append(self._record, array("Q", [event.id for event in events]).tobytes())
        if self._seconds:
            time.sleep(self._seconds)
        return [CONFIRMED] * len(events)

    def close(self) -> None:
        """Do nothing: the file is opened for every batch."""


class TimedSink:
    """Another sink, and a file with the time at which each confirmation was there."""

    def __init__(self, inner: Sink, record: Path) -> None:
        self.name, self.ordered, self.marks = inner.name, inner.ordered, inner.marks
        self._inner = inner
        self._record = record

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Publish, then note when the answers to all of them were there."""
        receipts = self._inner.publish(events)
        now = time.time()
        stamps = [
            STAMP.pack(event.id, now)
            for event, receipt in zip(events, receipts, strict=True)
            if isinstance(receipt, Confirmed)
        ]
        _append(self._record, b"".join(stamps))
        return receipts

    def close(self) -> None:
        """Drop the connections of the sink."""
        self._inner.close()


def _append(file: Path, data: bytes) -> None:
    with file.open("ab", buffering=0) as record:
        record.write(data)


def open_null(url: str, _context: SinkContext) -> NullSink:
    """Return the sink for `null:FILE?ms=MILLISECONDS`."""
    file, _, milliseconds = url.removeprefix("null:").partition("?ms=")
    return NullSink(Path(file), float(milliseconds or 0) / 1000)


def open_timed(url: str, context: SinkContext) -> TimedSink:
    """Return the sink for `timed:FILE?URL`."""
    file, _, inner = url.removeprefix("timed:").partition("?")
    return TimedSink(open_sink(unquote(inner), context), Path(file))


def announced(folder: Path) -> str:
    """Write a distribution that has the two sinks as entry points; return what goes into PYTHONPATH."""
    about = folder / "relay_benchmark_sinks-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: relay-benchmark-sinks\nVersion: 1\n")
    lines = [f"{scheme} = {__name__}:open_{scheme}\n" for scheme in ("null", "timed")]
    (about / "entry_points.txt").write_text("[relay.sinks]\n" + "".join(lines))
    return str(folder)
