"""A relay that follows the write-ahead log: commit order, nothing lost, no log held by what is set aside."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from pgqueue.doctor import checkup
from pgqueue.embedded import Embedded, EmbeddedUnavailable
from pgqueue.errors import ConfigError
from pgqueue.events import Bus, Event, LoopFailed
from pgqueue.migrate import upgrade
from relay import Outbox
from relay.cli import main
from relay.config import RelayConfig
from relay.events import EventRejected, SinkDown
from relay.publish import RejectionPolicy
from relay.service import Relay
from relay.sinks.memory import MemorySink
from relay.wal import Stream, prepare
from tests.db.relaying import cleared, inversions, missing
from tests.server import FAST, Connection, Server, in_memory
from tests.waiting import eventually

outbox = Outbox()


@pytest.fixture(scope="module")
def decoding(server: Server) -> Iterator[str]:
    """Give the DSN of a migrated database on a server that decodes its log: this run's, or one of its own."""
    with server.admin() as admin:
        decodes = admin.execute("SHOW wal_level").fetchone() == ("logical",)
    if decodes:
        name = server.migrated()
        yield server.dsn(name)
        with psycopg.connect(server.dsn(name), autocommit=True) as conn:
            forget(conn)
        server.drop(name)
        return
    settings = FAST | {"wal_level": "logical", "shared_buffers": "32MB", "max_connections": "50"}
    try:
        with Embedded(settings=settings, scratch=in_memory()) as own:
            dsn = own.dsn()
            upgrade(dsn)
            yield dsn
    except EmbeddedUnavailable as error:
        pytest.skip(f"server: none with wal_level = logical: {error}")


def forget(conn: Connection) -> None:
    """Drop the slot of this database when nobody has it any more."""
    eventually(lambda: not taken(conn))
    conn.execute(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()"
    )


@pytest.fixture
def dsn(decoding: str) -> str:
    """Give that database, emptied and without slot."""
    cleared(decoding)
    with psycopg.connect(decoding, autocommit=True) as conn:
        forget(conn)
    return decoding


@pytest.fixture
def writer(dsn: str) -> Iterator[Connection]:
    """Give an autocommit connection."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


class Started:
    """A relay that runs, with its sink and everything it told."""

    def __init__(self, dsn: str, *, ordered: bool = False, lease: float = 2.0, **options: Any) -> None:
        self.sink = MemorySink(ordered=ordered)
        self.told: list[Event] = []
        bus = Bus()
        bus.subscribe(Event, self.told.append)
        config = RelayConfig(dsn=dsn, name="relay", source="/s", lease=lease, wal=True, **options)
        self.relay = Relay(config, self.sink, bus)
        self.relay.start()

    def heard(self, kind: type[Event]) -> list[Any]:
        """Return what it told of one kind."""
        return [event for event in self.told if isinstance(event, kind)]

    @property
    def log(self) -> list[tuple[str, int]]:
        """What was accepted, in order."""
        return [(event.key, event.id) for event in self.sink.accepted]


Starter = Callable[..., Started]


@pytest.fixture
def start(dsn: str) -> Iterator[Starter]:
    """Give a function that starts relays, all stopped at the end."""
    with ExitStack() as stack:

        def begin(**options: Any) -> Started:
            made = Started(dsn, **options)
            stack.callback(made.relay.stop, 60)
            stack.callback(made.sink.resume)
            return made

        yield begin


def add(conn: Connection, *aggregates: str) -> list[int]:
    """Write one event for each aggregate named."""
    with conn.transaction():
        return [outbox.add(conn, "e", {}, aggregate_id=a) for a in aggregates]


def unpublished(conn: Connection) -> int:
    """Count the events without a mark."""
    row = conn.execute("SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NULL").fetchone()
    assert row is not None
    return int(str(row[0]))


def taken(conn: Connection) -> bool:
    """Tell whether somebody has the slot, or makes it."""
    active = "SELECT 1 FROM pg_replication_slots WHERE active AND database = current_database()"
    return conn.execute(active).fetchone() is not None


def streams(conn: Connection) -> bool:
    """Tell whether some relay has the slot, which is made: until then it waits for whatever transactions there are."""
    active = (
        "SELECT 1 FROM pg_replication_slots"
        " WHERE active AND confirmed_flush_lsn IS NOT NULL AND database = current_database()"
    )
    return conn.execute(active).fetchone() is not None


def held_log(conn: Connection) -> int:
    """Return how many bytes of log the slot still asks for."""
    row = conn.execute(
        "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint FROM pg_replication_slots"
        " WHERE database = current_database()"
    ).fetchone()
    assert row is not None
    return int(str(row[0]))


def test_a_server_that_does_not_decode_is_refused_with_the_remedy(server: Server) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        level = conn.execute("SHOW wal_level").fetchone()
        if level == ("logical",):
            pytest.skip("this server decodes")
        with pytest.raises(ConfigError, match=r"wal_level = logical.*--read-from table"):
            prepare(conn)


def test_a_server_whose_slots_are_all_in_use_is_refused_with_the_remedy(dsn: str, writer: Connection) -> None:
    free = (
        "SELECT 'taken_' || n, pg_create_physical_replication_slot('taken_' || n) FROM generate_series(1,"
        " current_setting('max_replication_slots')::int - (SELECT count(*) FROM pg_replication_slots)::int) n"
    )
    made = [name for name, _ in writer.execute(free).fetchall()]
    try:
        with pytest.raises(ConfigError, match="max_replication_slots"):
            prepare(writer)
    finally:
        for name in made:
            writer.execute("SELECT pg_drop_replication_slot(%s)", [name])


def test_a_slot_that_no_relay_reads_is_shown_with_the_log_it_holds(dsn: str, writer: Connection) -> None:
    slot = prepare(writer)
    writer.execute("SELECT pg_logical_emit_message(false, 'x', repeat('y', 3000000))")
    found = next(one for one in checkup(writer) if one.check == "slots")
    assert found.level == "warning"
    assert re.search(rf"{slot}' is not active, holds [2-9]\.\d MiB of log \(reserved\)", found.text)
    assert slot in found.remedy
    shown = CliRunner().invoke(main, ["status"], env={"PGQUEUE_DSN": dsn})
    assert f"replication slot    {slot}: not active" in shown.stdout
    with Stream(dsn, "t", slot):
        assert next(one for one in checkup(writer) if one.check == "slots").level == "ok"


def test_a_role_that_may_not_replicate_is_told_what_it_needs(dsn: str, writer: Connection) -> None:
    writer.execute("DROP ROLE IF EXISTS nobody_special")
    writer.execute("CREATE ROLE nobody_special")
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("SET ROLE nobody_special")
        with pytest.raises(ConfigError, match="REPLICATION"):
            prepare(conn)
    writer.execute("DROP ROLE nobody_special")


@pytest.mark.parametrize("ordered", [False, True])
def test_events_are_published_in_the_order_of_their_commits(
    start: Starter, dsn: str, writer: Connection, ordered: bool
) -> None:
    relay = start(ordered=ordered)
    eventually(lambda: streams(writer))
    with psycopg.connect(dsn) as late:
        first = outbox.add(late, "e", {}, aggregate_id="x")
        (second,) = add(writer, "x")
        eventually(lambda: unpublished(writer) == 0)
        late.commit()
    eventually(lambda: len(relay.log) == 2)
    assert relay.log == [("x", second), ("x", first)]
    eventually(lambda: unpublished(writer) == 0)


def test_what_was_written_before_the_slot_is_published_and_nothing_rolled_back_is(
    start: Starter, writer: Connection
) -> None:
    before = add(writer, *[f"k{n % 7}" for n in range(500)])
    relay = start(batch=50)
    eventually(lambda: streams(writer))
    after = add(writer, *[f"k{n % 7}" for n in range(500)])
    with writer.transaction(force_rollback=True):
        outbox.add(writer, "never", {})
    eventually(lambda: unpublished(writer) == 0, 20)
    assert not missing(relay.log, [*before, *after])
    assert not inversions(relay.log)
    assert len(relay.log) == 1000
    assert all(event.event_type == "e" for event in relay.sink.accepted)


def test_an_event_that_is_parked_holds_no_log_and_its_aggregate_goes_on_in_order_when_it_is_retried(
    start: Starter, writer: Connection
) -> None:
    relay = start(rejection=RejectionPolicy(max_attempts=1))
    bad: list[int] = []
    relay.sink.reject = lambda event: "no" if event.id in bad else None
    eventually(lambda: streams(writer))
    (first,) = add(writer, "y")
    bad.append(first + 1)
    ids = add(writer, "x", "y", "x", "x")
    eventually(lambda: relay.heard(EventRejected))
    more = add(writer, "x", "y")
    eventually(lambda: [k for k, _ in relay.log] == ["y", "y", "y"])
    assert relay.heard(EventRejected)[0].parked
    eventually(lambda: held_log(writer) < 10_000)
    bad.clear()
    writer.execute(
        "UPDATE pgqueue.outbox SET parked_at = NULL, next_attempt_at = NULL, attempts = 0 WHERE parked_at IS NOT NULL"
    )
    eventually(lambda: unpublished(writer) == 0)
    assert [id_ for key, id_ in relay.log if key == "x"] == [ids[0], ids[2], ids[3], more[0]]
    (last,) = add(writer, "x")
    eventually(lambda: relay.log[-1] == ("x", last))
    assert len(relay.log) == 8


def test_park_event_lets_the_aggregate_go_on(start: Starter, writer: Connection) -> None:
    relay = start(rejection=RejectionPolicy(max_attempts=1, block=False))
    relay.sink.reject = lambda event: "no" if event.payload == '{"bad": true}' else None
    eventually(lambda: streams(writer))
    with writer.transaction():
        outbox.add(writer, "e", {"bad": True}, aggregate_id="x")
        good = outbox.add(writer, "e", {}, aggregate_id="x")
    eventually(lambda: relay.log == [("x", good)])


def test_while_the_sink_is_away_nothing_is_spent_and_the_log_waits(
    start: Starter, writer: Connection
) -> None:
    relay = start()
    eventually(lambda: streams(writer))
    relay.sink.away.set()
    ids = add(writer, "x", "y", "x")
    eventually(lambda: relay.heard(SinkDown))
    assert held_log(writer) > 0
    ids += add(writer, "x", "y")
    relay.sink.resume()
    eventually(lambda: unpublished(writer) == 0)
    assert not inversions(relay.log)
    assert not missing(relay.log, ids)
    assert writer.execute("SELECT max(attempts) FROM pgqueue.outbox").fetchone() == (0,)


def test_a_lost_reply_repeats_and_inverts_nothing(start: Starter, writer: Connection) -> None:
    relay = start()
    eventually(lambda: streams(writer))
    relay.sink.lose_replies = 3
    ids = add(writer, *[f"k{n % 3}" for n in range(30)])
    eventually(lambda: unpublished(writer) == 0)
    assert not inversions(relay.log)
    assert not missing(relay.log, ids)
    assert len(relay.log) > 30


def test_a_second_relay_waits_for_the_slot_and_goes_on_where_the_first_ended(
    start: Starter, writer: Connection
) -> None:
    first = start()
    eventually(lambda: streams(writer))
    second = start()
    eventually(lambda: second.heard(LoopFailed))
    assert "active" in second.heard(LoopFailed)[0].error
    ids = add(writer, "x", "x")
    eventually(lambda: unpublished(writer) == 0)
    assert first.relay.stop(60)
    ids += add(writer, "x")
    eventually(lambda: unpublished(writer) == 0, 20)
    assert [id_ for _, id_ in first.log + second.log] == ids


def test_a_connection_that_is_lost_is_opened_again_and_nothing_is_lost(
    start: Starter, writer: Connection
) -> None:
    relay = start()
    eventually(lambda: streams(writer))
    ids = []
    for _ in range(4):
        ids += add(writer, *[f"k{n % 5}" for n in range(40)])
        writer.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name IN ('relay wal', 'relay publish') AND datname = current_database()"
        )
        ids += add(writer, *[f"k{n % 5}" for n in range(40)])
    eventually(lambda: unpublished(writer) == 0, 30)
    assert not missing(relay.log, ids)
    assert not inversions(relay.log)


def test_an_event_that_the_log_tells_of_before_it_is_visible_is_waited_for(
    start: Starter, dsn: str, writer: Connection
) -> None:
    """A commit that waits for a synchronous standby is in the log, and no snapshot sees it."""
    relay = start(lease=60.0)  # a beat would wait for the standby too
    eventually(lambda: streams(writer))
    with psycopg.connect(dsn) as late:
        writer.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        try:
            writer.execute("SELECT pg_reload_conf()")
            eventually(lambda: late.execute("SHOW synchronous_standby_names").fetchone() == ("nobody",))
            late.rollback()
            late.execute("SET synchronous_commit = on")
            id_ = outbox.add(late, "e", {}, aggregate_id="x")
            thread = threading.Thread(target=late.commit)
            thread.start()
            wait = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            eventually(lambda: writer.execute(wait).fetchone())
            sent = "SELECT 1 FROM pg_stat_replication WHERE sent_lsn >= pg_current_wal_lsn()"
            eventually(lambda: writer.execute(sent).fetchone())
            asks = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'relay publish' AND query LIKE %s"
            eventually(lambda: writer.execute(asks, ["%transactionid%"]).fetchone())
            assert relay.log == []
        finally:
            writer.execute("ALTER SYSTEM RESET synchronous_standby_names")
            writer.execute("SELECT pg_reload_conf()")
        thread.join(60)
    eventually(lambda: relay.log == [("x", id_)])


def test_a_transaction_of_more_events_than_a_batch_is_published_in_pieces(
    start: Starter, writer: Connection
) -> None:
    relay = start(batch=10)
    eventually(lambda: streams(writer))
    ids = add(writer, *["x"] * 95)
    eventually(lambda: unpublished(writer) == 0)
    assert [id_ for _, id_ in relay.log] == ids


def follows(relay: Started) -> bool:
    """Tell whether the relay is through with what was there before: from now on it hears of events by the log."""
    return relay.relay._publishing._zero_at > 0


def looked(relay: Started, conn: Connection) -> bool:
    """Let the relay look at the table now, not within a minute; tell whether nothing is left to publish."""
    relay.relay._publishing._zero_at = 0.0
    return unpublished(conn) == 0


def test_events_whose_mark_was_cleared_are_published_again_in_order_within_a_minute(
    start: Starter, writer: Connection
) -> None:
    relay = start(batch=64)
    eventually(lambda: follows(relay))
    ids = add(writer, *[f"k{n % 5}" for n in range(300)])
    eventually(lambda: unpublished(writer) == 0)
    del relay.sink.accepted[:]
    writer.execute("UPDATE pgqueue.outbox SET published_at = NULL")
    eventually(lambda: looked(relay, writer))
    assert sorted(id_ for _, id_ in relay.log) == ids
    assert not inversions(relay.log)


def test_a_look_at_the_table_repeats_nothing_that_the_log_is_still_to_tell_and_keeps_its_order(
    start: Starter, dsn: str, writer: Connection
) -> None:
    relay = start(ordered=True)
    eventually(lambda: follows(relay))
    relay.sink.away.set()
    add(writer, "y")
    eventually(lambda: relay.heard(SinkDown))
    with psycopg.connect(dsn) as late:
        first = outbox.add(late, "e", {}, aggregate_id="x")
        (second,) = add(writer, "x")
        late.commit()
    relay.relay._publishing._zero_at = 0.0
    relay.sink.resume()
    eventually(lambda: looked(relay, writer))
    assert [id_ for key, id_ in relay.log if key == "x"] == [second, first]


def test_events_written_while_the_publication_is_gone_are_published_and_it_is_made_again(
    start: Starter, writer: Connection
) -> None:
    relay = start()
    eventually(lambda: follows(relay))
    writer.execute("DROP PUBLICATION pgqueue_outbox")
    add(writer, "x")
    eventually(
        lambda: looked(relay, writer) and any("publication" in one.error for one in relay.heard(LoopFailed))
    )
    eventually(lambda: streams(writer))
    assert writer.execute("SELECT 1 FROM pg_publication WHERE pubname = 'pgqueue_outbox'").fetchone()
    add(writer, "x")
    eventually(lambda: unpublished(writer) == 0)


def test_events_written_without_a_publication_that_somebody_made_again_are_published(
    start: Starter, writer: Connection
) -> None:
    relay = start()
    eventually(lambda: follows(relay))
    writer.execute("DROP PUBLICATION pgqueue_outbox")
    ids = add(writer, "x", "y")
    writer.execute(
        "CREATE PUBLICATION pgqueue_outbox FOR TABLE pgqueue.outbox (id) WITH (publish = 'insert')"
    )
    eventually(lambda: looked(relay, writer))
    ids += add(writer, "x")
    eventually(lambda: unpublished(writer) == 0)
    assert [id_ for key, id_ in relay.log if key == "x"] == [ids[0], ids[2]]


def test_the_stream_confirms_only_what_was_handed_out(dsn: str, writer: Connection) -> None:
    slot = prepare(writer)
    ids = add(writer, "x", "x", "x")
    for _ in range(2):
        with Stream(dsn, "t", slot) as stream:
            assert collect(stream, 3) == ids
        eventually(lambda: not taken(writer))
    with Stream(dsn, "t", slot) as stream:
        assert collect(stream, 2) == ids[:2]
        stream.confirm()
        assert collect(stream, 1) == ids[2:]

        def all_confirmed() -> bool:
            assert stream.next(1, 0.1) == []
            stream.confirm()
            return held_log(writer) < 10_000

        eventually(all_confirmed)


def collect(stream: Stream, n: int) -> list[int]:
    """Return the next `n` ids."""
    ids: list[int] = []

    def more() -> bool:
        ids.extend(one.id for one in stream.next(n - len(ids), 1.0))
        return len(ids) == n

    eventually(more)
    return ids
