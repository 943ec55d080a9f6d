"""Several relay processes under stalls, kills and a database that stops: nothing lost, nothing inverted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from pgqueue.embedded import Embedded, EmbeddedUnavailable
from pgqueue.migrate import upgrade
from tests.db.relaying import inversions, missing
from tests.process.relaying import Producers, RelayProcess, published
from tests.server import FAST
from tests.waiting import eventually

Starter = Callable[..., RelayProcess]

pytestmark = pytest.mark.chaos


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Give the file that every relay of the test appends to."""
    return tmp_path / "published"


@pytest.fixture
def start(log: Path) -> Iterator[Starter]:
    """Give a function that starts relay processes, all gone at the end."""
    with ExitStack() as stack:

        def begin(dsn: str, name: str, *, routed: bool = False) -> RelayProcess:
            made = RelayProcess(dsn, log, name, routed=routed)
            stack.callback(made.process.wait, 60)
            stack.callback(made.process.kill)
            return made

        yield begin


def value(dsn: str, query: str) -> int:
    """Read one number."""
    with psycopg.connect(dsn) as conn:
        row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


def pending(dsn: str) -> int:
    """Count the events without a mark."""
    return value(dsn, "SELECT count(*) FROM pgqueue.outbox WHERE published_at IS NULL")


def owned(dsn: str, relays: int) -> bool:
    """Tell whether so many live relays own all partitions."""
    return (
        value(
            dsn,
            "SELECT count(DISTINCT r.id) * 100 + count(*) FROM pgqueue.relay_partition p"
            " JOIN pgqueue.relay r ON r.id = p.owner AND r.lease_until > clock_timestamp()",
        )
        == relays * 100 + 64
    )


def more(log: Path, count: int) -> Callable[[], bool]:
    """Return a condition: so many more lines than now."""
    now = len(published(log))
    return lambda: len(published(log)) >= now + count


def ids(dsn: str) -> list[int]:
    """Return the ids of all events in the table."""
    with psycopg.connect(dsn) as conn:
        return [int(str(row[0])) for row in conn.execute("SELECT id FROM pgqueue.outbox").fetchall()]


def judge(dsn: str, log: Path, producers: Producers) -> None:
    """Check the log against the table."""
    seen, written = published(log), ids(dsn)
    assert len(producers.committed) > 300
    assert producers.rolled_back
    assert not missing(seen, written)
    assert not missing(seen, producers.committed)
    # Not those that rolled back: after a crash of the server their numbers may be given out again.
    assert not {id_ for _, id_ in seen} - set(written)
    assert not inversions(seen)


@pytest.mark.parametrize("routed", [False, True], ids=["one sink", "two sinks, one moody"])
def test_three_relays_with_one_stalled_past_its_lease_and_one_killed(
    dsn: str, log: Path, start: Starter, routed: bool
) -> None:
    relays = [start(dsn, f"relay-{n}", routed=routed) for n in range(3)]
    producers = Producers(dsn)
    eventually(lambda: owned(dsn, 3), 20)
    producers.start()
    try:
        eventually(more(log, 200), 20)
        relays[0].stall()
        eventually(lambda: owned(dsn, 2), 20)
        eventually(more(log, 100), 20)
        relays[1].kill()
        eventually(lambda: owned(dsn, 1), 20)
        relays[0].resume()
        relays.append(start(dsn, "relay-3", routed=routed))
        eventually(lambda: owned(dsn, 3), 20)
        eventually(more(log, 200), 20)
    finally:
        producers.stop()
    eventually(lambda: pending(dsn) == 0, 60 if routed else 20)
    assert relays[2].stop() == relays[3].stop() == relays[0].stop() == 0
    judge(dsn, log, producers)
    assert value(dsn, "SELECT count(owner) FROM pgqueue.relay_partition") == 0


def test_relays_survive_a_crash_of_the_database(log: Path, start: Starter) -> None:
    try:
        server = Embedded(settings=FAST | {"fsync": "off", "synchronous_commit": "on"})
        server.start()
    except EmbeddedUnavailable as error:
        pytest.skip(f"server: {error}")
    try:
        dsn = server.dsn()
        upgrade(dsn)
        relays = [start(dsn, f"relay-{n}") for n in range(2)]
        producers = Producers(dsn, threads=3)
        eventually(lambda: owned(dsn, 2), 20)
        producers.start()
        try:
            for _ in range(2):
                eventually(more(log, 200), 20)
                server.restart(immediate=True)
            eventually(more(log, 200), 20)
        finally:
            producers.stop()
        eventually(lambda: pending(dsn) == 0, 20)
        assert [relay.process.poll() for relay in relays] == [None, None]
        assert [relay.stop() for relay in relays] == [0, 0]
        judge(dsn, log, producers)
    finally:
        server.close()


def test_the_checker_sees_an_order_that_two_skip_locked_relays_break(dsn: str) -> None:
    """The control: the usual claim, FOR UPDATE SKIP LOCKED, in its usual race."""
    seen: list[tuple[str, int]] = []
    claim = (
        "SELECT aggregate_id, id FROM pgqueue.outbox WHERE published_at IS NULL"
        " ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED"
    )
    with psycopg.connect(dsn) as slow, psycopg.connect(dsn) as quick:
        with psycopg.connect(dsn) as writer:
            for _ in range(2):
                writer.execute(
                    "INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload) VALUES ('a', 'e', '1')"
                )
        first = slow.execute(claim).fetchone()
        second = quick.execute(claim).fetchone()
        assert first is not None
        assert second is not None
        seen += [(str(second[0]), int(str(second[1]))), (str(first[0]), int(str(first[1])))]
    assert len(inversions(seen)) == 1
    assert missing(seen, [*ids(dsn), 99]) == {99}
