"""The shop over HTTP: POST /orders and GET /depth.

uvicorn examples.shop.api:api --port 8000
curl -d '{"customer": "00042", "email": "ada@example.com", "items": 2, "dollars": "29.33"}' localhost:8000/orders
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from math import ceil
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from examples.shop.checkout import place_order
from examples.shop.jobs import refresh_recommendations
from examples.shop.models import begin, create_tables
from pgqueue import QueueFull
from pgqueue.connection import execute
from pgqueue.depth import gauge

LONGEST_BODY = 16 * 1024


class NewOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a buyer sends."""

    customer: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[\w.-]+\Z")]
    email: Annotated[str, Meta(max_length=254, pattern=r"^[^@\s\x00]+@[^@\s\x00]+\Z")]
    items: Annotated[int, Meta(ge=1, le=1000)]
    dollars: Decimal

    def __post_init__(self) -> None:
        amount = self.dollars
        if not (amount.is_finite() and 0 <= amount < 1_000_000 and amount == round(amount, 2)):
            raise ValueError("`dollars` must be from 0 to 999999.99, without a fraction of a cent")


async def post_order(request: Request) -> Response:
    """Place an order: 201 with its id once order, jobs and event are committed; 429 while too many receipts wait."""
    if int(request.headers.get("content-length") or 0) > LONGEST_BODY:
        return JSONResponse({"error": f"more than {LONGEST_BODY} bytes"}, 413)
    try:
        order = msgspec.json.decode(await request.body(), type=NewOrder)
    except msgspec.ValidationError as error:
        return JSONResponse({"error": str(error)}, 422)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return JSONResponse({"error": f"not JSON: {error}"}, 400)
    try:
        id_ = await run_in_threadpool(place, order, datetime.now(UTC).date())
    except QueueFull as full:
        seconds = str(ceil(full.retry_after.total_seconds()))
        return JSONResponse(
            {"error": f"too many orders, try again in {seconds} s"}, 429, {"retry-after": seconds}
        )
    return JSONResponse({"id": id_}, 201, {"location": f"/orders/{id_}"})


async def get_depth(_: Request) -> Response:
    """Show how much waits, as sampled by the workers every few seconds: it costs the same at any depth."""
    return JSONResponse(await run_in_threadpool(depth))


def place(new: NewOrder, today: date) -> int:
    """Place the order in one transaction; return its id."""
    with begin() as session:
        order = place_order(
            session,
            customer=new.customer,
            email=new.email,
            items=new.items,
            dollars=new.dollars,
            bought=today,
        )
        refresh_recommendations.using(dedup_key=new.customer, dedup_window="live").enqueue(
            session, new.customer
        )
        return order.id


def depth() -> list[dict[str, object]]:
    """Read the sampled depth of each queue."""
    with begin() as session:
        return [msgspec.to_builtins(queue) for queue in execute(session, gauge())]


@asynccontextmanager
async def started(_: Starlette) -> AsyncIterator[None]:
    """Make the shop's tables before the first request."""
    await run_in_threadpool(create_tables)
    yield


api = Starlette(
    routes=[Route("/orders", post_order, methods=["POST"]), Route("/depth", get_depth)], lifespan=started
)
