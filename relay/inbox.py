"""Apply each event once: the consumer's side, in the consumer's own transaction.

    with Session.begin() as session:
        if inbox.claim(session, "outbox:8842", consumer="warehouse", source="/outbox/shop"):
            ...                                  # the effects, in the same transaction

A repetition finds the key taken and returns False; a rollback frees it. A key is remembered for the inbox
retention (seven days unless the relay that prunes is told otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pgqueue.connection import execute, execute_async, require_transaction, require_transaction_async
from pgqueue.statement import Row, Statement, load, scalar
from relay.fields import KEY_BYTES, LOWEST, NAME_BYTES, aggregate, text, whole

_SQL = load("relay", "inbox")

PAGE = 1000


class Inbox:
    """The reading side's memory; it has no state, one for the whole program is enough."""

    def claim(self, handle: Any, key: str, *, consumer: str, source: str) -> bool:
        """Take a key in the transaction of `handle`; False means that it was applied before.

        Waits for an open transaction that has taken the same key, and wins if that one rolls back. At
        REPEATABLE READ and above a key committed meanwhile is a serialization failure, like any other
        conflict there. Raises BadOption before anything is sent, NotInTransaction on a handle that would commit
        at once: the key would be taken without its effects.
        """
        statement = _claim(key, consumer, source)
        require_transaction(handle)
        return execute(handle, statement)

    async def aclaim(self, handle: Any, key: str, *, consumer: str, source: str) -> bool:
        """Take a key in the transaction of an asynchronous handle; False means that it was applied before."""
        statement = _claim(key, consumer, source)
        await require_transaction_async(handle)
        return await execute_async(handle, statement)

    def newer(self, handle: Any, *, consumer: str, source: str, aggregate_id: object, version: int) -> bool:
        """Note the version of an aggregate; False means that it or a later one was seen: ignore the event.

        For consumers that keep only the latest state. Versions are whole numbers. Waits for an open transaction on
        the same aggregate. Raises BadOption before anything is sent.
        """
        statement = _newer(consumer, source, aggregate_id, version)
        require_transaction(handle)
        return execute(handle, statement)

    async def anewer(
        self, handle: Any, *, consumer: str, source: str, aggregate_id: object, version: int
    ) -> bool:
        """Note the version of an aggregate on an asynchronous handle; False means that the event is stale."""
        statement = _newer(consumer, source, aggregate_id, version)
        await require_transaction_async(handle)
        return await execute_async(handle, statement)

    def prune(self, handle: Any, keep: timedelta) -> int:
        """Delete at most a page of keys older than `keep`; return how many went. Call again until it is 0."""
        return execute(handle, prune(keep))


def prune(keep: timedelta) -> Statement[int]:
    """Delete a page of keys older than `keep`; the answer is how many went."""
    return Statement(_SQL["prune"], {"keep": keep, "page": PAGE}, scalar)


def _claim(key: str, consumer: str, source: str) -> Statement[bool]:
    params = {"key": text("key", key, KEY_BYTES), **_reader(consumer, source)}
    return Statement(_SQL["claim"], params, _any)


def _newer(consumer: str, source: str, aggregate_id: object, version: int) -> Statement[bool]:
    params = {
        **_reader(consumer, source),
        "aggregate_id": aggregate(aggregate_id),
        "version": whole("version", version, LOWEST),
    }
    return Statement(_SQL["newer"], params, _any)


def _reader(consumer: str, source: str) -> dict[str, str]:
    return {"consumer": text("consumer", consumer, NAME_BYTES), "source": text("source", source, KEY_BYTES)}


def _any(rows: Sequence[Row]) -> bool:
    return bool(rows)
