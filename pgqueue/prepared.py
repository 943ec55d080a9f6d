"""Prepared: a job type with options, ready to be enqueued, now or after something else.

    send_receipt.using(priority=1).enqueue(session, Receipt(order_id=1))
    extract.using(then=[load.with_payload("2026-01-01")]).enqueue(session, "2026-01-01")

A copy with other options is another value; nothing here is changed after it was made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar, Unpack

from pgqueue.connection import execute, execute_async, require_transaction, require_transaction_async
from pgqueue.enqueue import Options, OptionValues, enqueue, step
from pgqueue.payload import Codec
from pgqueue.ref import JobRef
from pgqueue.statement import Statement
from pgqueue.step import Step

P = TypeVar("P")


class Prepared(Generic[P]):
    """A job type together with the options for the jobs to enqueue."""

    __slots__ = ("_codec", "_options", "_otherwise", "name")

    def __init__(
        self,
        name: str,
        codec: Codec,
        options: Options,
        otherwise: tuple[str | None, int | None] = (None, None),
    ) -> None:
        self.name = name
        self._codec = codec
        self._options = options
        self._otherwise = otherwise

    def using(self, **options: Unpack[OptionValues]) -> Prepared[P]:
        """Return a copy with other options (see `pgqueue.enqueue.Options`).

        Raises BadOption at once for a bad one.
        """
        return Prepared(self.name, self._codec, self._options.but(**options), self._otherwise)

    def enqueue(self, handle: Any, payload: P | None = None) -> JobRef:
        """Enqueue one job in the transaction of `handle`.

        Raises NotInTransaction on an autocommit handle, BadPayload or BadOption before anything is sent.
        """
        return self.enqueue_many(handle, (payload,))[0]

    async def aenqueue(self, handle: Any, payload: P | None = None) -> JobRef:
        """Enqueue one job in the transaction of an asynchronous handle."""
        return (await self.aenqueue_many(handle, (payload,)))[0]

    def enqueue_many(self, handle: Any, payloads: Iterable[P | None]) -> list[JobRef]:
        """Enqueue one job per payload, in one statement; refs come back in the order of the payloads."""
        statement = self._statement(list(payloads))
        require_transaction(handle)
        return execute(handle, statement)

    async def aenqueue_many(self, handle: Any, payloads: Iterable[P | None]) -> list[JobRef]:
        """Enqueue one job per payload on an asynchronous handle."""
        statement = self._statement(list(payloads))
        await require_transaction_async(handle)
        return await execute_async(handle, statement)

    def with_payload(self, payload: P | None = None) -> Step:
        """Return a step: this job with its payload and options, to follow another job or to be one of a batch."""
        return step(self.name, payload, self._codec.encode(payload), self._options, self._otherwise)

    def _statement(self, values: list[P | None]) -> Statement[list[JobRef]]:
        return enqueue(self.name, values, self._codec.encode_all(values), self._options, self._otherwise)
