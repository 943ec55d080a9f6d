"""What happens after an order: the worker runs this file.

pgqueue-worker examples.shop.jobs:app --queues mail
"""

from __future__ import annotations

import time
from decimal import Decimal

import msgspec
from sqlalchemy.dialects.postgresql import insert

from examples.shop.models import Receipt, Repeat, begin
from pgqueue import App, Permanent

app = App()

#: Stands for the mail server, which takes its time.
MAIL_SECONDS = 0.02


class ReceiptFor(msgspec.Struct, frozen=True):
    """The payload of `send-receipt`."""

    order_id: int
    customer: str
    email: str
    dollars: Decimal


@app.job("send-receipt", queue="mail", max_attempts=5, timeout=30)
def send_receipt(order: ReceiptFor) -> None:
    """Mail the receipt of an order, once.

    A job runs at least once: if its worker dies after the work and before the acknowledgement, it runs again. So
    the row of the receipt is what counts, and a second run finds it there.
    """
    if "@" not in order.email:
        raise Permanent(f"order {order.order_id}: {order.email!r} is no e-mail address")
    with begin() as session:
        time.sleep(MAIL_SECONDS)
        receipt = insert(Receipt).values(
            order_id=order.order_id, customer=order.customer, dollars=order.dollars
        )
        if session.scalar(receipt.on_conflict_do_nothing().returning(Receipt.id)) is None:
            session.add(Repeat(what="receipt", order_id=order.order_id))
