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
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, HELD, Confirmed, Event, Receipt, Rejected, Unavailable, attributes
from relay.sinks import SinkContext, SinkUnavailable
from relay.sinks.addresses import NotPublic, is_public, literal

if TYPE_CHECKING:
    import httpcore
    import httpx
    from standardwebhooks.webhooks import Webhook

TRACE: Final = frozenset({"traceparent", "tracestate"})
LATER: Final = frozenset({408, 425, 429})
GONE: Final = 410
BODY_READ: Final = 65_536
EXCERPT: Final = 200
CONNECT_S: Final = 5.0
ANSWER_S: Final = 10.0

_UNSAFE = re.compile(r'[^\x21-\x7e]|["%]')


class WebhookSink:
    """POSTs to one URL."""

    ordered = True
    marks = False

    def __init__(self, url: str, context: SinkContext) -> None:
        import httpcore
        import httpx

        self._http = httpcore
        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"sink {url.partition(':')[0]}: {error}; write https://host/path") from None
        if not self._url.host:
            raise ConfigError(f"sink {self._url.scheme}: has no host; write https://host/path")
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
        self._fixed = _fixed_headers(self._url)
        self._target = httpcore.URL(
            scheme=self._url.raw_scheme,
            host=self._url.raw_host,
            port=self._url.port,
            target=self._url.raw_path,
        )
        self._timeouts = {"connect": CONNECT_S, "read": ANSWER_S, "write": ANSWER_S, "pool": ANSWER_S}
        self._connections: httpcore.ConnectionPool | None = None
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
        receipts: dict[int, Receipt] = {}
        for answered in self._pool.map(lambda chain: self._chain(connections, chain, batch), chains.values()):
            receipts.update(answered)
        return [receipts.get(event.id, HELD) for event in events]

    def close(self) -> None:
        """Drop the kept connections."""
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.close()

    def _open(self) -> httpcore.ConnectionPool:
        """Open no connection yet. A pool alone follows no redirect, keeps no cookie and knows no proxy."""
        from relay.sinks.pinned import Pinned

        return self._http.ConnectionPool(
            ssl_context=_trusted() if self._url.scheme == "https" else None,
            max_connections=self._parallel,
            max_keepalive_connections=self._parallel,
            network_backend=Pinned(allow_private=self._allow_private),
        )

    def _disabled(self) -> SinkUnavailable:
        problem = "it answered 410 Gone, so it is sent nothing more; give the right URL and restart the relay"
        return SinkUnavailable(self.name, problem)

    def _chain(
        self, connections: httpcore.ConnectionPool, chain: Sequence[Event], batch: _Batch
    ) -> dict[int, Receipt]:
        receipts: dict[int, Receipt] = {}
        for event in chain:
            if batch.cut or time.monotonic() >= batch.until:
                break
            receipt = receipts[event.id] = self._post(connections, event, batch)
            if not isinstance(receipt, Confirmed):
                break
        return receipts

    def _post(self, connections: httpcore.ConnectionPool, event: Event, batch: _Batch) -> Receipt:
        http = self._http
        body = event.payload.encode()
        request = http.Request(
            "POST",
            self._target,
            headers=self._headers(event, len(body)),
            content=body,
            extensions={"timeout": self._timeouts},
        )
        try:
            response = connections.handle_request(request)
            try:
                said = _read(response, batch.until)
            finally:
                response.close()
        except NotPublic as error:
            batch.cut = True
            return Unavailable(str(error))
        except (http.ConnectError, http.ConnectTimeout) as error:
            batch.cut = True
            return Unavailable(f"cannot reach {self.name}: {_text(error)}")
        except (http.TimeoutException, http.NetworkError, http.ProtocolError) as error:
            return Unavailable(f"no answer from {self.name}: {_text(error)}")
        if response.status == GONE:
            self._gone = batch.cut = True
            return Unavailable(self._disabled().problem)
        headers = {name.lower(): value.decode("latin-1") for name, value in response.headers}
        return _receipt(response.status, headers, said)

    def _headers(self, event: Event, size: int) -> list[tuple[bytes, bytes]]:
        context = attributes(event, self._source)
        headers = [*self._fixed, (b"content-length", b"%d" % size)]
        headers.append((b"content-type", context.pop("datacontenttype").encode()))
        for name, value in context.items():
            safe = _UNSAFE.sub(_percent, value).encode()
            headers.append((b"ce-" + name.encode(), safe))
            if name in TRACE:
                headers.append((name.encode(), safe))
        key = event.idempotency_key
        now = datetime.fromtimestamp(int(time.time()), UTC)
        headers.append((b"webhook-id", key.encode()))
        headers.append((b"webhook-timestamp", b"%d" % now.timestamp()))
        if self._keys:
            signatures = " ".join(secret.sign(key, now, event.payload) for secret in self._keys)
            headers.append((b"webhook-signature", signatures.encode()))
        return headers


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


def _fixed_headers(url: httpx.URL) -> list[tuple[bytes, bytes]]:
    fixed = [(b"host", url.netloc), (b"user-agent", b"outbox-relay"), (b"accept", b"*/*")]
    if url.userinfo:
        named = f"{url.username}:{url.password}".encode()
        fixed.append((b"authorization", b"Basic " + base64.b64encode(named)))
    return fixed


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
    from standardwebhooks.webhooks import EmptyWebhookSecretError, Webhook

    try:
        return [Webhook(secret) for secret in secrets]
    except (EmptyWebhookSecretError, ValueError) as error:
        raise ConfigError(
            f"webhook secret: {error}; give base64 text, with or without the prefix whsec_"
        ) from None


def _receipt(status: int, headers: Mapping[bytes, str], said: str) -> Receipt:
    if 200 <= status < 300:
        return CONFIRMED
    reason = f"HTTP {status}" + (f": {said}" if said else "")
    if 300 <= status < 400:
        return Rejected(f"HTTP {status}: redirects to {headers.get(b'location', '?')!r}; give the final URL")
    if status >= 500 or status in LATER or status < 200:
        return Unavailable(reason, _seconds(headers.get(b"retry-after")))
    return Rejected(reason)


def _read(response: httpcore.Response, until: float) -> str:
    """Read the body so that the connection can be kept; give up on a long or slow one."""
    body = b""
    for chunk in response.iter_stream():
        body += chunk
        if len(body) > BODY_READ or time.monotonic() > until:
            break
    return body[:EXCERPT].decode(errors="replace").strip()


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


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
