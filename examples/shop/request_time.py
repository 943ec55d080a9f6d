"""How long a buyer waits: the order with its job and event enqueued, and with the mail and the webhook done inline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median, quantiles

import httpx
import msgspec
from standardwebhooks.webhooks import Webhook

from examples.shop.buy import Purchase, checkout
from examples.shop.checkout import placed
from examples.shop.jobs import ReceiptFor, send_receipt
from examples.shop.models import Order, begin


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTime:
    """Seconds; `failed` inline requests got no answer, after the order was written."""

    queued_p50: float
    queued_p95: float
    inline_p50: float
    inline_p95: float
    count: int
    failed: int


def measure(purchases: Sequence[Purchase], *, url: str, secret: str) -> RequestTime:
    """Place each purchase both ways, in turn."""
    queued, inline, failed = [], [], 0
    webhook = Webhook(secret)
    with httpx.Client(trust_env=False) as client:
        for purchase in purchases:
            at = time.perf_counter()
            checkout(purchase, email=f"{purchase.customer}@example.com")
            queued.append(time.perf_counter() - at)
            at = time.perf_counter()
            try:
                checkout_inline(purchase, client, webhook, url)
            except httpx.TransportError:
                failed += 1
            inline.append(time.perf_counter() - at)
    return RequestTime(
        queued_p50=median(queued),
        queued_p95=quantiles(queued, n=20)[-1],
        inline_p50=median(inline),
        inline_p95=quantiles(inline, n=20)[-1],
        count=len(queued),
        failed=failed,
    )


def checkout_inline(purchase: Purchase, client: httpx.Client, webhook: Webhook, url: str) -> None:
    """Place the order without queue and outbox: the buyer waits for mail server and warehouse, or gets their error."""
    email = f"{purchase.customer}@example.com"
    with begin() as session:
        order = Order(
            customer=purchase.customer, email=email, items=purchase.items, dollars=purchase.dollars,
            bought=purchase.bought,
        )  # fmt: skip
        session.add(order)
        session.flush()
        event = placed(order)
    send_receipt(
        ReceiptFor(order_id=event.order_id, customer=event.customer, email=email, dollars=event.dollars)
    )
    body = msgspec.json.encode(event).decode()
    key, now = f"inline:{event.order_id}", datetime.now(UTC)
    headers = {
        "ce-source": "/inline",
        "webhook-id": key,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": webhook.sign(key, now, body),
    }
    client.post(url, content=body, headers=headers).raise_for_status()
