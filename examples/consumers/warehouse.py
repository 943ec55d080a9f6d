"""What the consumers do with an event: reserve stock, in the warehouse's own database.

The claim of the event's key and the reservation are one transaction. A repetition finds the key taken; a crash
before the commit frees it. The database needs the pgqueue schema for the inbox (`pgqueue migrate`).
"""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection, Connection

from relay import Inbox

CONSUMER = "warehouse"
TABLE = "CREATE TABLE IF NOT EXISTS public.reservation (order_id bigint NOT NULL, quantity integer NOT NULL)"
RESERVE = "INSERT INTO public.reservation (order_id, quantity) VALUES (%s, %s)"

inbox = Inbox()


def reserve(conn: Connection[Any], *, source: str, key: str, order: dict[str, Any]) -> bool:
    """Reserve stock for an order; False where this event was applied before."""
    with conn.transaction():
        if not inbox.claim(conn, key, consumer=CONSUMER, source=source):
            return False
        conn.execute(RESERVE, [order["id"], order["quantity"]])
    return True


async def areserve(conn: AsyncConnection[Any], *, source: str, key: str, order: dict[str, Any]) -> bool:
    """Reserve stock on an asynchronous connection; False where this event was applied before."""
    async with conn.transaction():
        if not await inbox.aclaim(conn, key, consumer=CONSUMER, source=source):
            return False
        await conn.execute(RESERVE, [order["id"], order["quantity"]])
    return True
