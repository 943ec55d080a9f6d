"""faststream-outbox: a FastStream subscriber on a table, its publisher decorator sends to Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks.program import Program, library, main
from benchmarks.relay.peers import NAME, aggregate, event, place
from benchmarks.system import Python, System

QUEUE = "relayed"
WORKERS = 64
BATCH = 1_000
FLUSH = 100

SYSTEM = System(
    name="faststream",
    title="faststream-outbox",
    language="Python",
    install=Python(packages=("faststream-outbox[asyncpg]", "faststream[kafka]", "uvloop")),
    settings={
        "worker": f"max_workers {WORKERS}, fetch_batch_size {BATCH:,}, min_fetch_interval 10 ms, "
        f"terminal_flush_batch_size {FLUSH} (its documents' way to high throughput)",
        "broker": "KafkaBroker (aiokafka), acks all, idempotent; the key is the aggregate",
        "order": "none: workers take events of one aggregate at the same time; with max_workers 1 it has order, and "
        "a round trip for each event",
        "event loop": "uvloop",
    },
    left="SELECT EXISTS (SELECT FROM outbox)",
    count_left="SELECT count(*) FROM outbox",
    modes=frozenset({"relay"}),
    versions=("faststream-outbox", "faststream", "aiokafka", "asyncpg"),
    most=20_000,
    chunk=1_000,
)


class Faststream(Program):
    """As its relay page shows it."""

    def _table(self) -> tuple[Any, Any, Any]:
        sqlalchemy, outbox = library("sqlalchemy"), library("faststream_outbox")
        metadata = sqlalchemy.MetaData()
        table = outbox.make_outbox_table(metadata, table_name="outbox")
        engine = library("sqlalchemy.ext.asyncio").create_async_engine(
            "postgresql+asyncpg://", pool_size=WORKERS + 5, max_overflow=10
        )
        return metadata, table, engine

    async def setup(self) -> None:
        metadata, _, engine = self._table()
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
            settings = library("faststream_outbox").outbox_autovacuum_ddl("outbox")
            await connection.execute(library("sqlalchemy").text(settings))

    async def open(self) -> Any:
        _, table, engine = self._table()
        broker = library("faststream_outbox").OutboxBroker(engine, outbox_table=table)
        await broker.connect()
        return broker, engine

    async def many(self, handle: Any, payloads: list[dict[str, Any]]) -> None:
        broker, engine = handle
        async with engine.begin() as connection:
            await broker.publish_batch(*(event(p["n"]) for p in payloads), queue=QUEUE, session=connection)

    async def work(self, _note: Callable[[int], None]) -> None:
        kafka = library("faststream.kafka")
        broker, _ = await self.open()
        target = kafka.KafkaBroker(place(), acks="all", enable_idempotence=True, logger=None)

        async def relay(body: dict) -> Any:  # type: ignore[type-arg]
            return kafka.KafkaResponse(body, key=aggregate(body["n"]).encode())

        subscribed = broker.subscriber(
            QUEUE, max_workers=WORKERS, fetch_batch_size=BATCH, min_fetch_interval=0.01, max_fetch_interval=0.1,
            terminal_flush_batch_size=FLUSH,
        )  # fmt: skip
        target.publisher(NAME)(subscribed(relay))
        await target.connect()
        await broker.start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    main(Faststream())
