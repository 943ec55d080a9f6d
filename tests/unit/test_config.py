"""Settings of a worker are checked once, at the edge, and name what is wrong."""

from __future__ import annotations

import dataclasses

import pytest

from pgqueue.config import WorkerSettings
from pgqueue.errors import ConfigError


def test_the_defaults_are_those_of_the_documentation() -> None:
    settings = WorkerSettings()
    assert (settings.queues, settings.concurrency, settings.prefetch) == (("default",), 8, None)
    assert (settings.visibility, settings.poll, settings.grace) == (30.0, 1.0, 30.0)
    assert (settings.flush, settings.sweep, settings.ledger) == (0.02, 0.25, 7 * 86_400.0)
    assert settings.depth_every == 15.0
    assert settings.reserved == {}


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        WorkerSettings().concurrency = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"queues": ()}, "name at least one"),
        ({"queues": ("a", "a")}, "twice"),
        ({"queues": ("a", " ")}, "blank"),
        ({"queues": ("x" * 201,)}, "longer than 200 bytes"),
        ({"queues": ("ü" * 101,)}, "longer than 200 bytes"),
        ({"concurrency": 0}, "concurrency: 0"),
        ({"concurrency": 10_001}, "concurrency"),
        ({"prefetch": -1}, "prefetch"),
        ({"prefetch": 5_001}, "prefetch"),
        ({"visibility": 0.5}, "visibility: 0.5"),
        ({"visibility": 3_601.0}, "visibility"),
        ({"visibility": float("nan")}, "visibility"),
        ({"poll": 0.0}, "poll"),
        ({"poll": 61.0}, "poll"),
        ({"grace": -1.0}, "grace"),
        ({"sweep": 0.01}, "sweep"),
        ({"ledger": 0.0}, "ledger: 0 s is not between 60 and"),
        ({"ledger": float("nan")}, "ledger"),
        (
            {"dead_retention": 0.0},
            "dead retention: 0 s (leave it out to keep dead letters) is not between 60 and",
        ),
        ({"dead_retention": -1.0}, "dead retention"),
        ({"dead_retention": float("inf")}, "dead retention"),
        ({"queues": ("a",), "reserved": {"b": 1}}, "'b' has a reserved slot but is not served"),
        ({"queues": ("a", "b"), "reserved": {"a": 0}}, "reserves no slot"),
        ({"queues": ("a", "b"), "reserved": {"a": 8}}, "leave none of 8"),
        ({"queues": ("a",), "concurrency": 1, "reserved": {"a": 1}}, "leave none of 1"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        WorkerSettings(**wrong)  # type: ignore[arg-type]
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "good",
    [
        {"concurrency": 1}, {"concurrency": 10_000}, {"prefetch": 0}, {"prefetch": 5_000}, {"visibility": 1.0},
        {"visibility": 3_600.0}, {"grace": 0.0}, {"queues": ("x" * 200,)},
        {"queues": ("a", "b"), "reserved": {"a": 7}},
    ],
)  # fmt: skip
def test_the_ends_of_each_range_are_allowed(good: dict[str, object]) -> None:
    WorkerSettings(**good)  # type: ignore[arg-type]
