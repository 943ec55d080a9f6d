"""The buyers: a file of purchases, bought in the order of their dates by a few threads."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from pathlib import Path
from threading import Event, Thread
from zlib import crc32

from sqlalchemy import text

from examples.shop.checkout import outbox, place_order, placed
from examples.shop.models import Order, begin
from pgqueue import ConfigError

EXCERPT = Path(__file__).with_name("orders.csv")
COLUMNS = "customer_id, date, items, dollars"
#: One order of so many has no address, and one was written by a program that does not know better.
MALFORMED_EVERY = 250

_SQL_PRODUCER = text(
    "SELECT pgqueue.enqueue('send-receipt', CAST(:payload AS json), queue => 'mail', key => :key)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """One line of the file. A customer's purchases keep their order."""

    customer: str
    bought: date
    items: int
    dollars: Decimal


def read(path: Path) -> list[Purchase]:
    """Read a file with the columns customer_id, date, items, dollars, in the order of the dates."""
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            found = [
                Purchase(
                    customer=line["customer_id"],
                    bought=date.fromisoformat(line["date"]),
                    items=int(line["items"]),
                    dollars=Decimal(line["dollars"]),
                )
                for line in csv.DictReader(lines)
            ]
    except (KeyError, ValueError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"{path}: {COLUMNS} are expected in each line ({error!r})") from error
    if not found:
        raise ConfigError(f"{path} has no purchases: {COLUMNS} are expected in each line")
    return sorted(found, key=lambda purchase: purchase.bought)


def buy(number: int, purchase: Purchase) -> None:
    """Buy in one transaction; some purchases are malformed on purpose."""
    match number % MALFORMED_EVERY:
        case 100:
            checkout(purchase, email="")
        case 200:
            checkout_of_another_program(purchase)
        case _:
            checkout(purchase, email=f"{purchase.customer}@example.com")


def checkout(purchase: Purchase, *, email: str) -> None:
    """Place the order as the shop's own code does."""
    with begin() as session:
        place_order(
            session,
            customer=purchase.customer,
            email=email,
            items=purchase.items,
            dollars=purchase.dollars,
            bought=purchase.bought,
        )


def checkout_of_another_program(purchase: Purchase) -> None:
    """Place the order with plain SQL and a payload that no handler can read: it is checked by nobody before."""
    with begin() as session:
        order = Order(
            customer=purchase.customer, email=None, items=purchase.items, dollars=purchase.dollars,
            bought=purchase.bought,
        )  # fmt: skip
        session.add(order)
        session.flush()
        payload = json.dumps({"order_id": order.id, "customer": order.customer, "email": None})
        session.execute(_SQL_PRODUCER, {"payload": payload, "key": order.customer})
        outbox.add(session, "order.placed", placed(order), aggregate_id=order.customer)


@dataclass(slots=True, kw_only=True)
class Buyers:
    """Threads that buy; one customer's purchases are all made by the same thread, one after the other.

    `rate` is in purchases a second; a buyer that falls behind catches up.
    """

    purchases: Sequence[Purchase]
    rate: float
    count: int = 4
    stop: Event = field(default_factory=Event)
    seconds: list[float] = field(default_factory=list)
    failed: BaseException | None = None
    _threads: list[Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begin to buy."""
        began = time.monotonic()
        for place in range(self.count):
            share = [
                (number, purchase)
                for number, purchase in enumerate(self.purchases)
                if crc32(purchase.customer.encode()) % self.count == place
            ]
            thread = Thread(target=self._buy, args=(share, began), name=f"buyer-{place}", daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def busy(self) -> bool:
        """Whether somebody still buys. Raises what stopped a buyer."""
        if self.failed is not None:
            raise self.failed
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """Wait until all have stopped."""
        self.stop.set()
        for thread in self._threads:
            thread.join()

    def _buy(self, share: Sequence[tuple[int, Purchase]], began: float) -> None:
        try:
            for number, purchase in share:
                if self.stop.wait(max(0.0, began + number / self.rate - time.monotonic())):
                    return
                at = time.perf_counter()
                buy(number, purchase)
                self.seconds.append(time.perf_counter() - at)
        except Exception as error:  # noqa: BLE001  the main thread raises it
            self.failed = error
            self.stop.set()
