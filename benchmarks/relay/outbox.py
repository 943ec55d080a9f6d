"""The outbox of a measurement: filled, watched until all of it is published, and checked against the other end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import LiteralString

import psycopg

from benchmarks.relay.peers import AGGREGATES, EVENT_BYTES, EVENT_TYPE
from benchmarks.server import settle
from benchmarks.work import RunFailed

LOOK_S = 0.05
#: The rate is taken from here on: a relay that has just started has no partitions yet.
SKIPPED = 0.02

#: Numbered events, those of an aggregate spread evenly; each has a payload of EVENT_BYTES bytes.
FILL = """
INSERT INTO pgqueue.outbox (aggregate_id, event_type, payload)
SELECT 'aggregate-' || g %% %(aggregates)s, %(event_type)s,
       jsonb_build_object('n', g, 'text', repeat('x', %(bytes)s - length(g::text) - 19))
FROM generate_series(1, %(n)s) AS g
"""
PENDING: LiteralString = "SELECT EXISTS (SELECT FROM pgqueue.outbox WHERE published_at IS NULL)"
ROWS = """
SELECT id, aggregate_id, (payload->>'n')::int, published_at IS NULL, last_error FROM pgqueue.outbox
"""
TIMES = "SELECT extract(epoch FROM published_at)::float8 FROM pgqueue.outbox ORDER BY published_at"


@dataclass(frozen=True, slots=True)
class Arrived:
    """An event at the other end: the id of its key, and aggregate and number where the other end tells them."""

    id: int
    aggregate: str | None = None
    number: int | None = None


def fill(dsn: str, n: int, *, rest: bool = True) -> None:
    """Write n events in one transaction; bring the database to rest after, unless relays run already."""
    with psycopg.connect(dsn) as connection:
        given = {"n": n, "aggregates": AGGREGATES, "event_type": EVENT_TYPE, "bytes": EVENT_BYTES}
        connection.execute(FILL, given)
        odd = connection.execute(
            "SELECT count(*) FROM pgqueue.outbox WHERE length(payload::text) <> %s", [EVENT_BYTES]
        ).fetchone()
    if odd is None or odd[0]:
        raise RunFailed(f"{odd} events have not {EVENT_BYTES} bytes")
    if rest:
        settle(dsn)


def marked_at(dsn: str) -> list[float]:
    """Return when each event was marked, in order; seconds since 1970."""
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute(TIMES)]


def rate(times: list[float]) -> float:
    """Return events a second, from 2 % to the end."""
    start = int(len(times) * SKIPPED)
    return (len(times) - start) / (times[-1] - times[start])


def last_tenth_by_first(times: list[float]) -> float:
    """Return the rate of the last tenth by that of the first, which begins at 2 %."""
    n, start = len(times), int(len(times) * SKIPPED)
    first = times[start + n // 10] - times[start]
    return first / (times[-1] - times[n - n // 10])


def verify(dsn: str, arrived: Iterable[Arrived]) -> int:
    """Check that every event arrived as written and in order, and that the outbox knows; return the repetitions."""
    with psycopg.connect(dsn) as connection:
        rows = {id_: row for id_, *row in connection.execute(ROWS)}
    left = [id_ for id_, (_, _, unpublished, error) in rows.items() if unpublished or error]
    if left:
        raise RunFailed(f"{len(left)} of {len(rows)} events are not published: {rows[left[0]][3]}")
    seen: set[int] = set()
    last: dict[str, int] = {}
    repeated = 0
    for event in arrived:
        if event.id in seen:
            repeated += 1
            continue
        seen.add(event.id)
        if event.id not in rows:
            raise RunFailed(f"event {event.id} arrived, which the outbox does not have")
        aggregate, number, _, _ = rows[event.id]
        if event.aggregate not in (None, aggregate) or event.number not in (None, number):
            raise RunFailed(f"event {event.id} of {aggregate} arrived as {event}")
        if last.get(aggregate, 0) > event.id:
            raise RunFailed(f"event {event.id} of {aggregate} arrived after event {last[aggregate]}")
        last[aggregate] = event.id
    if lost := len(rows) - len(seen):
        raise RunFailed(f"{lost} of {len(rows)} events are marked as published and never arrived")
    return repeated


def wait_until_published(
    dsn: str, patience: float, alive: Iterator[None], left: LiteralString = PENDING
) -> float:
    """Wait until nothing is left; return when the database was asked. `alive` raises where there is no hope."""
    until = time.monotonic() + patience
    with psycopg.connect(dsn, autocommit=True) as connection:
        for _ in alive:
            asked = time.time()
            row = connection.execute(left).fetchone()
            if row is not None and not row[0]:
                return asked
            if time.monotonic() > until:
                break
            time.sleep(LOOK_S)
    raise RunFailed(f"events are not published after {patience:.0f} s")
