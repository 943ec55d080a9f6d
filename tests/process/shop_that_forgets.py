"""The shop with two faults: some receipts are never sent, and the warehouse does without its inbox."""

from __future__ import annotations

from typing import Any

from examples.shop import receiver
from examples.shop.jobs import ReceiptFor, send_receipt
from pgqueue import App

app = App()


@app.job("send-receipt", queue="mail")
def forgetful(order: ReceiptFor) -> None:
    """Send two receipts of three; find the malformed orders as before."""
    if order.order_id % 3 or not order.email:
        send_receipt(order)


class NoInbox:
    """Believes that every delivery is the first."""

    def claim(self, *_: Any, **__: Any) -> bool:
        """Note nothing."""
        return True


if __name__ == "__main__":
    receiver.inbox = NoInbox()  # type: ignore[assignment]
    receiver.main()
