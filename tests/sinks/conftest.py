"""One rig per sink: how to make events for it, see what arrived, make it refuse, send it away."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Protocol
from urllib.parse import unquote

import psycopg
import pytest
from psycopg import sql

from relay.event import Event, attributes
from relay.sinks import Sink, SinkContext, open_sink
from relay.sinks.memory import MemorySink
from relay.sinks.stdout import StdoutSink
from tests.db.relaying import cleared
from tests.server import Server
from tests.sinks.aws_rigs import *  # noqa: F403 - fixtures
from tests.sinks.broker_rigs import *  # noqa: F403 - fixtures
from tests.sinks.brokers import *  # noqa: F403 - fixtures
from tests.sinks.certificate import *  # noqa: F403 - fixtures
from tests.sinks.events import SOURCE, TRACEPARENT, Arrived, Made
from tests.sinks.pulsar_rigs import *  # noqa: F403 - fixtures
from tests.sinks.receiver import OK, Answer, Receiver

__all__ = ["SECRET", "SOURCE", "Made", "QueueRig", "Rig"]

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLjSw"
BAD_AGGREGATE = "bad" * 200


class Rig(Protocol):
    """A sink with its other end."""

    sink: Sink
    rejects: bool
    goes_away: bool
    deduplicates: bool
    large: int

    def event(
        self,
        aggregate: str | None = "order-1",
        payload: str = "{}",
        *,
        event_type: str = "order.placed",
        bad: bool = False,
    ) -> Event: ...
    def arrived(self) -> list[Arrived]: ...
    def go_away(self) -> None: ...
    def come_back(self) -> None: ...


class MemoryRig(Made):
    """The in-process sink."""

    rejects = goes_away = True

    def __init__(self, *, ordered: bool) -> None:
        super().__init__()
        self.memory = MemorySink(
            ordered=ordered, reject=lambda e: "bad" if e.idempotency_key in self.bad else None
        )
        self.sink: Sink = self.memory

    def arrived(self) -> list[Arrived]:
        """Return what was accepted."""
        return [
            Arrived(
                key=e.idempotency_key,
                event_type=e.event_type,
                aggregate=e.aggregate_id,
                payload=json.loads(e.payload),
                context=attributes(e, SOURCE),
            )
            for e in self.memory.accepted
        ]

    def go_away(self) -> None:
        """Accept nothing."""
        self.memory.away.set()

    def come_back(self) -> None:
        """Accept again."""
        self.memory.resume()


class StdoutRig(Made):
    """The sink that writes lines, into a buffer. It refuses nothing, and a pipe that is gone stays gone."""

    rejects = goes_away = False

    def __init__(self) -> None:
        super().__init__()
        self.buffer = io.BytesIO()
        self.sink: Sink = StdoutSink(SOURCE, self.buffer)

    def arrived(self) -> list[Arrived]:
        """Return the lines."""
        lines = [json.loads(line) for line in self.buffer.getvalue().splitlines()]
        return [
            Arrived(
                key=x["id"],
                event_type=x["type"],
                aggregate=x.get("partitionkey"),
                payload=x.pop("data"),
                context=x,
            )
            for x in lines
        ]

    def go_away(self) -> None:
        """Close the pipe."""
        self.buffer.close()

    def come_back(self) -> None:
        """Do nothing: it cannot."""


class WebhookRig(Made):
    """The webhook sink and a receiver on loopback."""

    rejects = goes_away = True

    def __init__(self) -> None:
        super().__init__()
        self.receiver = Receiver(lambda d: Answer(status=422) if d.key in self.bad else OK)
        self.receiver.start()
        self.sink: Sink = open_sink(
            self.receiver.url, SinkContext(source=SOURCE, secrets=[SECRET], allow_private=True)
        )

    def arrived(self) -> list[Arrived]:
        """Return what the receiver took."""
        return [
            Arrived(
                key=d.headers["ce-id"],
                event_type=unquote(d.headers["ce-type"]),
                aggregate=unquote(d.headers["ce-partitionkey"]) if "ce-partitionkey" in d.headers else None,
                payload=json.loads(d.body),
                context={n[3:]: unquote(v) for n, v in d.headers.items() if n.startswith("ce-")}
                | {"datacontenttype": d.headers["content-type"]},
            )
            for d in self.receiver.kept
        ]

    def go_away(self) -> None:
        """Stop listening; the sink's kept connections go too."""
        self.receiver.stop()
        self.sink.close()

    def come_back(self) -> None:
        """Listen again."""
        self.receiver.start()


class QueueRig:
    """The sink that enqueues jobs, into the database that holds the outbox."""

    rejects = goes_away = deduplicates = True
    large = Made.large

    def __init__(self, server: Server, dsn: str) -> None:
        self.server = server
        self.dsn = dsn
        with psycopg.connect(dsn) as conn:
            self.dbname = conn.info.dbname
        self.sink: Sink = open_sink(
            "queue:", SinkContext(source=SOURCE, dsn=dsn, subscribers=lambda event_type: [f"on {event_type}"])
        )

    def event(
        self,
        aggregate: str | None = "order-1",
        payload: str = "{}",
        *,
        event_type: str = "order.placed",
        bad: bool = False,
    ) -> Event:
        """Write an event and return it as read."""
        if bad:
            aggregate = BAD_AGGREGATE
        with psycopg.connect(self.dsn) as conn:
            row = conn.execute(
                "INSERT INTO pgqueue.outbox"
                " (aggregate_id, event_type, payload, aggregate_type, aggregate_version, headers)"
                " VALUES (%s, %s, %s, 'order', 7, %s)"
                " RETURNING id, part, coalesce(aggregate_id, id::text), payload::text, created_at",
                [aggregate, event_type, payload, json.dumps({"traceparent": TRACEPARENT})],
            ).fetchone()
        assert row is not None
        return Event(
            id=row[0],
            part=row[1],
            key=row[2],
            aggregate_id=aggregate,
            version=7,
            event_type=event_type,
            payload=row[3],
            aggregate_type="order",
            headers={"traceparent": TRACEPARENT},
            created_at=row[4],
            attempts=0,
        )

    def arrived(self) -> list[Arrived]:
        """Return the jobs."""
        with psycopg.connect(self.dsn) as conn:
            rows = conn.execute(
                "SELECT headers->>'id', headers->>'type', key, payload, headers FROM pgqueue.job ORDER BY id"
            ).fetchall()
        return [
            Arrived(key=key, event_type=kind, aggregate=agg, payload=data, context=headers)
            for key, kind, agg, data, headers in rows
        ]

    def go_away(self) -> None:
        """Refuse connections to the database."""
        self._allow(allow=False)

    def come_back(self) -> None:
        """Take connections again."""
        self._allow(allow=True)

    def _allow(self, *, allow: bool) -> None:
        with self.server.admin() as admin:
            admin.execute(
                sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}").format(
                    sql.Identifier(self.dbname), sql.SQL("true" if allow else "false")
                )
            )
            if not allow:
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [self.dbname]
                )


@pytest.fixture(scope="module")
def shop(server: Server) -> Iterator[str]:
    """Give the DSN of one database for the whole module."""
    name = server.migrated()
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def dsn(shop: str) -> str:
    """Give that database, emptied."""
    return cleared(shop)


BROKERS = {
    f"{scheme}:": f"{scheme}_rig"
    for scheme in ("kafka", "amqp", "nats", "redis", "sqs", "sns", "kinesis", "pulsar")
}


@pytest.fixture(params=["memory", "memory ordered", "stdout:", "http:", "queue:", *BROKERS])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Give each sink in turn."""
    made: Rig
    if request.param in BROKERS:
        made = request.getfixturevalue(BROKERS[request.param])
    elif request.param == "queue:":
        made = QueueRig(request.getfixturevalue("server"), request.getfixturevalue("dsn"))
    elif request.param == "http:":
        made = WebhookRig()
    elif request.param == "stdout:":
        made = StdoutRig()
    else:
        made = MemoryRig(ordered=request.param == "memory ordered")
    yield made
    made.sink.close()
    if isinstance(made, WebhookRig):
        made.receiver.stop()
    elif isinstance(made, QueueRig):
        made.come_back()
