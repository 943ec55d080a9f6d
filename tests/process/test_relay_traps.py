"""What other outboxes fell into, where no other test shows that this one does not; docs/relay-traps.md lists all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from standardwebhooks.webhooks import Webhook

from pgqueue.embedded import Embedded, EmbeddedUnavailable
from pgqueue.embedded.binaries import installed
from pgqueue.events import Bus
from pgqueue.migrate import upgrade
from relay import Outbox
from relay.config import RelayConfig
from relay.events import SinkDown
from relay.service import Relay
from relay.sinks.memory import MemorySink
from tests.db.relaying import Stepper, inversions, missing, stepper
from tests.process.relaying import Producers, RelayProcess, published
from tests.server import FAST, Connection, Server, in_memory
from tests.sinks.brokers import free_port
from tests.sinks.receiver import Receiver
from tests.waiting import chaos, eventually

RELAY = [sys.executable, "-c", "from relay.cli import main; main()"]
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLjSw"
TEN_MINUTES = 600.0
MIB = 1024 * 1024

#: Transactions that the relay has left open; a look is at work as long as it takes.
OPEN = (
    "SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'outbox-relay%' AND state LIKE 'idle in transaction%'"
    " AND xact_start < clock_timestamp() - interval '3 s'"
)

outbox = Outbox()


@pytest.fixture
def writers(dsn: str) -> Iterator[list[Connection]]:
    """Give connections that write."""
    with ExitStack() as stack:
        yield [stack.enter_context(psycopg.connect(dsn)) for _ in range(2)]


@pytest.fixture
def relay(dsn: str) -> Iterator[Stepper]:
    """Give a relay that publishes when it is told."""
    made = stepper(dsn)
    yield made
    made.conn.close()


def environment(dsn: str, **more: str) -> dict[str, str]:
    """Return an environment that names one database."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "OUTBOX_", "DATABASE_"))}
    return kept | {"PGQUEUE_DSN": dsn, "OUTBOX_ALLOW_PRIVATE": "1"} | more


def waiting(dsn: str) -> int:
    """Count the events without a mark."""
    with psycopg.connect(dsn) as conn:
        row = conn.execute("SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NULL").fetchone()
    assert row is not None
    return int(row[0])


def test_a_transaction_that_got_its_id_early_and_wrote_late_inverts_nothing(
    relay: Stepper, writers: list[Connection]
) -> None:
    early, late = writers
    early.execute("CREATE TEMPORARY TABLE something (n int)")  # it has a transaction id from here on
    first = outbox.add(late, "e", {"v": 1}, aggregate_id="x", version=1)
    late.commit()
    second = outbox.add(early, "e", {"v": 2}, aggregate_id="x", version=2)
    early.commit()
    # The control: who reads in the order of transaction ids has them the wrong way round.
    by_transaction = late.execute("SELECT id FROM pgqueue.outbox ORDER BY xmin::text::bigint, id").fetchall()
    assert [row[0] for row in by_transaction] == [second, first]
    relay.drain()
    assert relay.log == [("x", first), ("x", second)]


@pytest.mark.parametrize("prepared", [False, True], ids=["open", "prepared"])
def test_an_old_transaction_of_another_database_holds_nothing_up(
    server: Server, relay: Stepper, writers: list[Connection], prepared: bool
) -> None:
    with psycopg.connect(server.dsn()) as elsewhere:
        row = elsewhere.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        assert row is not None
        if prepared:
            if elsewhere.execute("SHOW max_prepared_transactions").fetchone() == ("0",):
                pytest.skip("server: max_prepared_transactions is 0")
            elsewhere.execute("CREATE TABLE public.forgotten ()")
            elsewhere.execute("PREPARE TRANSACTION 'forgotten'")
        try:
            ids = [outbox.add(writers[0], "e", {}, aggregate_id="a") for _ in range(20)]
            writers[0].commit()
            # The control: a horizon at the oldest transaction stands still.
            horizon = (
                writers[1].execute("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint").fetchone()
            )
            writers[1].rollback()
            assert horizon is not None
            assert int(str(horizon[0])) <= row[0]
            relay.drain()
            assert [id_ for _, id_ in relay.log] == ids
            assert min(relay.floors.parts.values()) >= ids[-1]
        finally:
            elsewhere.rollback()
            if prepared:
                elsewhere.autocommit = True
                elsewhere.execute("ROLLBACK PREPARED 'forgotten'")


def test_events_written_inside_a_savepoint_are_published_in_their_place(
    relay: Stepper, writers: list[Connection]
) -> None:
    late, early = writers
    ids = [outbox.add(late, "e", {}, aggregate_id="a")]
    with late.transaction():
        ids.append(outbox.add(late, "e", {}, aggregate_id="a"))
    ids.append(outbox.add(late, "e", {}, aggregate_id="a"))
    own = late.execute(
        "SELECT count(DISTINCT xmin::text),"
        " bool_or(xmin::text::bigint <> pg_current_xact_id()::text::bigint & 4294967295) FROM pgqueue.outbox"
    ).fetchone()
    assert own == (2, True), "the control: the row of the savepoint has a transaction id of its own"
    other = outbox.add(early, "e", {}, aggregate_id="b")
    early.commit()
    relay.drain()
    assert relay.log == [("b", other)]
    late.commit()
    relay.drain()
    assert relay.log == [("b", other), *(("a", id_) for id_ in ids)]


def test_a_restored_dump_in_a_new_cluster_is_published_though_its_transaction_ids_begin_again() -> None:
    try:
        tools = installed()
        with (
            Embedded(settings=FAST, scratch=in_memory()) as old,
            Embedded(settings=FAST, scratch=in_memory()) as new,
        ):
            upgrade(old.dsn())
            with psycopg.connect(old.dsn(), autocommit=True) as conn:
                for _ in range(1000):
                    conn.execute("SELECT pg_current_xact_id()")
                done = outbox_of(conn, "a", "b")
                conn.execute("UPDATE pgqueue.outbox SET published_at = now()")
                left = outbox_of(conn, "a", "c", "a")
                before = conn.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
            dump = subprocess.run([tools.tool("pg_dump"), old.dsn()], capture_output=True, check=True).stdout
            order = [tools.tool("psql"), "-q", "-v", "ON_ERROR_STOP=1", new.dsn()]
            subprocess.run(order, input=dump, capture_output=True, check=True)
            relay = stepper(new.dsn())
            with psycopg.connect(new.dsn(), autocommit=True) as conn:
                after = conn.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
                relay.drain()
                assert [id_ for _, id_ in relay.log] == left
                more = outbox_of(conn, "a")
                relay.drain()
            relay.conn.close()
            assert before is not None
            assert after is not None
            assert after[0] < before[0], "the control: ids of transactions went back"
            assert [id_ for _, id_ in relay.log] == [*left, *more]
            assert more[0] > max(done + left)
    except EmbeddedUnavailable as error:
        pytest.skip(f"server: {error}")


def outbox_of(conn: Connection, *aggregates: str) -> list[int]:
    """Write an event for each aggregate named."""
    with conn.transaction():
        return [outbox.add(conn, "e", {}, aggregate_id=a) for a in aggregates]


@pytest.mark.parametrize(
    "written",
    [
        '{"b": 1, "a":1.0,  "a": 2}',
        '{"n": 12345678901234567890123, "f": 1e400, "z": -0.10}',
        '"\\u00e9\\ud83d\\ude00 \\u2028 \\" \\\\ /"',
        "[ ]",
    ],
)
def test_the_bytes_on_the_wire_are_those_of_the_column_and_the_signature_is_of_them(
    dsn: str, writers: list[Connection], written: str
) -> None:
    writers[0].execute("INSERT INTO pgqueue.outbox (event_type, payload) VALUES ('e', %s)", [written])
    writers[0].commit()
    row = writers[0].execute("SELECT payload::text FROM pgqueue.outbox").fetchone()
    assert row is not None
    with Receiver() as receiver:
        env = environment(dsn, OUTBOX_SINK=receiver.url, OUTBOX_WEBHOOK_SECRET=SECRET)
        process = subprocess.Popen(RELAY, env=env, stderr=subprocess.DEVNULL)
        try:
            eventually(lambda: receiver.kept, 20)
        finally:
            process.kill()
            process.wait(60)
        (delivery,) = receiver.kept[:1]
    assert delivery.body == row[0]
    if "e400" not in written:  # which the library reads as infinity
        Webhook(SECRET).verify(delivery.body, dict(delivery.headers))


def test_a_relay_whose_clock_is_wrong_by_ten_minutes_loses_and_inverts_nothing(
    dsn: str, tmp_path: Path
) -> None:
    log = tmp_path / "published"
    with ExitStack() as stack:
        relays = []
        for name, skew in (("fast", TEN_MINUTES), ("slow", -TEN_MINUTES)):
            relays.append(RelayProcess(dsn, log, name, skew=skew, lease=60.0))
            stack.callback(relays[-1].process.wait, 60)
            stack.callback(relays[-1].process.kill)
        producers = Producers(dsn, threads=2)
        with psycopg.connect(dsn, autocommit=True) as watch:
            shared = (
                "SELECT count(DISTINCT p.owner) = 2 AND bool_and(r.lease_until > clock_timestamp())"
                " FROM pgqueue.relay_partition p LEFT JOIN pgqueue.relay r ON r.id = p.owner"
            )
            # Nobody takes a partition before both are there: giving back comes once in a third of a lease.
            with watch.transaction():
                watch.execute("SELECT FROM pgqueue.relay_partition FOR UPDATE")
                there = "SELECT count(*) = 2 FROM pgqueue.relay"
                eventually(lambda: watch.execute(there).fetchone() == (True,), 20)
            eventually(lambda: watch.execute(shared).fetchone() == (True,), 20)
            producers.start()
            try:
                eventually(lambda: len(published(log)) > 300, 30)
                assert watch.execute(shared).fetchone() == (True,)
            finally:
                producers.stop()
        eventually(lambda: waiting(dsn) == 0, 20)
        assert [relay.stop() for relay in relays] == [0, 0]
    seen = published(log)
    assert not missing(seen, producers.committed)
    assert not inversions(seen)
    assert len(seen) == len(set(seen)), "with both alive nothing comes twice"


def test_after_an_outage_batches_are_as_large_as_they_go(dsn: str, writers: list[Connection]) -> None:
    count, batch = 20_000, 500
    writers[0].execute(
        "INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload)"
        " SELECT 'a' || n, 'e', '{}' FROM generate_series(1, %s) n",
        [count],
    )
    writers[0].commit()
    sink = MemorySink()
    sink.away.set()
    away: list[SinkDown] = []
    bus = Bus()
    bus.subscribe(SinkDown, away.append)
    relay = Relay(RelayConfig(dsn=dsn, name="relay", source="/s", batch=batch), sink, bus)
    relay.start()
    try:
        eventually(lambda: len(away) >= 4, 30)
        tried = sink.calls
        sink.resume()
        eventually(lambda: waiting(dsn) == 0, 60)
    finally:
        relay.stop(60)
    assert len(sink.accepted) == count
    assert sink.calls - tried <= count / batch * 1.5


def memory(process: subprocess.Popen[str]) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("routed", [False, True], ids=["the only sink", "one of two sinks"])
def test_a_backlog_behind_a_broker_that_is_away_takes_no_memory_and_no_transaction(
    dsn: str, writers: list[Connection], routed: bool
) -> None:
    count = chaos(100_000, 1_000_000)
    writers[0].execute(
        "INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload)"
        " SELECT 'a' || n %% 20000, CASE n %% 2 WHEN 0 THEN 'even' ELSE 'odd' END, to_jsonb(repeat('x', 300))"
        " FROM generate_series(1, %s) n",
        [count],
    )
    writers[0].commit()
    away = f"http://127.0.0.1:{free_port()}/"
    sinks = ["--sink", "stdout:", "--route", f"odd={away}"] if routed else ["--sink", away]
    began = time.monotonic()
    with (
        psycopg.connect(dsn, autocommit=True) as watch,
        subprocess.Popen(
            [*RELAY, *sinks, "--log-level", "warning", "--max-attempts", "1"],
            env=environment(dsn), text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        ) as process,
    ):  # fmt: skip
        try:
            if routed:
                held = "SELECT count(last_error) > 5000 FROM pgqueue.outbox WHERE published_at IS NULL"
                eventually(lambda: watch.execute(held).fetchone() == (True,), 60)
            beat = "SELECT max(lease_until) FROM pgqueue.relay"
            eventually(lambda: watch.execute(beat).fetchone() != (None,), 20)
            low = memory(process)
            for _ in range(chaos(4, 60)):
                last = watch.execute(beat).fetchone()
                eventually(lambda last=last: watch.execute(beat).fetchone() != last, 20)  # type: ignore[misc]
                assert watch.execute(OPEN).fetchone() == (0,)
            assert memory(process) - low < 40 * MIB, f"{count} events wait"
            assert watch.execute("SELECT max(attempts) FROM pgqueue.outbox").fetchone() == (0,)
            assert waiting(dsn) >= (count // 2 if routed else count)
        finally:
            process.terminate()
            _, said = process.communicate(timeout=60)
    minutes = (time.monotonic() - began) // 60
    assert 1 <= said.count("is away") <= 1 + minutes, "said once a minute, not at each try"
