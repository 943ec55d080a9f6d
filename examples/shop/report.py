"""The last page of the demo: depth, speed, what a buyer waits, and the proof."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

from examples.shop.proof import Claim, Facts, Speed
from examples.shop.request_time import RequestTime

DEPTH = """
SELECT q.queue, coalesce(d.ready, 0), coalesce(d.delayed, 0), coalesce(d.in_flight, 0), coalesce(d.blocked, 0),
       coalesce(d.oldest_ready_s, 0)
FROM (SELECT DISTINCT queue FROM pgqueue.job_type) q LEFT JOIN pgqueue.queue_depth d USING (queue) ORDER BY 1
"""


def depth(connection: psycopg.Connection[tuple[Any, ...]]) -> Iterator[str]:
    """Return the view queue_depth as a table, with a line also for queues that are empty."""
    yield "Depth (SELECT * FROM pgqueue.queue_depth)"
    yield f"  {'queue':<12}{'ready':>9}{'delayed':>9}{'in flight':>11}{'blocked':>9}{'oldest ready':>14}"
    for queue, ready, delayed, in_flight, blocked, oldest in connection.execute(DEPTH):
        yield f"  {queue:<12}{ready:>9,}{delayed:>9,}{in_flight:>11,}{blocked:>9,}{oldest:>12.1f} s"


def rates(facts: Facts, speed: Speed) -> Iterator[str]:
    """Return how much was done a second, and how long each took from the beginning of its order."""
    yield "Speed (everything on this machine)"
    yield f"  {'':<12}{'number':>9}{'a second':>11}{'half within':>14}{'99 % within':>14}"
    yield f"  {'orders':<12}{facts.orders:>9,}{_rate(facts.orders, speed.orders_s):>11}"
    for name, number, seconds, p50, p99 in (
        ("receipts", facts.receipts, speed.receipts_s, speed.receipt_p50, speed.receipt_p99),
        ("parcels", facts.parcels, speed.parcels_s, speed.parcel_p50, speed.parcel_p99),
    ):
        yield f"  {name:<12}{number:>9,}{_rate(number, seconds):>11}{_ms(p50):>14}{_ms(p99):>14}"
    yield from _note("From the beginning of the order's transaction, the waits after the kills included.")


def waits(times: RequestTime) -> Iterator[str]:
    """Return what the buyer waits for, both ways."""
    yield f"What the buyer waits ({times.count} orders placed both ways, in turn)"
    yield f"  {'':<38}{'half within':>14}{'95 % within':>14}"
    for name, p50, p95 in (
        ("order + job + event, one transaction", times.queued_p50, times.queued_p95),
        ("order, then mail and webhook inline", times.inline_p50, times.inline_p95),
    ):
        yield f"  {name:<38}{_ms(p50):>14}{_ms(p95):>14}"
    if times.failed:
        yield from _note(
            f"{times.failed} inline: an error for the buyer, because the warehouse's reply was lost."
        )


def proof(claims: Sequence[Claim]) -> Iterator[str]:
    """Return each claim with its numbers and a tick or a cross."""
    yield "Proof"
    for claim in claims:
        yield f"  {'✓' if claim.holds else '✗'} {claim.what}"
        yield from _note(claim.numbers, indent=6)


def _note(text: str, *, indent: int = 2) -> list[str]:
    margin = " " * indent
    width = shutil.get_terminal_size().columns - 1
    return textwrap.wrap(text, width, initial_indent=margin, subsequent_indent=margin)


def _rate(number: int, seconds: float) -> str:
    return f"{number / seconds:,.0f}" if seconds else "-"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
