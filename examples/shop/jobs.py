"""What happens after an order: the worker runs this file.

pgqueue-worker examples.shop.jobs:app --queues mail,recommendations
"""

from __future__ import annotations

import time
from decimal import Decimal

import msgspec
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert

from examples.shop.models import Order, Receipt, Recommendation, Repeat, begin
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


@app.job("refresh-recommendations", queue="recommendations", sheddable=True)
def refresh_recommendations(customer: str) -> None:
    """Sum up what a customer has bought.

    Worth doing, but not worth waiting for: while its queue is full the job is dropped, and the next order makes up.
    """
    with begin() as session:
        bought = select(Order.customer, func.count(), func.sum(Order.dollars)).group_by(Order.customer)
        sums = insert(Recommendation).from_select(
            ["customer", "orders", "dollars"], bought.where(Order.customer == customer)
        )
        session.execute(
            sums.on_conflict_do_update(
                index_elements=[Recommendation.customer],
                set_={
                    "orders": sums.excluded.orders, "dollars": sums.excluded.dollars,
                    "refreshed_at": func.clock_timestamp(),
                },
            )
        )  # fmt: skip
