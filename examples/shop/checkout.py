"""The one transaction this product is about: the order, its job and its event, all or none."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import msgspec
from sqlalchemy.orm import Session

from examples.shop.jobs import ReceiptFor, send_receipt
from examples.shop.models import Order
from relay import Outbox

outbox = Outbox()


class OrderPlaced(msgspec.Struct, frozen=True):
    """The payload of the event `order.placed`."""

    order_id: int
    customer: str
    items: int
    dollars: Decimal


def place_order(
    session: Session, *, customer: str, email: str, items: int, dollars: Decimal, bought: date
) -> Order:
    """Write an order, the job that mails its receipt, and the event for the warehouse, in `session`.

    Nothing is sent here, so the buyer waits for the commit alone. Both follow the order of the customer's purchases.
    """
    order = Order(customer=customer, email=email, items=items, dollars=dollars, bought=bought)
    session.add(order)
    session.flush()
    send_receipt.using(key=customer).enqueue(
        session, ReceiptFor(order_id=order.id, customer=customer, email=email, dollars=dollars)
    )
    outbox.add(session, "order.placed", placed(order), aggregate_id=customer)
    return order


def placed(order: Order) -> OrderPlaced:
    """Return what the warehouse is told about an order."""
    return OrderPlaced(order_id=order.id, customer=order.customer, items=order.items, dollars=order.dollars)
