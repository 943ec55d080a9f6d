from __future__ import annotations

import math
from dataclasses import fields
from datetime import UTC, datetime, time, timedelta, tzinfo
from types import MappingProxyType
from typing import Any

import pytest

from pgqueue import App, Backoff, BadOption
from pgqueue.enqueue import Options, OptionValues, enqueue

AWARE = datetime(2030, 1, 1, tzinfo=UTC)


class Nowhere(tzinfo):
    """A time zone that does not know its offset: such a datetime is as naive as one without."""

    def utcoffset(self, _: datetime | None) -> None:
        return None

    def dst(self, _: datetime | None) -> None:
        return None

    def tzname(self, _: datetime | None) -> None:
        return None


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("queue", "", "is blank"),
        ("queue", " \t\n", "is blank"),
        ("queue", "q" * 10_240, "has 10240 bytes, more than 200"),
        ("queue", "é" * 101, "has 202 bytes"),
        ("queue", "a\0b", "NUL"),
        ("queue", "\ud800", "not valid Unicode"),
        ("queue", 5, "5 is not a string"),
        ("key", "", "is blank"),
        ("key", "k" * 513, "has 513 bytes, more than 512"),
        ("key", "a\0", "NUL"),
        ("key", 5, "not a string"),
        ("dedup_key", " ", "is blank"),
        ("dedup_key", b"x", "not a string"),
        ("idempotency_key", "k" * 10_240, "has 10240 bytes"),
        ("priority", -1, "-1 is not a whole number from 0 to 9 (lower runs first)"),
        ("priority", 10, "10 is not"),
        ("priority", True, "True is not a whole number"),
        ("priority", 1.0, "1.0 is not a whole number"),
        ("priority", "5", "'5' is not a whole number"),
        ("max_attempts", 0, "0 is not a whole number from 1 to 32767"),
        ("max_attempts", 32_768, "32768 is not"),
        ("max_attempts", True, "True is not"),
        ("run_after", -1, "-1 is not a number of seconds between 0 and ten years"),
        ("run_after", timedelta(seconds=-1), "-1.0 is not"),
        ("run_after", math.nan, "nan is not"),
        ("run_after", math.inf, "inf is not"),
        ("run_after", 1e18, "1e+18 is not"),
        ("run_after", timedelta.max, "is not a number of seconds"),
        ("run_after", True, "True is not"),
        ("run_after", "5", "'5' is not"),
        ("run_after", datetime(2030, 1, 1), "has no time zone"),  # noqa: DTZ001  # the point of the test
        ("run_after", datetime(2030, 1, 1, tzinfo=Nowhere()), "has no time zone"),
        ("run_after", time(1), "is not a number of seconds"),
        ("expires_at", datetime(2030, 1, 1), "has no time zone"),  # noqa: DTZ001  # the point of the test
        ("expires_at", 5, "5 is not a datetime"),
        ("dedup_window", 0, "0 is not"),
        ("dedup_window", -1, "-1 is not"),
        ("dedup_window", None, "None is not"),
        (
            "dedup_window",
            "forever",
            "'forever' is not a number of seconds between 0 and ten years, or \"live\"",
        ),
        ("timeout", 0, "0 is not"),
        ("timeout", -0.5, "-0.5 is not"),
        ("timeout", math.nan, "nan is not"),
        ("timeout", -math.inf, "-inf is not"),
        ("timeout", 1e18, "1e+18 is not"),
        ("backoff", 5, "5 is not a pgqueue.Backoff"),
        ("headers", 5, "is not a mapping"),
        ("headers", ["a"], "is not a mapping"),
        ("headers", {1: 2}, "with strings as keys"),
        ("headers", {"a": math.nan}, "no JSON form"),
        ("headers", {"a": object()}, "no JSON form"),
        ("headers", {"a": ["x\0"]}, "NUL"),
        ("headers", {"a\0": 1}, "NUL"),
        ("headers", {"a": "\ud800"}, "no JSON form"),
        ("headers", {"a": "x" * 65_536}, "more than 65536"),
    ],
)
def test_a_bad_option_is_refused_at_once_and_named(option: str, value: Any, says: str) -> None:
    job = App().job("ship")(lambda: None)
    with pytest.raises(BadOption) as caught:
        job.using(**{option: value})
    assert caught.value.option == option
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("queue", "'; DROP TABLE pgqueue.job; --"),
        ("queue", "q" * 200),
        ("key", "k" * 512),
        ("key", 'a"b$$c.d\\e\nf🦆'),
        ("key", str.upper),
        ("priority", 0),
        ("priority", 9),
        ("max_attempts", 32_767),
        ("run_after", 0),
        ("run_after", timedelta(days=3_650)),
        ("run_after", AWARE),
        ("expires_at", AWARE),
        ("dedup_window", "live"),
        ("dedup_window", timedelta(seconds=1)),
        ("timeout", math.inf),
        ("timeout", 0.5),
        ("backoff", Backoff()),
        ("headers", {}),
        ("headers", {"text": "\\u0000", "": None, "deep": [{"a": 1.5}]}),
        ("headers", MappingProxyType({"a": "b"})),
    ],
)
def test_a_good_option_is_kept_as_it_is(option: str, value: Any) -> None:
    assert getattr(Options().but(**{option: value}), option) == value


def test_an_unknown_option_is_refused_and_the_known_ones_are_named() -> None:
    job = App().job("ship")(lambda: None)
    with pytest.raises(
        BadOption, match="priorty: there is no such option; options are backoff, dedup_key"
    ) as caught:
        job.using(priorty=3)  # type: ignore[call-arg]  # the point of the test
    assert caught.value.option == "priorty"


def test_using_adds_to_what_was_set_and_changes_nothing_in_place() -> None:
    job = App().job("ship")(lambda: None)
    first = job.using(priority=1, queue="mail")
    second = first.using(priority=2)
    assert first._options == Options(priority=1, queue="mail")
    assert second._options == Options(priority=2, queue="mail")
    assert job._options == Options()


def test_the_keywords_and_the_options_are_the_same() -> None:
    assert list(OptionValues.__annotations__) == [f.name for f in fields(Options)]


def test_a_key_function_sees_each_payload_and_its_answer_is_checked() -> None:
    statement = enqueue("ship", ["a", "b"], '["a","b"]', Options(key=str.upper))
    assert statement.params["keys"] == ["A", "B"]
    with pytest.raises(BadOption, match="key: is blank"):
        enqueue("ship", [" "], '[" "]', Options(key=str.upper))
    with pytest.raises(BadOption, match="idempotency_key: None is not a string"):
        enqueue("ship", ["a"], '["a"]', Options(idempotency_key=lambda _: None))  # type: ignore[arg-type,return-value]


def test_one_dedup_key_for_many_jobs_is_refused() -> None:
    with pytest.raises(BadOption, match="give a function of the payload"):
        enqueue("ship", [1, 2], "[1,2]", Options(dedup_key="once"))
    assert enqueue("ship", [1], "[1]", Options(dedup_key="once")).params["dedup_keys"] == ["once"]
