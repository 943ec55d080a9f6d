"""Each event is applied once in each consumer's own transaction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pgqueue.errors import BadOption, NotInTransaction
from relay import Inbox
from tests.db.forms import ASYNC, KINDS, opened
from tests.db.relaying import cleared
from tests.server import Connection, Server
from tests.waiting import eventually

inbox = Inbox()
WHO = {"consumer": "warehouse", "source": "/outbox/shop"}


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


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_claim_of_a_key_is_refused(kind: str, dsn: str) -> None:
    with opened(kind, dsn) as form:
        claim = inbox.aclaim if form.kind in ASYNC else inbox.claim
        assert form._call(claim, "outbox:1", **WHO) is True
        assert form._call(claim, "outbox:1", **WHO) is False
        form.commit()
        assert form._call(claim, "outbox:1", **WHO) is False
        assert form._call(claim, "outbox:2", **WHO) is True
        form.rollback()
        assert form._call(claim, "outbox:2", **WHO) is True
        form.commit()


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_higher_version_is_newer(kind: str, dsn: str) -> None:
    with opened(kind, dsn) as form:
        newer = inbox.anewer if form.kind in ASYNC else inbox.newer
        seen = [form._call(newer, **WHO, aggregate_id="order-1", version=v) for v in (1, 3, 2, 3, 4)]
        assert seen == [True, True, False, False, True]
        assert form._call(newer, **WHO, aggregate_id="order-2", version=1) is True
        form.commit()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2.4},
        {"version": True},
        {"version": None},
        {"version": float("nan")},
        {"version": "3"},
        {"version": 2**63},
        {"version": -(2**63) - 1},
        {"aggregate_id": " "},
        {"aggregate_id": None},
        {"aggregate_id": "x" * 10_000},
        {"consumer": ""},
        {"consumer": "x" * 201},
        {"source": "a\0b"},
        {"source": "\ud800"},
        {"key": ""},
        {"key": " "},
        {"key": None},
        {"key": 7},
        {"key": "x" * 10_000},
    ],
    ids=lambda wrong: "-".join(f"{name} {str(value)[:8]!a}" for name, value in wrong.items()),
)
def test_what_cannot_be_is_refused_and_the_transaction_goes_on(
    kind: str, wrong: dict[str, Any], dsn: str
) -> None:
    with opened(kind, dsn) as form:
        newer = inbox.anewer if form.kind in ASYNC else inbox.newer
        claim = inbox.aclaim if form.kind in ASYNC else inbox.claim
        good = {**WHO, "aggregate_id": "order-1", "version": 2, "key": "outbox:1"}
        call, names = (claim, ("key",)) if "key" in wrong else (newer, ("aggregate_id", "version"))

        def ask(values: dict[str, Any]) -> Any:
            values = {name: values[name] for name in (*names, *WHO)}
            return form._call(call, *([values.pop("key")] if call is claim else []), **values)

        assert ask(good) is True
        with pytest.raises(BadOption, match=f"^{next(iter(wrong))}: "):
            ask(good | wrong)
        assert ask(good) is False
        form.commit()


def test_versions_and_aggregates_may_be_what_events_have(conn: Connection) -> None:
    assert inbox.newer(conn, **WHO, aggregate_id=7, version=-(2**63))
    assert inbox.newer(conn, **WHO, aggregate_id="7", version=2**63 - 1)
    assert not inbox.newer(conn, **WHO, aggregate_id="7", version=0)


def test_consumers_and_sources_do_not_share_keys(conn: Connection) -> None:
    assert inbox.claim(conn, "outbox:1", consumer="a", source="/s")
    assert inbox.claim(conn, "outbox:1", consumer="b", source="/s")
    assert inbox.claim(conn, "outbox:1", consumer="a", source="/t")
    assert not inbox.claim(conn, "outbox:1", consumer="a", source="/t")


def test_a_claim_that_would_be_committed_without_its_effects_is_refused(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as handle:
        with pytest.raises(NotInTransaction):
            inbox.claim(handle, "outbox:1", **WHO)
        with pytest.raises(NotInTransaction):
            inbox.newer(handle, **WHO, aggregate_id="a", version=1)

    async def refused() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as handle:
            with pytest.raises(NotInTransaction):
                await inbox.aclaim(handle, "outbox:1", **WHO)

    asyncio.run(refused())


@pytest.mark.parametrize(("first_commits", "second_gets"), [(True, False), (False, True)])
def test_a_second_consumer_waits_for_the_first_one_and_wins_if_that_rolls_back(
    dsn: str, first_commits: bool, second_gets: bool
) -> None:
    answers: list[bool] = []
    with (
        psycopg.connect(dsn) as first,
        psycopg.connect(dsn) as second,
        psycopg.connect(dsn, autocommit=True) as watch,
    ):
        pid = second.info.backend_pid
        assert inbox.claim(first, "outbox:1", **WHO)

        def claim() -> None:
            answers.append(inbox.claim(second, "outbox:1", **WHO))
            second.commit()

        thread = threading.Thread(target=claim)
        thread.start()
        waiting = "SELECT true FROM pg_catalog.pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
        eventually(lambda: watch.execute(waiting, [pid]).fetchone())
        assert not answers
        first.commit() if first_commits else first.rollback()
        thread.join(60)
    assert answers == [second_gets]


def test_at_repeatable_read_a_key_taken_meanwhile_is_a_serialization_failure(dsn: str) -> None:
    with psycopg.connect(dsn) as first, psycopg.connect(dsn) as second:
        second.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        second.execute("SELECT 1")
        assert inbox.claim(first, "outbox:1", **WHO)
        first.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            inbox.claim(second, "outbox:1", **WHO)
        second.rollback()


def test_duplicates_in_a_crowd_are_applied_once(dsn: str, conn: Connection) -> None:
    conn.execute("CREATE TABLE public.applied (key text)")
    conn.commit()
    begin = threading.Barrier(4)

    def consume() -> None:
        with psycopg.connect(dsn) as handle:
            begin.wait(60)
            for n in range(50):
                if inbox.claim(handle, f"outbox:{n}", **WHO):
                    handle.execute("INSERT INTO public.applied VALUES (%s)", [f"outbox:{n}"])
                handle.commit()

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert conn.execute("SELECT count(*), count(DISTINCT key) FROM public.applied").fetchone() == (50, 50)


def test_prune_deletes_old_keys_page_by_page_and_keeps_young_ones(conn: Connection) -> None:
    conn.execute(
        "INSERT INTO pgqueue.inbox (consumer, source, key, applied_at)"
        " SELECT 'c', 's', i::text, now() - interval '8 days' FROM generate_series(1, 1500) i"
    )
    assert inbox.claim(conn, "young", consumer="c", source="s")
    gone = [inbox.prune(conn, timedelta(days=7)) for _ in range(3)]
    assert gone == [1000, 500, 0]
    assert conn.execute("SELECT key FROM pgqueue.inbox").fetchall() == [("young",)]
