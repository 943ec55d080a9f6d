"""`redis:`: Redis Streams, one entry per event.

    redis://user:password@host:6379/0?stream=shop.{aggregate_type}      rediss: the same over TLS

An entry has the CloudEvents attributes as fields (`id` is outbox:<id>) and the payload as field `data`.
Options: stream (the key; may have places, {part} spreads over as many streams as there are partitions), maxlen
(trim to about so many entries: unread ones go too), replicas (wait until so many have the entry: nothing is added while
fewer are connected, and what was added is not added again while they are late), max_bytes
(refuse a larger event), ca (file). A batch is one transaction (MULTI/EXEC): all of it or nothing, in order.
What Redis confirms is as durable as its settings: `appendfsync always` survives a crash, a failover may not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, HELD, Event, Receipt, Rejected, Unavailable, attributes
from relay.sinks import SinkContext, SinkUnavailable
from relay.sinks.destination import Address, Destination
from relay.sinks.window import windows

if TYPE_CHECKING:
    import redis

PORT: Final = 6379
OPTIONS: Final = ("stream", "maxlen", "replicas", "max_bytes", "ca")
CONNECT_S: Final = 5.0
REPLICAS_S: Final = 5.0
#: Events and bytes in one transaction: Redis serves nobody else while it runs one.
PAGE: Final = 500
PAGE_BYTES: Final = 4 * 1024 * 1024
#: Redis takes no longer value (proto-max-bulk-len).
MAX_BYTES: Final = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Primary:
    """What a server tells of its replication: whose history it writes, how far that is, and how far each replica."""

    history: str
    place: int
    replicas: tuple[int, ...]

    def have(self, place: int) -> int:
        """Count the replicas that have all up to a place."""
        return sum(replica >= place for replica in self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Late:
    """Events that were added while too few replicas answered; they stand before `place` of a history."""

    history: str
    place: int
    ids: frozenset[int]


class RedisSink:
    """Adds to streams of one server. It keeps the order itself where an aggregate has one stream."""

    marks = False

    def __init__(self, url: str, context: SinkContext) -> None:
        import redis

        self._redis = redis
        self._address = address = Address(url, port=PORT, known=OPTIONS)
        self.name = address.shown
        if len(address.hosts) > 1:
            raise ConfigError(f"sink {self.name} names several hosts; give one, or a proxy's")
        if address.path and not address.path.isdigit():
            raise ConfigError(f"sink {self.name}: {address.path!r} is no database number")
        stream = address.options.get("stream")
        if not stream:
            raise ConfigError(f"sink {self.name} has no stream; add ?stream=orders")
        self._stream = Destination(self.name, stream)
        self._maxlen = address.number("maxlen", 0) or None
        self._replicas = address.number("replicas", 0)
        self._max_bytes = address.number("max_bytes", MAX_BYTES)
        self._source = context.source
        self._timeout = context.send_timeout
        self._client: redis.Redis | None = None
        self._late: _Late | None = None

    @property
    def ordered(self) -> bool:
        """Tell whether all events of an aggregate go to one stream."""
        return self._stream.per_aggregate

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """Add the events, a page of them in each transaction; later pages wait for the earlier ones."""
        if not events:
            return []
        until = time.monotonic() + self._timeout
        late = self._arrived()
        receipts: dict[int, Receipt] = {event.id: CONFIRMED for event in events if event.id in late}
        stopped: set[str] = set()
        fit: list[Event] = []
        for event in [event for event in events if event.id not in late]:
            size = len(event.payload.encode())
            if event.key not in stopped and size <= self._max_bytes:
                fit.append(event)
                continue
            if event.key not in stopped:
                receipts[event.id] = Rejected(f"payload has {size} bytes, more than {self._max_bytes}")
            stopped.add(event.key)
        for page in windows(fit, _size, most=PAGE, most_bytes=PAGE_BYTES):
            if time.monotonic() >= until:
                break
            try:
                added = self._add(page)
            except SinkUnavailable:
                if not receipts:
                    raise
                break
            receipts.update(added)
            if any(receipt is not CONFIRMED for receipt in added.values()):
                break
        return [receipts.get(event.id, HELD) for event in events]

    def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _add(self, page: Sequence[Event]) -> dict[int, Receipt]:
        errors = self._redis.exceptions
        try:
            client = self._client = self._client or self._open()
            before = self._look(client) if self._replicas else None
            if before is not None:
                self._require(len(before.replicas), "are connected")
            with client.pipeline(transaction=True) as sent:
                for event in page:
                    fields: Any = attributes(event, self._source) | {"data": event.payload}
                    sent.xadd(self._stream.of(event), fields, maxlen=self._maxlen, approximate=True)
                answers = sent.execute(raise_on_error=False)
            receipts = self._receipts(page, answers)
            if before is not None:
                # Less than the socket waits, or "too few" would read "no answer".
                have = client.wait(self._replicas, int(1000 * min(REPLICAS_S, self._timeout / 2)))
                if have < self._replicas and (now := self._look(client)).history == before.history:
                    ids = frozenset(id_ for id_, receipt in receipts.items() if receipt is CONFIRMED)
                    self._late = _Late(history=now.history, place=now.place, ids=ids)
                self._require(have, "have the entries")
        except (errors.RedisError, OSError) as error:
            # Away, read-only, out of memory, still loading, not allowed: nothing of the page was added.
            self.close()
            raise SinkUnavailable(self.name, _text(error)) from error
        return receipts

    def _arrived(self) -> frozenset[int]:
        """Return the events that were added before and are on enough replicas by now; none if they are to go again.

        Another history is that of a server which may lack them. A new connection's WAIT would not know of them.
        """
        late, errors = self._late, self._redis.exceptions
        if late is None:
            return frozenset()
        try:
            client = self._client = self._client or self._open()
            now = self._look(client)
        except (errors.RedisError, OSError) as error:
            self.close()
            raise SinkUnavailable(self.name, _text(error)) from error
        same = late.history == now.history
        if same:
            self._require(now.have(late.place), "have the entries")
        self._late = None
        return late.ids if same else frozenset()

    def _require(self, have: int, what: str) -> None:
        if have < self._replicas:
            raise SinkUnavailable(self.name, f"{have} of {self._replicas} replicas {what}")

    @staticmethod
    def _look(client: redis.Redis) -> _Primary:
        told: dict[str, Any] = client.info("replication")
        online = [
            one for name, one in told.items() if name.startswith("slave") and isinstance(one, dict)
            if one.get("state") == "online"
        ]  # fmt: skip
        writes = told["role"] == "master"
        return _Primary(
            history=str(told["master_replid"]) if writes else "",
            place=int(told["master_repl_offset"]),
            replicas=tuple(int(one["offset"]) for one in online),
        )

    @staticmethod
    def _receipts(page: Sequence[Event], answers: Sequence[Any]) -> dict[int, Receipt]:
        """Turn answers into receipts; an error of one command undoes no other (a key that is no stream)."""
        return {
            event.id: Unavailable(_text(answer)) if isinstance(answer, Exception) else CONFIRMED
            for event, answer in zip(page, answers, strict=True)
        }

    def _open(self) -> redis.Redis:
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        address = self._address
        ((host, port),) = address.hosts
        secure = (
            {"ssl": True, "ssl_ca_certs": address.options.get("ca")} if address.scheme == "rediss" else {}
        )
        return self._redis.Redis(
            host=host,
            port=port,
            db=int(address.path or 0),
            username=address.user,
            password=address.password,
            socket_timeout=self._timeout,
            socket_connect_timeout=min(CONNECT_S, self._timeout),
            socket_keepalive=True,
            # The relay repeats; a transaction that the client repeats on its own would run twice.
            retry=Retry(NoBackoff(), 0),
            # One connection: WAIT speaks of the writes of its own.
            max_connections=1,
            client_name="outbox-relay",
            **secure,  # type: ignore[arg-type]
        )


def open_sink(url: str, context: SinkContext) -> RedisSink:
    """Return the sink for a `redis:` or `rediss:` URL."""
    try:
        return RedisSink(url, context)
    except ModuleNotFoundError as error:
        raise ConfigError(f"sink redis: needs {error.name}; install pgqueue-relay[redis]") from error


def _size(event: Event) -> int:
    return len(event.payload)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
