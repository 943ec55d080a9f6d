"""Another number of partitions, with a backlog, writers at work and a relay that sleeps through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tests.db.relaying import inversions, missing
from tests.process.relaying import Producers, RelayProcess, published, repartition
from tests.server import Connection
from tests.waiting import chaos, eventually

Starter = Callable[..., RelayProcess]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Give the file that every relay of the test appends to."""
    return tmp_path / "published"


@pytest.fixture
def start(dsn: str, log: Path) -> Iterator[Starter]:
    """Give a function that starts relay processes, all gone at the end."""
    with ExitStack() as stack:

        def begin(name: str, lease: float = 1.0) -> RelayProcess:
            made = RelayProcess(dsn, log, name, lease=lease)
            stack.callback(made.process.wait, 60)
            stack.callback(made.process.kill)
            return made

        yield begin


@pytest.fixture
def watch(dsn: str) -> Iterator[Connection]:
    """Give an autocommit connection."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


def number(watch: Connection, query: str) -> int:
    """Read one number."""
    row = watch.execute(query.encode()).fetchone()
    assert row is not None
    return int(str(row[0]))


def owners(watch: Connection) -> int:
    """Count live relays, where every partition has one."""
    return number(
        watch,
        "SELECT CASE WHEN bool_and(r.id IS NOT NULL) THEN count(DISTINCT r.id) ELSE 0 END"
        " FROM pgqueue.relay_partition p"
        " LEFT JOIN pgqueue.relay r ON r.id = p.owner AND r.lease_until > clock_timestamp()",
    )


def alive(watch: Connection) -> int:
    """Count live relays."""
    return number(watch, "SELECT count(*) FROM pgqueue.relay WHERE lease_until > clock_timestamp()")


def waiting(watch: Connection) -> int:
    """Count the events without a mark."""
    return number(watch, "SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NULL")


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_nothing_is_lost_or_inverted_when_the_number_of_partitions_changes(
    dsn: str, log: Path, start: Starter, watch: Connection
) -> None:
    producers = Producers(dsn)
    producers.start()
    sleeper = start("sleeper")
    counts = [7, 1, 64, 13] * chaos(1, 8)
    try:
        for turn, count in enumerate(counts):
            relays = [start(f"relay-{turn}-{n}") for n in range(2)]
            eventually(lambda: alive(watch) == 3, 20)
            so_far = len(published(log))
            eventually(lambda: len(published(log)) > so_far + 100, 20)  # noqa: B023 - called at once
            sleeper.stall()
            assert [relay.stop() for relay in relays] == [0, 0]
            eventually(lambda: alive(watch) == 0, 20)
            backlog = waiting(watch)
            eventually(lambda: waiting(watch) > backlog + 50, 20)  # noqa: B023 - called at once
            repartition(watch, count)
            assert number(watch, "SELECT count(*) FROM pgqueue.relay_partition") == count
            assert number(watch, "SELECT max(part) FROM pgqueue.outbox") < count
            sleeper.resume()
            eventually(lambda: owners(watch) == 1, 20)
    finally:
        sleeper.resume()
        producers.stop()
    eventually(lambda: waiting(watch) == 0, 30)
    assert sleeper.stop() == 0
    seen = published(log)
    ids = [int(str(row[0])) for row in watch.execute("SELECT id FROM pgqueue.outbox")]
    assert set(producers.committed) <= set(ids)
    assert not missing(seen, ids)
    assert not inversions(seen)


def test_a_relay_that_lives_keeps_the_number_of_partitions(start: Starter, watch: Connection) -> None:
    start("alive", lease=60.0)
    eventually(lambda: alive(watch) == 1, 20)
    with pytest.raises(psycopg.errors.ObjectInUse, match="relays are alive: alive"):
        watch.execute("SELECT pgqueue.outbox_repartition(7)")
    assert number(watch, "SELECT count(*) FROM pgqueue.relay_partition") == 64


@pytest.mark.parametrize("count", [0, -1, 1025, None])
def test_a_number_that_is_none_is_refused(watch: Connection, count: int | None) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="from 1 to 1024"):
        watch.execute("SELECT pgqueue.outbox_repartition(%s)", [count])
