"""One cycle of the relay: what it reads, what it writes down, and what that costs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pgqueue.connection import execute
from relay import Outbox, park, publish
from relay.cycle import Connection as RelayConnection
from relay.cycle import Ledger, connect, write
from relay.event import Event, attributes, structured
from relay.lag import lag
from relay.prune import PAGE, prune, turn
from relay.publish import RejectionPolicy
from tests.db.relaying import Stepper, cleared, inversions, stepper
from tests.server import Connection, Server

outbox = Outbox()
PARK_EVENT = RejectionPolicy(max_attempts=3, base=0, block=False)
BLOCK = RejectionPolicy(max_attempts=3, base=0, block=True)

Maker = Callable[..., Stepper]


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


@pytest.fixture
def relay_at(dsn: str) -> Iterator[Maker]:
    """Give a function that makes relays on the test's database."""
    with ExitStack() as stack:

        def make(**options: Any) -> Stepper:
            made = stepper(dsn)
            stack.callback(made.conn.close)
            for name, value in options.items():
                setattr(made, name, value)
            return made

        yield make


def fill(conn: Connection, count: int, *, aggregates: int = 100) -> None:
    """Write events with a few words of payload."""
    conn.execute(
        "INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload)"
        " SELECT (i %% %s)::text, 'e', jsonb_build_object('i', i) FROM generate_series(1, %s) i",
        [aggregates, count],
    )
    conn.commit()


def add(conn: Connection, *aggregates: str) -> list[int]:
    """Write one event for each aggregate named, and commit."""
    ids = [outbox.add(conn, "e", {"n": n}, aggregate_id=a) for n, a in enumerate(aggregates)]
    conn.commit()
    return ids


def one(conn: Connection, query: str, *params: object) -> Any:
    """Read one value in a transaction of its own."""
    row = conn.execute(query.encode(), params).fetchone()
    conn.rollback()
    assert row is not None
    return row[0]


def plan(conn: RelayConnection, floors: dict[int, int], n: int, options: str = "") -> dict[str, Any]:
    """Return the plan of the read."""
    read = publish.read(floors, n)
    row = conn.execute(f"EXPLAIN (FORMAT JSON{options}) {read.query.text}".encode(), read.params).fetchone()
    assert row is not None
    return row[0][0]  # type: ignore[no-any-return]


def buffers(conn: RelayConnection, floors: dict[int, int]) -> int:
    """Return how many pages a read looks at."""
    seen = plan(conn, floors, 4, ", ANALYZE, BUFFERS")["Plan"]
    return int(seen["Shared Hit Blocks"]) + int(seen["Shared Read Blocks"])


@pytest.mark.parametrize("when", ["empty", "filled", "analyzed"])
def test_the_read_walks_the_pending_index_whatever_the_statistics_say(
    dsn: str, conn: Connection, when: str
) -> None:
    if when != "empty":
        fill(conn, 50_000)
    if when == "analyzed":
        conn.execute("ANALYZE pgqueue.outbox")
        conn.commit()
    with connect(dsn, "plan") as relay:
        text = json.dumps(plan(relay, dict.fromkeys(range(64), 0), 4))
    assert '"outbox_pending"' in text
    assert "outbox_pkey" not in text
    assert "Seq Scan" not in text


def test_a_pinned_snapshot_does_not_make_the_read_dearer(dsn: str, conn: Connection, relay_at: Maker) -> None:
    fill(conn, 4_000)
    relay = relay_at()
    with psycopg.connect(dsn) as pin:
        pin.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        pin.execute("SELECT count(*) FROM pgqueue.outbox")
        relay.drain()
        first = buffers(relay.conn, dict(relay.floors.parts))
        for _ in range(4):
            fill(conn, 4_000)
            relay.drain()
        last = buffers(relay.conn, dict(relay.floors.parts))
        without_floor = buffers(relay.conn, dict.fromkeys(range(64), 0))
        pin.rollback()
    assert len(relay.log) == 20_000
    assert last <= first * 1.2 + 64
    assert without_floor > 5 * last, "the control: without a floor the dead entries are read again"


def test_an_open_writer_of_the_outbox_does_not_make_the_read_dearer(
    dsn: str, conn: Connection, relay_at: Maker
) -> None:
    relay = relay_at()
    relay.floors.horizon.patience = 0
    with psycopg.connect(dsn) as long:
        first = outbox.add(long, "e", {}, aggregate_id="long")
        for _ in range(3):
            fill(conn, 4_000)
            relay.drain()
        assert buffers(relay.conn, dict(relay.floors.parts)) < 500
        long.commit()
    relay.drain()
    assert len(relay.log) == 12_001
    assert ("long", first) in relay.log


def test_no_transaction_is_open_between_two_cycles(relay_at: Maker, conn: Connection) -> None:
    add(conn, "a")
    relay = relay_at()
    relay.step()
    assert relay.conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_a_row_that_somebody_has_locked_holds_up_no_other_mark(
    dsn: str, conn: Connection, relay_at: Maker
) -> None:
    ids = add(conn, "a", "b", "c")
    relay = relay_at()
    with psycopg.connect(dsn) as business:
        business.execute("SELECT 1 FROM pgqueue.outbox WHERE id = %s FOR UPDATE", [ids[1]])
        relay.step()
        relay.step()
        assert one(conn, "SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NOT NULL") == 2
        assert relay.ledger.stuck == {ids[1]}
        business.rollback()
    relay.step()
    assert not relay.ledger
    assert one(conn, "SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NULL") == 0


def test_marks_of_two_relays_on_the_same_events_do_not_deadlock(dsn: str, conn: Connection) -> None:
    fill(conn, 2_000)
    ids = [int(str(row[0])) for row in conn.execute("SELECT id FROM pgqueue.outbox").fetchall()]
    conn.rollback()
    begin = threading.Barrier(3)
    failed: list[BaseException] = []

    def mark() -> None:
        with connect(dsn, "marker") as relay:
            for _ in range(5):
                begin.wait(60)
                try:
                    write(relay, Ledger(confirmed=set(ids)), keep=True, policy=BLOCK)
                except BaseException as error:  # noqa: BLE001 - the test looks at it
                    failed.append(error)
                begin.wait(60)

    threads = [threading.Thread(target=mark) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        begin.wait(60)
        begin.wait(60)
        assert one(conn, "SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NULL") == 0
        conn.execute("UPDATE pgqueue.outbox SET published_at = NULL")
        conn.commit()
    for thread in threads:
        thread.join(60)
    assert not failed


def test_retention_0_deletes_at_the_mark(dsn: str, conn: Connection) -> None:
    ids = add(conn, "a", "b")
    with connect(dsn, "relay") as relay:
        write(relay, Ledger(confirmed={ids[0]}), keep=False, policy=BLOCK)
    assert one(conn, "SELECT array_agg(id) FROM pgqueue.outbox") == [ids[1]]


def reject_first(events: set[int]) -> Callable[[Any], str | None]:
    """Return a rule that refuses these events."""
    return lambda event: "poison" if event.id in events else None


def test_block_aggregate_parks_the_event_after_its_attempts_and_holds_the_ones_behind(
    conn: Connection, relay_at: Maker
) -> None:
    ids = add(conn, "a", "a", "b")
    relay = relay_at(policy=BLOCK, reject=reject_first({ids[0]}))
    relay.drain()
    assert relay.log == [("b", ids[2])]
    (row,) = execute(conn, park.parked())
    assert (row.id, row.attempts, row.last_error, row.blocks) == (ids[0], 3, "poison", True)
    assert row.parked_at is not None
    seen = execute(conn, lag())
    assert (seen.pending, seen.parked, seen.blocked_aggregates) == (1, 1, 1)


def test_park_event_sets_the_event_aside_and_lets_the_ones_behind_pass(
    conn: Connection, relay_at: Maker
) -> None:
    ids = add(conn, "a", "a", "b")
    relay = relay_at(policy=PARK_EVENT, reject=reject_first({ids[0]}))
    relay.drain()
    assert sorted(relay.log) == [("a", ids[1]), ("b", ids[2])]
    (row,) = execute(conn, park.parked())
    assert (row.id, row.blocks) == (ids[0], False)


def test_a_rejected_event_waits_longer_each_time_and_its_aggregate_with_it(
    conn: Connection, relay_at: Maker
) -> None:
    ids = add(conn, "a", "a")
    relay = relay_at(policy=RejectionPolicy(max_attempts=9, base=100, cap=300), reject=reject_first({ids[0]}))
    waits = []
    for _ in range(3):
        relay.drain(3)
        seconds = (
            "SELECT extract(epoch FROM next_attempt_at - clock_timestamp()) FROM pgqueue.outbox WHERE id = %s"
        )
        waits.append(float(one(conn, seconds, ids[0])))
        conn.execute("UPDATE pgqueue.outbox SET next_attempt_at = clock_timestamp() WHERE id = %s", [ids[0]])
        conn.commit()
    assert [round(w / 100) for w in waits] == [1, 2, 3]
    assert not relay.log


def test_more_poison_heads_than_a_batch_holds_starve_nobody(conn: Connection, relay_at: Maker) -> None:
    poison = set(add(conn, *[f"poison-{i}" for i in range(300)]))
    relay = relay_at(policy=RejectionPolicy(max_attempts=3, base=60), reject=reject_first(poison), n=1)
    relay.step()
    good = add(conn, *[f"good-{i}" for i in range(100)], *[f"poison-{i}" for i in range(300)])
    relay.drain(12)
    assert {id_ for _, id_ in relay.log} == set(good[:100])


def test_retry_publishes_a_blocked_aggregate_in_order_without_touching_the_rows_behind(
    conn: Connection, relay_at: Maker
) -> None:
    ids = add(conn, *["a"] * 300)
    poison = {ids[0]}
    relay = relay_at(policy=BLOCK, reject=reject_first(poison))
    relay.drain()
    assert not relay.log
    reads = relay.rows_read
    relay.drain()
    assert relay.rows_read == reads, "what waits is not read"
    poison.clear()
    assert execute(conn, park.retry([ids[0]])) == [ids[0]]
    conn.commit()
    relay.drain()
    assert [id_ for _, id_ in relay.log] == ids


def test_skip_lets_the_ones_behind_go_on_and_keeps_the_event(conn: Connection, relay_at: Maker) -> None:
    ids = add(conn, "a", "a", "a")
    relay = relay_at(policy=BLOCK, reject=reject_first({ids[0]}))
    relay.drain()
    assert execute(conn, park.skip([ids[0]])) == [ids[0]]
    conn.commit()
    relay.drain()
    assert [id_ for _, id_ in relay.log] == ids[1:]
    (row,) = execute(conn, park.parked())
    assert (row.id, row.blocks) == (ids[0], False)


def test_an_event_can_be_skipped_before_it_was_ever_tried_and_retried_after(
    conn: Connection, relay_at: Maker
) -> None:
    ids = add(conn, "a", "a")
    execute(conn, park.skip([ids[0]]))
    conn.commit()
    relay = relay_at()
    relay.drain()
    assert relay.log == [("a", ids[1])]
    execute(conn, park.retry([ids[0]]))
    conn.commit()
    relay.drain()
    assert relay.log == [("a", ids[1]), ("a", ids[0])], "out of order, as retry says"


def test_hold_stops_an_aggregate_until_its_head_is_retried(conn: Connection, relay_at: Maker) -> None:
    ids = add(conn, "a", "b", "a")
    assert execute(conn, park.hold("a", why="customer asked")) == ids[0]
    assert execute(conn, park.hold("nobody", why="x")) is None
    conn.commit()
    relay = relay_at()
    relay.drain()
    assert relay.log == [("b", ids[1])]
    execute(conn, park.retry([ids[0]]))
    conn.commit()
    relay.drain()
    assert relay.log == [("b", ids[1]), ("a", ids[0]), ("a", ids[2])]


def test_a_published_event_can_be_neither_retried_nor_skipped(conn: Connection, relay_at: Maker) -> None:
    (id_,) = add(conn, "a")
    relay_at().drain()
    assert execute(conn, park.retry([id_])) == []
    assert execute(conn, park.skip([id_])) == []


@pytest.mark.parametrize("reason", ["a\0b", "\ud800", "x" * 100_000, ""])
def test_any_reason_can_be_recorded(conn: Connection, relay_at: Maker, reason: str) -> None:
    (id_,) = add(conn, "a")
    relay = relay_at(policy=BLOCK, reject=lambda _: reason)
    relay.drain()
    assert one(conn, "SELECT length(last_error) BETWEEN 1 AND 2000 FROM pgqueue.outbox WHERE id = %s", id_)


def test_an_aggregate_deferred_without_an_answer_waits_and_spends_no_attempt(
    dsn: str, conn: Connection
) -> None:
    (id_,) = add(conn, "a")
    with connect(dsn, "relay") as relay:
        write(relay, Ledger(late={id_: ("HTTP 503", 60.0)}), keep=True, policy=BLOCK)
    (row,) = execute(conn, park.parked())
    assert (row.attempts, row.blocks, row.parked_at, row.last_error) == (0, True, None, "HTTP 503")


def test_everything_published_is_in_order_although_reads_are_shallow(
    conn: Connection, relay_at: Maker
) -> None:
    fill(conn, 3_000, aggregates=7)
    relay = relay_at(n=5)
    relay.drain()
    assert len(relay.log) == 3_000
    assert not inversions(relay.log)


def test_prune_deletes_old_published_events_and_nothing_else(conn: Connection) -> None:
    old, young, parked, pending = add(conn, "a", "b", "c", "d")
    conn.execute("UPDATE pgqueue.outbox SET published_at = now() - interval '8 days' WHERE id = %s", [old])
    conn.execute("UPDATE pgqueue.outbox SET published_at = now() WHERE id = %s", [young])
    conn.execute(
        "UPDATE pgqueue.outbox SET parked_at = now() - interval '1 year', last_error = 'x' WHERE id = %s",
        [parked],
    )
    page = prune(conn, cursor=0, keep=timedelta(days=7))
    assert (page.size, page.gone, page.more) == (4, 1, False)
    conn.commit()
    assert one(conn, "SELECT array_agg(id ORDER BY id) FROM pgqueue.outbox") == [young, parked, pending]


def test_prune_works_in_pages(conn: Connection) -> None:
    fill(conn, PAGE + 10)
    conn.execute("UPDATE pgqueue.outbox SET published_at = now() - interval '8 days'")
    first = prune(conn, cursor=0, keep=timedelta(days=7))
    assert (first.gone, first.more) == (PAGE, True)
    assert first.last is not None
    second = prune(conn, cursor=first.last, keep=timedelta(days=7))
    assert (second.gone, second.more) == (10, False)


def test_prune_goes_on_behind_a_page_of_which_nothing_may_go(conn: Connection) -> None:
    fill(conn, PAGE)
    conn.execute(
        "UPDATE pgqueue.outbox SET created_at = now() - interval '9 days', parked_at = now(), last_error = 'x'"
    )
    page = prune(conn, cursor=0, keep=timedelta(days=7))
    assert (page.gone, page.more) == (0, True)


@pytest.mark.parametrize("published", ["now()", "NULL"])
def test_prune_stays_at_a_page_with_an_event_that_was_written_lately(
    conn: Connection, published: str
) -> None:
    fill(conn, PAGE)
    conn.execute(
        "UPDATE pgqueue.outbox"
        " SET created_at = now() - interval '9 days', published_at = now() - interval '8 days'"
    )
    conn.execute(
        f"UPDATE pgqueue.outbox SET created_at = now() - interval '6 days', published_at = {published}"
        " WHERE id = (SELECT max(id) FROM pgqueue.outbox)"
    )
    page = prune(conn, cursor=0, keep=timedelta(days=7))
    assert (page.gone, page.more) == (PAGE - 1, False)


def test_prune_passes_by_an_old_event_that_was_published_late_and_one_of_the_future(conn: Connection) -> None:
    fill(conn, PAGE)
    conn.execute("UPDATE pgqueue.outbox SET created_at = now() - interval '9 days', published_at = now()")
    conn.execute(
        "UPDATE pgqueue.outbox SET created_at = 'infinity' WHERE id = (SELECT min(id) FROM pgqueue.outbox)"
    )
    page = prune(conn, cursor=0, keep=timedelta(days=7))
    assert (page.gone, page.more) == (0, True)


def test_only_one_relay_prunes_at_a_time(dsn: str, conn: Connection) -> None:
    with psycopg.connect(dsn) as other:
        assert turn(conn)
        assert not turn(other)
        conn.rollback()
        assert turn(other)


ODD_ROWS = [
    "INSERT INTO pgqueue.outbox (event_type, payload, created_at) VALUES ('e', '1', 'infinity')",
    "INSERT INTO pgqueue.outbox (event_type, payload, created_at) VALUES ('e', '1', '-infinity')",
    "INSERT INTO pgqueue.outbox (event_type, payload, created_at) VALUES ('e', '1', '20000-01-01')",
    "INSERT INTO pgqueue.outbox (event_type, payload, created_at) VALUES ('e', '1', '4000-01-01 BC')",
    (
        "INSERT INTO pgqueue.outbox (event_type, payload, headers)"
        " VALUES ('e', '1', ('{\"n\": ' || repeat('9', 9000) || '}')::jsonb)"
    ),
    (
        "INSERT INTO pgqueue.outbox (event_type, payload, headers)"
        " VALUES ('e', '1', (repeat('{\"n\": ', 3000) || '1' || repeat('}', 3000))::jsonb)"
    ),
    "INSERT INTO pgqueue.outbox (event_type, payload) VALUES ('e', ('1' || repeat('0', 100000))::jsonb)",
    "INSERT INTO pgqueue.outbox (event_type, payload, aggregate_id, aggregate_version) VALUES (E'a\\nb', '1', '', -7)",
]


@pytest.mark.parametrize("odd", ODD_ROWS)
def test_no_row_that_sql_accepts_stops_the_others(conn: Connection, relay_at: Maker, odd: str) -> None:
    conn.execute(odd.encode())
    add(conn, "a")
    relay = relay_at()
    events: list[Event] = []
    relay.reject = events.append
    relay.drain()
    assert len(relay.log) == 2
    assert all(json.loads(structured(event, "/s"))["id"] == event.idempotency_key for event in events[1:])
    assert attributes(events[0], "/s")["id"] == events[0].idempotency_key


def test_the_last_of_very_many_attempts_can_be_written_down(conn: Connection, relay_at: Maker) -> None:
    (id_,) = add(conn, "a")
    conn.execute("UPDATE pgqueue.outbox SET attempts = 32765 WHERE id = %s", [id_])
    conn.commit()
    relay = relay_at(policy=RejectionPolicy(max_attempts=32_767, base=1e-9, cap=1e-9), reject=lambda _: "no")
    relay.drain()
    assert one(conn, "SELECT (attempts, parked_at IS NOT NULL)::text FROM pgqueue.outbox") == "(32767,t)"
