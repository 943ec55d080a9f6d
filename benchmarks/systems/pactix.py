"""pactix: an outbox with order per key; its runner claims a batch, publishes and marks event by event."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks.program import Program, library, main
from benchmarks.relay.peers import EVENT_TYPE, NAME, aggregate, event, place
from benchmarks.system import Python, System

BATCH = 1_000

SYSTEM = System(
    name="pactix",
    title="pactix",
    language="Python",
    install=Python(
        packages=("pactix[postgres,kafka,migrations]", "psycopg2-binary", "uvloop"), at_least=(3, 12)
    ),
    settings={
        "worker": f"OutboxRunner.run_once again and again, without the pause of a second between that its documents "
        f"have; outbox_batch_size {BATCH:,} (default 100)",
        "broker": "its KafkaOutboxPublisher (aiokafka), acks all, idempotent; message_key and ordering_key are the "
        "aggregate",
        "order": "per event type and ordering_key: a claim takes only the oldest event of each, told by created_at",
        "event loop": "uvloop",
    },
    left="SELECT EXISTS (SELECT FROM outbox_message WHERE status IN ('pending', 'processing'))",
    count_left="SELECT count(*) FROM outbox_message WHERE status <> 'published'",
    modes=frozenset({"relay"}),
    versions=("pactix", "aiokafka", "asyncpg", "SQLAlchemy"),
    most=3_000,
    chunk=1_000,
)


class Pactix(Program):
    """As its documents show it."""

    def _engine(self) -> Any:
        return library("sqlalchemy.ext.asyncio").create_async_engine("postgresql+asyncpg://")

    def setup(self) -> None:
        config = library("alembic.config").Config()
        config.set_main_option("script_location", "pactix:db/migrations")
        os.environ["PACTIX_DATABASE_URL"] = "postgresql+psycopg2://"
        library("alembic.command").upgrade(
            config, "0002"
        )  # 0003 is for wake-ups, which a backlog does not need

    def _store(self) -> Any:
        pactix = library("pactix")
        return pactix.OutboxStore(pactix.PactixConfig(outbox_batch_size=BATCH))

    def open(self) -> Any:
        return self._store(), self._engine()

    async def many(self, handle: Any, payloads: list[dict[str, Any]]) -> None:
        pactix, (store, engine) = library("pactix"), handle
        async with engine.begin() as connection:
            for number in (payload["n"] for payload in payloads):
                key = aggregate(number)
                about = (
                    pactix.MessageMetadata.for_event_type(EVENT_TYPE)
                    .with_message_key(key)
                    .with_ordering_key(key)
                )
                await store.append(connection, pactix.MessageEnvelope(about, event(number)))

    async def work(self, _note: Callable[[int], None]) -> None:
        pactix, kafka = library("pactix"), library("pactix.transport.kafka")
        router, registry = kafka.KafkaTopicRouter(), pactix.PublisherRegistry()
        await router.register(EVENT_TYPE, NAME)
        producer = library("aiokafka").AIOKafkaProducer(
            bootstrap_servers=place(), acks="all", enable_idempotence=True
        )
        await producer.start()
        await registry.register(
            EVENT_TYPE, kafka.KafkaOutboxPublisher(kafka.AIOKafkaProducerClient(producer), router)
        )
        runner = pactix.OutboxRunner(self._store(), registry)
        engine = self._engine()
        while True:
            await runner.run_once(engine)


if __name__ == "__main__":
    main(Pactix())
