"""The shop's own tables, in a schema of their own; pgqueue's tables are in schema `pgqueue` of the same database."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import date, datetime
from decimal import Decimal
from functools import cache

from sqlalchemy import DateTime, Engine, ForeignKey, MetaData, Numeric, create_engine, func, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

#: The default pool is too small for eight handler threads or sixteen requests at a time.
CONNECTIONS = 16


class Base(DeclarativeBase):
    """What the shop and its warehouse remember."""

    metadata = MetaData(schema="shop")
    type_annotation_map = {datetime: DateTime(timezone=True), Decimal: Numeric(12, 2)}  # noqa: RUF012


class Order(Base):
    """One purchase. Without an e-mail address no receipt can be sent."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    email: Mapped[str | None]
    bought: Mapped[date]
    items: Mapped[int]
    dollars: Mapped[Decimal]
    placed_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Receipt(Base):
    """A receipt that was sent; an order has at most one, however often its job runs."""

    __tablename__ = "receipts"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id), unique=True)
    customer: Mapped[str]
    dollars: Mapped[Decimal]
    sent_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Parcel(Base):
    """What the warehouse packs. Nothing here forbids two parcels for one order: the inbox does."""

    __tablename__ = "parcels"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]
    customer: Mapped[str]
    dollars: Mapped[Decimal]
    reply_lost: Mapped[bool]
    received_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Recommendation(Base):
    """What a customer is shown next is chosen by this; made anew from the orders, so it may be late or left out."""

    __tablename__ = "recommendations"

    customer: Mapped[str] = mapped_column(primary_key=True)
    orders: Mapped[int]
    dollars: Mapped[Decimal]
    refreshed_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Repeat(Base):
    """A job that ran again, or an event that came again, and changed nothing."""

    __tablename__ = "repeats"

    id: Mapped[int] = mapped_column(primary_key=True)
    what: Mapped[str]
    order_id: Mapped[int]


@cache
def engine() -> Engine:
    """Return the engine of DATABASE_URL; it connects at the first use."""
    url = os.environ["DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://", 1)
    return create_engine(url, pool_size=CONNECTIONS, max_overflow=0)


def begin() -> AbstractContextManager[Session]:
    """Open a transaction of the shop: `with begin() as session`, committed at the end of the block."""
    return sessionmaker(engine()).begin()


def create_tables() -> None:
    """Make the shop's schema and tables where they are missing."""
    with engine().begin() as connection:
        # Two services that start together would both find nothing and both create.
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('shop'))"))
        connection.execute(text("CREATE SCHEMA IF NOT EXISTS shop"))
        Base.metadata.create_all(connection)
