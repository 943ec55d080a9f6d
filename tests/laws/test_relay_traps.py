"""docs/relay-traps.md: what other outboxes do wrong; each line names tests that exist, or why it cannot occur."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.laws.test_guarantees import written

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "relay-traps.md").read_text(encoding="utf-8")
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split(" | "))
    for line in PAGE.splitlines()
    if line.startswith("| ") and line != "| trap | here |"
]
TEST = re.compile(r"`(test_\w+)`")
SINKS = ("Kafka", "RabbitMQ", "NATS", "Redis", "SQS, SNS, Kinesis", "Pulsar", "Webhooks", "queue:")


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:60] for row in ROWS])
def test_each_trap_names_tests_that_exist_or_says_why_it_cannot_occur(row: tuple[str, ...]) -> None:
    assert len(row) == 2
    named = TEST.findall(row[1])
    assert named or "cannot occur: " in row[1]
    assert [name for name in named if name not in written()] == []


def test_every_sink_has_its_traps() -> None:
    heads = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert heads[-len(SINKS) :] == list(SINKS)
    assert len(ROWS) >= 80
