"""What the database says when all is done, and whether it is what the product promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import psycopg
from psycopg.rows import class_row

FACTS = """
WITH malformed AS (SELECT id, dollars FROM shop.orders WHERE coalesce(email, '') = ''),
     letters AS (
       SELECT (payload->>'order_id')::bigint AS order_id, reason FROM pgqueue.dead_job WHERE name = 'send-receipt'),
     receipt_order AS (
       SELECT order_id < lag(order_id) OVER (PARTITION BY customer ORDER BY id) AS wrong FROM shop.receipts),
     first_parcels AS (SELECT order_id, customer, min(id) AS id FROM shop.parcels GROUP BY order_id, customer),
     parcel_order AS (
       SELECT order_id < lag(order_id) OVER (PARTITION BY customer ORDER BY id) AS wrong FROM first_parcels),
     waits AS (
       SELECT count(*) AS customers FROM (SELECT FROM shop.orders GROUP BY customer HAVING count(*) > 1) more_than_one)
SELECT
  (SELECT count(*) FROM shop.orders) AS orders,
  (SELECT coalesce(sum(dollars), 0) FROM shop.orders) AS order_dollars,
  (SELECT count(DISTINCT payload->>'order_id') FROM pgqueue.outbox WHERE published_at IS NOT NULL) AS events,
  (SELECT count(*) FROM shop.parcels) AS parcels,
  (SELECT count(DISTINCT order_id) FROM shop.parcels) AS parcel_orders,
  (SELECT coalesce(sum(dollars), 0) FROM shop.parcels) AS parcel_dollars,
  (SELECT count(*) FROM shop.receipts) AS receipts,
  (SELECT coalesce(sum(dollars), 0) FROM shop.receipts) AS receipt_dollars,
  (SELECT count(*) FROM letters) AS dead,
  (SELECT count(*) FROM letters WHERE reason = 'permanent') AS dead_permanent,
  (SELECT count(*) FROM letters WHERE reason = 'undecodable') AS dead_undecodable,
  (SELECT count(*) FROM malformed) AS malformed,
  (SELECT coalesce(sum(dollars), 0) FROM malformed) AS malformed_dollars,
  (SELECT count(*) FROM malformed FULL JOIN letters ON order_id = id
   WHERE id IS NULL OR order_id IS NULL) AS unexplained,
  (SELECT customers FROM waits) AS customers_again,
  (SELECT count(*) FROM receipt_order WHERE wrong) AS receipts_out_of_order,
  (SELECT count(*) FROM parcel_order WHERE wrong) AS parcels_out_of_order,
  (SELECT count(*) FROM shop.parcels WHERE reply_lost) AS replies_lost,
  (SELECT count(*) FROM shop.repeats WHERE what = 'event') AS event_repeats,
  (SELECT count(*) FROM shop.repeats WHERE what = 'receipt') AS receipt_repeats,
  (SELECT count(*) FROM shop.parcels p WHERE reply_lost AND NOT EXISTS
     (SELECT FROM shop.repeats r WHERE r.what = 'event' AND r.order_id = p.order_id)) AS lost_and_not_repeated,
  (SELECT coalesce(sum(ready), 0)::bigint FROM pgqueue.queue_depth) AS ready,
  (SELECT coalesce(sum(delayed), 0)::bigint FROM pgqueue.queue_depth) AS delayed,
  (SELECT coalesce(sum(in_flight), 0)::bigint FROM pgqueue.queue_depth) AS in_flight,
  (SELECT coalesce(sum(blocked), 0)::bigint FROM pgqueue.queue_depth) AS blocked,
  (SELECT pending FROM pgqueue.outbox_lag) AS pending,
  (SELECT parked FROM pgqueue.outbox_lag) AS parked
"""

LATENCIES = """
SELECT percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY extract(epoch FROM sent_at - placed_at)),
       (SELECT percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY extract(epoch FROM received_at - placed_at))
        FROM shop.parcels JOIN shop.orders ON orders.id = order_id),
       extract(epoch FROM max(sent_at) - (SELECT min(placed_at) FROM shop.orders)),
       extract(epoch FROM (SELECT max(received_at) FROM shop.parcels) - (SELECT min(placed_at) FROM shop.orders)),
       extract(epoch FROM max(placed_at) - min(placed_at))
FROM shop.receipts JOIN shop.orders ON orders.id = order_id
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Counts, in one snapshot."""

    orders: int
    order_dollars: Decimal
    events: int
    parcels: int
    parcel_orders: int
    parcel_dollars: Decimal
    receipts: int
    receipt_dollars: Decimal
    dead: int
    dead_permanent: int
    dead_undecodable: int
    malformed: int
    malformed_dollars: Decimal
    unexplained: int
    customers_again: int
    receipts_out_of_order: int
    parcels_out_of_order: int
    replies_lost: int
    event_repeats: int
    receipt_repeats: int
    lost_and_not_repeated: int
    ready: int
    delayed: int
    in_flight: int
    blocked: int
    pending: int
    parked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds from the beginning of an order's transaction, half of the orders and 99 of 100; and how long all took."""

    receipt_p50: float
    receipt_p99: float
    parcel_p50: float
    parcel_p99: float
    receipts_s: float
    parcels_s: float
    orders_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One thing that has to hold, with its numbers."""

    what: str
    numbers: str
    holds: bool


def facts(connection: psycopg.Connection[tuple[Any, ...]]) -> Facts:
    """Read everything in one statement."""
    with connection.cursor(row_factory=class_row(Facts)) as cursor:
        found = cursor.execute(FACTS).fetchone()
    if found is None:
        raise AssertionError("a SELECT without FROM has one row")
    return found


def speed(connection: psycopg.Connection[tuple[Any, ...]]) -> Speed:
    """Read how long receipts and parcels took."""
    ((receipt, parcel, receipts_s, parcels_s, orders_s),) = connection.execute(LATENCIES).fetchall()
    zero = [0.0, 0.0]
    return Speed(
        receipt_p50=(receipt or zero)[0],
        receipt_p99=(receipt or zero)[1],
        parcel_p50=(parcel or zero)[0],
        parcel_p99=(parcel or zero)[1],
        receipts_s=float(receipts_s or 0),
        parcels_s=float(parcels_s or 0),
        orders_s=float(orders_s or 0),
    )


def claims(f: Facts, *, orders: int, dollars: Decimal) -> Sequence[Claim]:
    """Return what must hold after `orders` purchases worth `dollars`, and whether it does."""
    return [
        Claim(
            what="every purchase became an order",
            numbers=f"{orders:,} in the file = {f.orders:,} orders",
            holds=f.orders == orders,
        ),
        Claim(
            what="every order's event was published and applied once",
            numbers=f"{f.orders:,} orders = {f.events:,} distinct events = {f.parcels:,} parcels for "
            f"{f.parcel_orders:,} orders",
            holds=f.orders == f.events == f.parcels == f.parcel_orders,
        ),
        Claim(
            what="every order got its receipt or a dead letter",
            numbers=f"{f.orders:,} orders = {f.receipts:,} receipts + {f.dead:,} dead letters",
            holds=f.orders == f.receipts + f.dead,
        ),
        Claim(
            what="each dead letter is one of the malformed orders",
            numbers=f"{f.malformed:,} malformed = {f.dead_permanent:,} permanent + {f.dead_undecodable:,} undecodable, "
            f"{f.unexplained} unexplained",
            holds=f.unexplained == 0 and f.malformed == f.dead == f.dead_permanent + f.dead_undecodable,
        ),
        Claim(
            what="each customer's receipts and events kept their order",
            numbers=f"{f.customers_again:,} customers with several orders: {f.receipts_out_of_order} receipts, "
            f"{f.parcels_out_of_order} events out of order",
            holds=f.receipts_out_of_order == f.parcels_out_of_order == 0,
        ),
        Claim(
            what="duplicates were absorbed",
            numbers=f"{f.replies_lost:,} replies lost, {f.event_repeats:,} events came again, "
            f"{f.receipt_repeats:,} receipt jobs ran again; none had a second effect",
            holds=f.lost_and_not_repeated == 0
            and f.event_repeats >= f.replies_lost
            and f.parcels == f.parcel_orders,
        ),
        Claim(
            what="nothing is left over",
            numbers=f"ready {f.ready}, delayed {f.delayed}, in flight {f.in_flight}, blocked {f.blocked}; "
            f"outbox pending {f.pending}, parked {f.parked}",
            holds=not any((f.ready, f.delayed, f.in_flight, f.blocked, f.pending, f.parked)),
        ),
        Claim(
            what="the money adds up",
            numbers=f"${dollars:,} in the file = ${f.order_dollars:,} ordered = ${f.parcel_dollars:,} packed = "
            f"${f.receipt_dollars:,} receipted + ${f.malformed_dollars:,} malformed",
            holds=dollars == f.order_dollars == f.parcel_dollars == f.receipt_dollars + f.malformed_dollars,
        ),
    ]
