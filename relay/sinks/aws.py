"""What the sinks of AWS share: a place, a client, calls of many entries that may fail one by one.

    sqs://NAME?region=eu-central-1      options of all: region, account, endpoint (a URL), max_bytes

Credentials come from where every AWS client finds them (environment, profile, role of the machine). An event travels
as one structured CloudEvents JSON object. None of these services promises that an entry is not stored while one before
it in the same call failed, so a call never holds two events of an aggregate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from pgqueue.errors import ConfigError
from relay.event import HELD, Event, Receipt, Rejected, Unavailable
from relay.sinks import SinkContext, SinkUnavailable
from relay.sinks.destination import Address

OPTIONS: Final = ("region", "account", "endpoint", "max_bytes")
CONNECT_S: Final = 5.0
ANSWER_S: Final = 10.0
#: Codes with which a service refuses what an entry is; all others may pass with time, or when somebody sets it right.
_BAD: Final = frozenset(
    {
        "InvalidMessageContents",
        "InvalidParameterValue",
        "InvalidParameter",
        "ParameterValueInvalid",
        "InvalidArgumentException",
        "ValidationException",
        "BatchRequestTooLong",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one call of a service takes."""

    entries: int
    bytes: int
    entry_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event as a service takes it; `size` as the service counts it."""

    event: Event
    size: int
    fields: Mapping[str, Any]


#: Makes an entry of an event.
Make = Callable[[Event], Entry]
#: Sends entries in one call; returns the receipt of each by its place.
Call = Callable[[Sequence[Entry]], Mapping[int, Receipt]]


class Place:
    """A sink URL of AWS: the name of a queue, topic or stream, and where it is."""

    def __init__(self, url: str) -> None:
        self.address = Address(url, port=443, known=OPTIONS)
        if len(self.address.hosts) != 1 or self.address.path or self.address.user:
            raise ConfigError(f"sink {self.address.shown} is not {self.address.scheme}://NAME?region=..")
        self.name = self.address.hosts[0][0]
        options = self.address.options
        self.region, self.account, self.endpoint = (options.get(o) for o in ("region", "account", "endpoint"))

    def client(self, service: str, context: SinkContext) -> Any:
        """Return a client; it opens no connection yet. It repeats nothing: the relay does."""
        from boto3.session import Session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        config = Config(
            connect_timeout=min(CONNECT_S, context.send_timeout),
            read_timeout=min(ANSWER_S, context.send_timeout),
            retries={"total_max_attempts": 1},
            max_pool_connections=context.parallel,
        )
        try:
            return Session().client(
                service, region_name=self.region, endpoint_url=self.endpoint, config=config
            )
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(f"sink {self.address.shown}: {error}") from error


class AwsSink:
    """Gives entries to one service; what an entry is and how a call is made are the sink's own.

    Its calls never hold two events of an aggregate. The client keeps no connection that is in the way.
    """

    service: ClassVar[str]
    ordered = False
    marks = False

    def __init__(self, url: str, context: SinkContext) -> None:
        self.place = Place(url)
        self.name = self.place.address.shown
        self.source = context.source
        self.limits = self.check()
        self.client = self.place.client(self.service, context)
        self._calls = Calls(self.name, context)

    def check(self) -> Limits:
        """Return what a call takes; raises ConfigError for a URL that says too little."""
        raise NotImplementedError

    def entry(self, event: Event) -> Entry:
        """Return an event as the service takes it."""
        raise NotImplementedError

    def call(self, batch: Sequence[Entry]) -> Mapping[int, Receipt]:
        """Send entries in one call; return the receipt of each by its place."""
        raise NotImplementedError

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Send entries, many in a call and several calls at a time."""
        return self._calls.run(events, self.entry, self.call, self.limits)

    def close(self) -> None:
        """Do nothing: no connection has to be opened again."""


def opener(sink: type[AwsSink]) -> Callable[[str, SinkContext], AwsSink]:
    """Return the function that makes such a sink from a URL."""

    def open_sink(url: str, context: SinkContext) -> AwsSink:
        try:
            return sink(url, context)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"sink {sink.service}: needs {error.name}; install pgqueue-relay[aws]"
            ) from error

    return open_sink


class Calls:
    """Gives entries to a service, many in a call and several calls at a time."""

    def __init__(self, name: str, context: SinkContext) -> None:
        self.name = name
        self._send_timeout = context.send_timeout
        self._pool = ThreadPoolExecutor(
            context.parallel, thread_name_prefix=f"relay-{name.partition(':')[0]}"
        )

    def run(self, events: Sequence[Event], make: Make, call: Call, limits: Limits) -> Sequence[Receipt]:
        """Send events of different aggregates; an entry that is too large is rejected before anything is sent."""
        until = time.monotonic() + self._send_timeout
        receipts: dict[int, Receipt] = {}
        fit: list[Entry] = []
        for event in events:
            entry = make(event)
            if entry.size > limits.entry_bytes:
                receipts[event.id] = Rejected(f"has {entry.size} bytes, more than {limits.entry_bytes}")
            else:
                fit.append(entry)
        away: list[str] = []

        def one(batch: list[Entry]) -> dict[int, Receipt]:
            return {} if away or time.monotonic() >= until else self._call(batch, call, away)

        for answered in self._pool.map(one, pack(fit, limits)):
            receipts.update(answered)
        return [receipts.get(event.id, HELD) for event in events]

    def _call(self, batch: Sequence[Entry], call: Call, away: list[str]) -> dict[int, Receipt]:
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            ConnectionError,  # noqa: A004 - botocore's own
            ParamValidationError,
        )

        try:
            answered = call(batch)
        except (ClientError, ParamValidationError) as error:
            if not refuses(error):
                return _all(batch, Unavailable(_text(error)))
            if len(batch) == 1:
                return _all(batch, Rejected(_text(error)))
            # One entry spoils the call: find it.
            found: dict[int, Receipt] = {}
            for entry in batch:
                found |= self._call([entry], call, away)
            return found
        except BotoCoreError as error:
            if isinstance(error, ConnectionError):
                away.append(_text(error))
            return _all(batch, Unavailable(_text(error)))
        return {
            entry.event.id: answered.get(place, Unavailable("the answer does not mention it"))
            for place, entry in enumerate(batch)
        }


def pack(entries: Sequence[Entry], limits: Limits) -> list[list[Entry]]:
    """Cut entries into calls by number and by bytes."""
    batches: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not batches or len(batches[-1]) >= limits.entries or size + entry.size > limits.bytes:
            batches.append([])
            size = 0
        batches[-1].append(entry)
        size += entry.size
    return batches


def refuses(error: Any) -> bool:
    """Tell whether an error of a call is about what was sent; others are about rights, rates or the service."""
    answer = getattr(error, "response", None)
    return answer is None or is_bad(answer.get("Error", {}))


def is_bad(error: Mapping[str, Any]) -> bool:
    """Tell whether an error names what an entry is; all others may pass with time."""
    code = str(error.get("Code", "")).rpartition(".")[2]
    return code in _BAD and "TopicArn" not in str(
        error.get("Message", "")
    )  # a wrong topic is no fault of the event


def away(name: str, error: Exception) -> SinkUnavailable:
    """Return what to raise when nothing can be sent at all."""
    return SinkUnavailable(name, _text(error))


def _all(batch: Sequence[Entry], receipt: Receipt) -> dict[int, Receipt]:
    return {entry.event.id: receipt for entry in batch}


def _text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
