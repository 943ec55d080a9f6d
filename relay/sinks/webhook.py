"""`https:` and `http:`: one POST per event, CloudEvents in the headers, signed as Standard Webhooks.

    webhook-id         outbox:<id>, the same in every delivery: the receiver drops repetitions by it
    webhook-timestamp  seconds since 1970 of this attempt
    webhook-signature  v1,<base64 HMAC-SHA256 of "id.timestamp.body">, one for each secret (rotation)

Different aggregates go in parallel over kept connections, the events of one aggregate one after the other.
https://github.com/standard-webhooks/standard-webhooks, CloudEvents HTTP binding (binary mode).
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from pgqueue.errors import ConfigError
from relay.event import CONFIRMED, HELD, Confirmed, Event, Receipt, Rejected, Unavailable, attributes
from relay.sinks import SinkContext

if TYPE_CHECKING:
    import httpx
    from standardwebhooks.webhooks import Webhook

LATER: Final = frozenset({408, 425, 429})
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
        import httpx

        self._httpx = httpx
        parts = urlsplit(url)
        if not parts.hostname:
            raise ConfigError(f"sink {parts.scheme}: has no host; write https://host/path")
        port = f":{parts.port}" if parts.port else ""
        self.name = f"{parts.scheme}://{parts.hostname}{port}{parts.path}"
        self._url = url
        self._source = context.source
        self._send_timeout = context.send_timeout
        self._parallel = context.parallel
        self._keys = _keys(context.secrets)
        self._client: httpx.Client | None = None
        self._pool = ThreadPoolExecutor(context.parallel, thread_name_prefix="relay-webhook")

    def publish(self, events: Sequence[Event]) -> Sequence[Receipt]:
        """POST each event; none after the send timeout or once the receiver cannot be reached."""
        client = self._client = self._client or self._open()
        batch = _Batch(time.monotonic() + self._send_timeout)
        chains: dict[str, list[Event]] = {}
        for event in events:
            chains.setdefault(event.key, []).append(event)
        receipts: dict[int, Receipt] = {}
        for answered in self._pool.map(lambda chain: self._chain(client, chain, batch), chains.values()):
            receipts.update(answered)
        return [receipts.get(event.id, HELD) for event in events]

    def close(self) -> None:
        """Drop the kept connections."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _open(self) -> httpx.Client:
        make = self._httpx
        client: httpx.Client = make.Client(
            timeout=make.Timeout(ANSWER_S, connect=CONNECT_S),
            limits=make.Limits(max_connections=self._parallel, max_keepalive_connections=self._parallel),
            follow_redirects=False,
            trust_env=False,
            headers={"user-agent": "outbox-relay", "accept-encoding": "identity"},
        )
        return client

    def _chain(self, client: httpx.Client, chain: Sequence[Event], batch: _Batch) -> dict[int, Receipt]:
        receipts: dict[int, Receipt] = {}
        for event in chain:
            if batch.cut or time.monotonic() >= batch.until:
                break
            receipt = receipts[event.id] = self._post(client, event, batch)
            if not isinstance(receipt, Confirmed):
                break
        return receipts

    def _post(self, client: httpx.Client, event: Event, batch: _Batch) -> Receipt:
        httpx = self._httpx
        body = event.payload.encode()
        request = client.build_request("POST", self._url, content=body, headers=self._headers(event))
        try:
            response = client.send(request, stream=True)
            try:
                said = _read(response, batch.until)
            finally:
                response.close()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            batch.cut = True
            return Unavailable(f"cannot reach {self.name}: {_text(error)}")
        except httpx.TransportError as error:
            return Unavailable(f"no answer from {self.name}: {_text(error)}")
        return _receipt(response.status_code, response.headers, said)

    def _headers(self, event: Event) -> dict[str, str]:
        context = attributes(event, self._source)
        headers = {"content-type": context.pop("datacontenttype")}
        for name, value in context.items():
            safe = _UNSAFE.sub(_percent, value)
            headers[f"ce-{name}"] = safe
            if name in ("traceparent", "tracestate"):
                headers[name] = safe
        now = datetime.fromtimestamp(int(time.time()), UTC)
        headers["webhook-id"] = event.idempotency_key
        headers["webhook-timestamp"] = str(int(now.timestamp()))
        if self._keys:
            headers["webhook-signature"] = " ".join(
                key.sign(event.idempotency_key, now, event.payload) for key in self._keys
            )
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


def _receipt(status: int, headers: httpx.Headers, said: str) -> Receipt:
    if 200 <= status < 300:
        return CONFIRMED
    reason = f"HTTP {status}" + (f": {said}" if said else "")
    if 300 <= status < 400:
        return Rejected(f"HTTP {status}: redirects to {headers.get('location', '?')!r}; give the final URL")
    if status >= 500 or status in LATER or status < 200:
        return Unavailable(reason, _seconds(headers.get("retry-after")))
    return Rejected(reason)


def _read(response: httpx.Response, until: float) -> str:
    """Read the body so that the connection can be kept; give up on a long or slow one."""
    body = b""
    for chunk in response.iter_raw(8192):
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
