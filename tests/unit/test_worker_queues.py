"""What --queues says: the queues in order, and the slots that only one of them may use."""

from __future__ import annotations

import pytest

from pgqueue.config import WorkerSettings, parse_queues
from pgqueue.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "queues", "reserved"),
    [
        ("default", ("default",), {}),
        ("critical,default", ("critical", "default"), {}),
        ("critical,default,bulk", ("critical", "default", "bulk"), {"critical": 1}),
        ("critical=2,default,bulk", ("critical", "default", "bulk"), {"critical": 2}),
        ("critical,default=1,bulk=3", ("critical", "default", "bulk"), {"default": 1, "bulk": 3}),
        ("critical=0,default,bulk", ("critical", "default", "bulk"), {}),
        (" critical = 1 , default ", ("critical", "default"), {"critical": 1}),
        ("", (), {}),
    ],
)
def test_queues_are_read_in_order_with_their_reserved_slots(
    text: str, queues: tuple[str, ...], reserved: dict[str, int]
) -> None:
    assert parse_queues(text, 8) == (queues, reserved)


@pytest.mark.parametrize("text", ["a=x", "a=", "a=-1", "a=1.5", "a=1=2", "a=²"])
def test_slots_that_are_no_number_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME=SLOTS"):
        parse_queues(text, 8)


def test_with_one_slot_there_is_none_to_reserve() -> None:
    queues, reserved = parse_queues("critical,default,bulk", 1)
    assert reserved == {}
    WorkerSettings(queues=queues, reserved=reserved, concurrency=1)


def test_what_is_read_is_checked_with_the_other_settings() -> None:
    for text in ("", "a,a", "=1", "mail,,x", "mail,", ",mail", "mail, ,x"):
        queues, reserved = parse_queues(text, 8)
        with pytest.raises(ConfigError, match="queues"):
            WorkerSettings(queues=queues, reserved=reserved)
