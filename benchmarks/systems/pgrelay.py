"""pgrelay: jobs in the transaction; it has no sink but HTTP, so a handler of ours sends to Kafka."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from benchmarks.program import Program, library, main
from benchmarks.relay.peers import NAME, aggregate, event, place
from benchmarks.system import Python, System

HANDLER = "publish"
CONCURRENCY = 32

SYSTEM = System(
    name="pgrelay",
    title="pgrelay",
    language="Python",
    install=Python(packages=("pgrelay", "aiokafka", "uvloop"), at_least=(3, 12)),
    settings={
        "worker": f"PGRELAY_WORKER_CONCURRENCY and _BATCH_SIZE {CONCURRENCY} (default 8), the concurrency_limit of the "
        f"queue as high (default 8), poll 50 ms, pool {CONCURRENCY + 8}",
        "broker": "it cannot publish to a broker: a Python handler job awaits an aiokafka producer, acks all, "
        "idempotent; the key is the aggregate",
        "order": "none: events of one aggregate are published at the same time",
        "event loop": "uvloop",
    },
    left="SELECT EXISTS (SELECT FROM pgrelay_job WHERE status IN ('pending', 'leased'))",
    count_left="SELECT count(*) FROM pgrelay_job WHERE status <> 'succeeded'",
    modes=frozenset({"relay"}),
    versions=("pgrelay", "aiokafka", "asyncpg", "SQLAlchemy"),
    most=2_000,
    chunk=1_000,
    environ={
        "PGRELAY_DATABASE_URL": "postgresql+asyncpg://", "PGRELAY_WORKER_CONCURRENCY": str(CONCURRENCY),
        "PGRELAY_WORKER_BATCH_SIZE": str(CONCURRENCY), "PGRELAY_WORKER_POLL_INTERVAL_SECONDS": "0.05",
        "PGRELAY_DB_POOL_SIZE": str(CONCURRENCY + 8), "PGRELAY_LOG_LEVEL": "WARNING",
    },
)  # fmt: skip


class Pgrelay(Program):
    """As its README and its example of a handler show it."""

    def _factory(self) -> Any:
        session = library("pgrelay.db.session")
        engine = session.create_engine(library("pgrelay.config.settings").load_settings())
        return session.create_session_factory(engine)

    def setup(self) -> None:
        settings = library("pgrelay.config.settings").load_settings()
        library("pgrelay.db.migrations").upgrade(settings)

    async def open(self) -> Any:
        factory = self._factory()
        async with factory() as session, session.begin():
            await session.execute(
                library("sqlalchemy").text(
                    "INSERT INTO pgrelay_queue (name, concurrency_limit) VALUES ('default', :most)"
                    " ON CONFLICT (name) DO UPDATE SET concurrency_limit = :most"
                ),
                {"most": CONCURRENCY},
            )
        return library("pgrelay.sdk.client").PgRelayClient.from_env(), factory

    async def many(self, handle: Any, payloads: list[dict[str, Any]]) -> None:
        client, factory = handle
        async with factory() as session, session.begin():
            for number in (payload["n"] for payload in payloads):
                await client.enqueue_handler(session=session, name=HANDLER, payload=event(number))

    async def work(self, _note: Callable[[int], None]) -> None:
        producer = library("aiokafka").AIOKafkaProducer(
            bootstrap_servers=place(), acks="all", enable_idempotence=True
        )
        await producer.start()
        registry = library("pgrelay.worker.handlers").HandlerRegistry()

        async def publish(payload: dict[str, Any]) -> None:
            key = aggregate(payload["n"]).encode()
            await producer.send_and_wait(NAME, json.dumps(payload).encode(), key=key)

        registry.register(HANDLER, publish)
        await library("pgrelay.cli.commands_worker").run_worker_async(handler_registry=registry)


if __name__ == "__main__":
    main(Pgrelay())
