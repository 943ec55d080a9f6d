"""`stdout:`: one CloudEvents JSON object a line, for a first look and for pipes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import BinaryIO

from relay.event import CONFIRMED, Event, Receipt, structured
from relay.sinks import SinkContext, SinkUnavailable


class StdoutSink:
    """Writes lines; an event counts as confirmed once its line is flushed to the pipe or file."""

    name = "stdout:"
    ordered = True
    marks = False

    def __init__(self, source: str, stream: BinaryIO) -> None:
        self._source = source
        self._stream = stream

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Write one line per event, in order."""
        try:
            self._stream.write(b"".join(structured(event, self._source) + b"\n" for event in events))
            self._stream.flush()
        except (OSError, ValueError) as error:  # a closed pipe; ValueError: a closed file
            raise SinkUnavailable(self.name, str(error)) from error
        return [CONFIRMED] * len(events)

    def close(self) -> None:
        """Keep the stream: it belongs to the process."""


def open_sink(_url: str, context: SinkContext) -> StdoutSink:
    """Return the sink for `stdout:`."""
    return StdoutSink(context.source, sys.stdout.buffer)
