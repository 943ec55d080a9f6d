"""`https:` and `http:`: one POST per event, CloudEvents in the headers, signed as Standard Webhooks.

    webhook-id         outbox:<id>, the same in every delivery: the receiver drops repetitions by it
    webhook-timestamp  seconds since 1970 of this attempt
    webhook-signature  v1,<base64 HMAC-SHA256 of "id.timestamp.body">, one for each secret (rotation)

Different aggregates go in parallel over kept connections, the events of one aggregate one after the other. Targets
outside the public internet are refused unless they are allowed; a target that answers 410 is not asked again.
https://github.com/standard-webhooks/standard-webhooks, CloudEvents HTTP binding (binary mode).
"""

from __future__ import annotations

import base64
import math
import re
import ssl
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, HELD, Confirmed, Event, Receipt, Rejected, Unavailable, attributes
from relay.sinks import SinkContext, SinkUnavailable
from relay.sinks.addresses import NotPublic, is_name, is_public, literal
from relay.sinks.pinned import Answer, Connections, NoAnswer, Unreachable

if TYPE_CHECKING:
    import httpx
    from standardwebhooks.webhooks import Webhook

TRACE: Final = frozenset({"traceparent", "tracestate"})
LATER: Final = frozenset({408, 425, 429})
GONE: Final = 410
HIGHEST_PORT: Final = 65_535
#: The shortest key of Standard Webhooks, in bytes.
KEY_BYTES: Final = 24
EXCERPT: Final = 200

_UNSAFE = re.compile(r'[^\x21-\x7e]|["%]')


class WebhookSink:
    """POSTs to one URL."""

    ordered = True
    marks = False

    def __init__(self, url: str, context: SinkContext) -> None:
        import httpx

        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"sink {url.partition(':')[0]}: {error}; write https://host/path") from None
        if not self._url.host:
            raise ConfigError(f"sink {self._url.scheme or url}: has no host; write https://host/path")
        if not is_name(self._url.raw_host.decode()) or (self._url.port or 0) > HIGHEST_PORT:
            raise ConfigError(f"sink {self._url.scheme}: {self._url.netloc.decode()!r} is not host:port")
        self.name = str(self._url.copy_with(userinfo=b"", query=None, fragment=None))
        self._allow_private = context.allow_private
        address = literal(self._url.host)
        if address is not None and not self._allow_private and not is_public(address):
            raise ConfigError(f"sink {self.name}: {NotPublic(self._url.host, address)}")
        self._gone = False
        self._source = context.source
        self._send_timeout = context.send_timeout
        self._parallel = context.parallel
        self._keys = _keys(context.secrets)
        self._fixed = _fixed(self._url)
        self._connections: Connections | None = None
        self._pool = ThreadPoolExecutor(context.parallel, thread_name_prefix="relay-webhook")

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """POST each event; none after the send timeout or once the receiver cannot be reached."""
        if self._gone:
            raise self._disabled()
        connections = self._connections = self._connections or self._open()
        batch = _Batch(time.monotonic() + self._send_timeout)
        chains: dict[str, list[Event]] = {}
        for event in events:
            chains.setdefault(event.key, []).append(event)
        left = deque(chains.values())
        receipts: dict[int, Receipt] = {}
        hands = [
            self._pool.submit(self._work, connections, left, batch, receipts)
            for _ in range(min(self._parallel, len(chains)))
        ]
        for hand in hands:
            hand.result()
        return [receipts.get(event.id, HELD) for event in events]

    def close(self) -> None:
        """Drop the kept connections."""
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.close()

    def _open(self) -> Connections:
        """Open no connection yet."""
        url = self._url
        return Connections(
            url.raw_host.decode(),
            url.port or (443 if url.scheme == "https" else 80),
            secure=_trusted() if url.scheme == "https" else None,
            allow_private=self._allow_private,
        )

    def _disabled(self) -> SinkUnavailable:
        problem = "it answered 410 Gone, so it is sent nothing more; give the right URL and restart the relay"
        return SinkUnavailable(self.name, problem, retry_after=math.inf)

    def _work(
        self,
        connections: Connections,
        left: deque[list[Event]],
        batch: _Batch,
        receipts: dict[int, Receipt],
    ) -> None:
        """Send one chain of events after the other, each up to the first event that is not confirmed."""
        while left:
            try:
                chain = left.popleft()
            except IndexError:
                return  # another took the last
            for event in chain:
                if batch.cut or time.monotonic() >= batch.until:
                    break
                receipt = receipts[event.id] = self._post(connections, event, batch)
                if not isinstance(receipt, Confirmed):
                    break

    def _post(self, connections: Connections, event: Event, batch: _Batch) -> Receipt:
        try:
            answer = connections.post(self._request(event), batch.until)
        except NotPublic as error:
            batch.cut = True
            return Unavailable(str(error))
        except Unreachable as error:
            batch.cut = True
            return Unavailable(f"cannot reach {self.name}: {error}")
        except NoAnswer as error:
            return Unavailable(f"no answer from {self.name}: {error}")
        if answer.status == GONE:
            self._gone = batch.cut = True
            return Unavailable(self._disabled().problem, math.inf)
        return _receipt(answer)

    def _request(self, event: Event) -> bytes:
        body = event.payload.encode()
        context = attributes(event, self._source)
        lines = [
            self._fixed,
            f"content-length: {len(body)}",
            f"content-type: {context.pop('datacontenttype')}",
        ]
        for name, value in context.items():
            safe = _UNSAFE.sub(_percent, value)
            lines.append(f"ce-{name}: {safe}")
            if name in TRACE:
                lines.append(f"{name}: {safe}")
        key = event.idempotency_key
        now = datetime.fromtimestamp(int(time.time()), UTC)
        lines.append(f"webhook-id: {key}\r\nwebhook-timestamp: {int(now.timestamp())}")
        if self._keys:
            lines.append(
                "webhook-signature: " + " ".join(k.sign(key, now, event.payload) for k in self._keys)
            )
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class _Batch:
    """What the requests of one publish call share."""

    __slots__ = ("cut", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.cut = False


def open_sink(url: str, context: SinkContext) -> WebhookSink:
    """Return the sink for an `http:` or `https:` URL."""
    try:
        return WebhookSink(url, context)
    except ModuleNotFoundError as error:
        raise ConfigError(f"sink https: needs {error.name}; install pgqueue-relay[webhooks]") from error


def _fixed(url: httpx.URL) -> str:
    """Return the first lines of every request."""
    lines = [f"POST {url.raw_path.decode()} HTTP/1.1", f"host: {url.netloc.decode()}"]
    lines += ["user-agent: outbox-relay", "accept: */*"]
    if url.userinfo:
        named = f"{url.username}:{url.password}".encode()
        lines.append(f"authorization: Basic {base64.b64encode(named).decode()}")
    return "\r\n".join(lines)


def _trusted() -> ssl.SSLContext:
    """Trust what the system trusts (SSL_CERT_FILE names another bundle), or certifi's list where it has none."""
    context = ssl.create_default_context()
    paths = ssl.get_default_verify_paths()
    if not any((paths.cafile, paths.capath)):
        import certifi

        context.load_verify_locations(certifi.where())
    return context


def _keys(secrets: Sequence[str]) -> list[Webhook]:
    if not secrets:
        return []
    from standardwebhooks.webhooks import Webhook

    for secret in secrets:
        try:
            size = len(base64.b64decode(secret.removeprefix("whsec_"), validate=True))
        except ValueError as error:
            raise ConfigError(
                f"webhook secret: {error}; give base64 text, with or without the prefix whsec_"
            ) from None
        if size < KEY_BYTES:
            raise ConfigError(
                f"webhook secret: has {size} bytes, fewer than {KEY_BYTES}; make one: openssl rand -base64 32"
            )
    return [Webhook(secret) for secret in secrets]


def _receipt(answer: Answer) -> Receipt:
    status = answer.status
    if 200 <= status < 300:
        return CONFIRMED
    said = answer.body[:EXCERPT].decode(errors="replace").strip()
    reason = f"HTTP {status}" + (f": {said}" if said else "")
    if 300 <= status < 400:
        return Rejected(
            f"HTTP {status}: redirects to {answer.headers.get('location', '?')!r}; give the final URL"
        )
    if status >= 500 or status in LATER or status < 200:
        return Unavailable(reason, _seconds(answer.headers.get("retry-after")))
    return Rejected(reason)


def _seconds(retry_after: str | None) -> float | None:
    if retry_after is None:
        return None
    try:
        if retry_after.strip().isdigit():
            return float(retry_after)
        return max(0.0, (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def _percent(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode(errors="replace"))
